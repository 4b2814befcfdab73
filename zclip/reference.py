"""The specification: each operator in plain torch, written to be read, not to be fast.

Backends are tested against these functions. They also answer on every device that has no kernels
of ours, so they must not wait for it: no value is read here, only tensors are made of tensors.
"""

import math

import torch
from torch import Tensor

from zclip.checks import check_one_device, check_tensors, check_writable
from zclip.layout import (
    BLOCKED,
    CLIP_COUNT,
    CLIPPED,
    CLIPPED_NORM,
    CLIPS,
    ERROR,
    FLAGS,
    HAS_INF,
    HAS_NAN,
    INF,
    KEEP,
    NAN,
    NORM,
    NUM_VERDICT,
    OVERFLOW,
    REFUSE,
    SKIP,
    SKIP_COUNT,
    SKIPS,
    STEP,
    STEPS,
    SUMSQ,
    THRESHOLD,
    WORST,
    ZERO,
)
from zclip.schemas import norm_dtype, wide_dtype

NORM_EPS = 1e-6  # torch adds this to the norm before dividing
LARGEST_FLOAT = torch.finfo(torch.float32).max


def grad_stats(grads: list[Tensor]) -> Tensor:
    """Sum of squares of the finite elements, and how many are NaN and Inf, per tensor."""
    return power_stats(grads, 2.0)


def power_stats(grads: list[Tensor], p: float) -> Tensor:
    """As :func:`grad_stats` with ``|x|**p`` for the square; the largest ``|x|`` if p is inf."""
    check_tensors(grads)
    check_one_device(grads)
    rows = []
    for grad in grads:
        x = grad.detach().to(wide_dtype(grad.device))
        size = torch.where(x.isfinite(), x, 0).abs()
        if math.isinf(p):
            power = size.amax() if x.numel() else size.sum()
        else:
            power = size.pow(p).sum()
        rows.append(torch.stack([power, x.isnan().sum(), x.isinf().sum()]))
    return torch.stack(rows)


def global_norm_(
    state: Tensor, stats: Tensor, max_norm: float, nonfinite: int
) -> tuple[Tensor, Tensor]:
    """Choose one coefficient for all gradients: ``min(1, max_norm / (norm + 1e-6))``."""
    count = stats.shape[0]
    norm = reported_norm(stats, nonfinite)
    has_nan, has_inf = stats[:, NAN].sum() > 0, stats[:, INF].sum() > 0
    bad = has_nan | has_inf
    overflow = ~bad & (norm > LARGEST_FLOAT)
    blocked = (bad | overflow) & (nonfinite in (SKIP, ERROR))

    wanted = max_norm / (norm + NORM_EPS)
    coef = torch.where(wanted >= 1.0, KEEP, wanted)
    coef = torch.where(blocked, REFUSE if nonfinite == SKIP else KEEP, coef)
    clipped = ~blocked & ~(coef >= 1.0)

    verdict = stats.new_zeros(NUM_VERDICT, dtype=torch.float32)
    verdict[BLOCKED] = blocked
    verdict[FLAGS] = HAS_NAN * has_nan + HAS_INF * has_inf + OVERFLOW * overflow + CLIPPED * clipped
    verdict[NORM] = norm
    verdict[CLIPPED_NORM] = torch.where(coef == REFUSE, 0.0, norm * coef)
    verdict[THRESHOLD].fill_(max_norm)
    verdict[WORST] = _worst(stats)
    if state.numel():
        state += torch.stack([torch.ones_like(blocked), clipped, blocked])
        verdict[STEP] = state[STEPS]
        verdict[CLIPS] = state[CLIP_COUNT]
        verdict[SKIPS] = state[SKIP_COUNT]
    return coef.expand(count).clone(), verdict


def reported_norm(stats: Tensor, nonfinite: int) -> Tensor:
    """Return the norm as torch would report it: NaN or Inf if an element is."""
    norm = stats[:, SUMSQ].sum().sqrt()
    if nonfinite == ZERO:
        return norm
    norm = torch.where(stats[:, INF].sum() > 0, math.inf, norm)
    return torch.where(stats[:, NAN].sum() > 0, math.nan, norm)


def _worst(stats: Tensor) -> Tensor:
    """Index of the first tensor with a bad element, else of the one with the largest norm."""
    if stats.shape[0] == 0:
        return stats.new_full((), -1.0)
    bad = stats[:, NAN] + stats[:, INF] > 0
    return torch.where(bad.any(), bad.to(torch.uint8).argmax(), stats[:, SUMSQ].argmax())


def scale_(grads: list[Tensor], coefs: Tensor) -> None:
    """Multiply each gradient by its coefficient, in place, as :mod:`zclip.layout` defines it."""
    check_tensors(grads)
    check_one_device([*grads, coefs])
    check_writable(grads)
    for grad, coef in zip(grads, coefs.unbind(), strict=True):
        # Multiplying in the wide dtype rounds once, also where float32 could not hold coef.
        scaled = (grad.to(wide_dtype(grad.device)) * coef).to(grad.dtype)
        scaled = torch.where(coef == REFUSE, 0, scaled)
        grad.copy_(torch.where(coef == KEEP, grad, scaled))


def zero_nonfinite_(grads: list[Tensor], stats: Tensor) -> None:
    """Replace every NaN and Inf by zero, in place. ``stats`` lets other backends skip the rest."""
    check_tensors(grads)
    check_one_device([*grads, stats])
    check_writable(grads)
    for grad in grads:
        grad.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)


def clamp_(grads: list[Tensor], limit: float) -> None:
    """Bound every element to ``[-limit, limit]``, in place; a NaN stays."""
    check_tensors(grads)
    check_one_device(grads)
    check_writable(grads)
    for grad in grads:
        if limit <= torch.finfo(grad.dtype).max:  # a larger limit bounds nothing, as infinity
            grad.clamp_(-limit, limit)


def clip_by_global_norm_(
    grads: list[Tensor], state: Tensor, max_norm: float, nonfinite: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Measure, choose and scale in one call; the norm is float64 if a gradient is."""
    check_writable(grads)
    stats = grad_stats(grads)
    coefs, verdict = global_norm_(state, stats, max_norm, nonfinite)
    if nonfinite == ZERO:
        zero_nonfinite_(grads, stats)
    scale_(grads, coefs)
    return reported_norm(stats, nonfinite).to(norm_dtype(grads)), stats, coefs, verdict


def read_probe(tensors: list[Tensor]) -> Tensor:
    """Read every element and do next to nothing with it: a yardstick for benchmarks."""
    return torch.stack([t.sum() for t in tensors])


def native_features() -> int:
    """Return the features of the compiled extension: none of them."""
    return 0
