"""What every clip rule begins and ends with: the health of the gradients, and the verdict."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from zclip.layout import (
    CLIP_COUNT,
    CLIPPED,
    HAS_INF,
    HAS_NAN,
    INF,
    NAN,
    NUM_COUNTERS,
    ON_NONFINITE,
    OVERFLOW,
    PROPAGATE,
    SKIP_COUNT,
    STEPS,
    SUMSQ,
    ZERO,
)

NORM_EPS = 1e-6  # torch adds this to the norm before dividing
LARGEST_FLOAT = torch.finfo(torch.float32).max


class Health(NamedTuple):
    """What the stats say about the gradients as one vector; each field is a 0-dim tensor."""

    norm: Tensor  # NaN or Inf if an element is
    has_nan: Tensor
    has_inf: Tensor
    overflow: Tensor  # every element is finite and the norm is not, in float32

    @property
    def unfit(self) -> Tensor:
        """Whether nothing should be learned from these gradients."""
        return self.has_nan | self.has_inf | self.overflow

    def refused(self, on_nonfinite: int) -> Tensor:
        """Whether an adaptive rule skips the step because of what its gradients hold."""
        return self.unfit & (on_nonfinite == ON_NONFINITE["skip"])


def health_of(stats: Tensor, nonfinite: int = PROPAGATE) -> Health:
    """Return the health of the gradients that ``stats`` measured."""
    norm = reported_norm(stats, nonfinite)
    has_nan, has_inf = stats[:, NAN].sum() > 0, stats[:, INF].sum() > 0
    return Health(norm, has_nan, has_inf, ~has_nan & ~has_inf & (norm > LARGEST_FLOAT))


def reported_norm(stats: Tensor, nonfinite: int = PROPAGATE) -> Tensor:
    """Return the norm as torch would report it: NaN or Inf if an element is."""
    norm = stats[:, SUMSQ].sum().sqrt()
    if nonfinite == ZERO:
        return norm
    norm = torch.where(stats[:, INF].sum() > 0, math.inf, norm)
    return torch.where(stats[:, NAN].sum() > 0, math.nan, norm)


def norms_of(stats: Tensor) -> Tensor:
    """Return the norm of each tensor: NaN or Inf if an element is."""
    norms = torch.where(stats[:, INF] > 0, math.inf, stats[:, SUMSQ].sqrt())
    return torch.where(stats[:, NAN] > 0, math.nan, norms)


def worst_of(stats: Tensor) -> Tensor:
    """Index of the first tensor with a bad element, else of the one with the largest norm."""
    if stats.shape[0] == 0:
        return stats.new_full((), -1.0)
    bad = stats[:, NAN] + stats[:, INF] > 0
    return torch.where(bad.any(), bad.to(torch.uint8).argmax(), stats[:, SUMSQ].argmax())


def report(
    state: Tensor,
    stats: Tensor,
    health: Health,
    *,
    blocked: Tensor,
    clipped: Tensor,
    clipped_norm: Tensor,
    flags: Tensor | int = 0,
    z: Tensor | float = 0.0,
    threshold: Tensor | float = 0.0,
    mean: Tensor | float = 0.0,
    std: Tensor | float = 0.0,
    loss: Tensor | float = 0.0,
    loss_ratio: Tensor | float = 0.0,
) -> Tensor:
    """Count the step in ``state``, unless that is empty, and return the verdict about it."""
    counters: list[Tensor | float] = [0.0, 0.0, 0.0]
    if state.numel():
        state[:NUM_COUNTERS] += torch.stack([torch.ones_like(blocked), clipped, blocked])
        counters = [state[CLIP_COUNT], state[SKIP_COUNT], state[STEPS]]
    flags = flags + HAS_NAN * health.has_nan + HAS_INF * health.has_inf
    flags = flags + OVERFLOW * health.overflow + CLIPPED * clipped
    columns = [
        blocked,
        flags,
        health.norm,
        clipped_norm,
        z,
        threshold,
        mean,
        std,
        loss,
        loss_ratio,
        worst_of(stats),
        *counters,
    ]
    # A fill runs on the device; assigning a Python number to an element might copy from the host.
    return torch.stack(
        [(c if isinstance(c, Tensor) else stats.new_full((), c)).to(torch.float32) for c in columns]
    )
