"""Skip a step whose norm or loss stands out of a window of those before it, as OLMo-core does."""

from typing import NamedTuple

import torch
from torch import Tensor

from zclip.layout import (
    KEEP,
    LOSS_NAN,
    LOSS_SPIKE,
    LOSSES_SEEN_COLUMN,
    NORMS_SEEN_COLUMN,
    ON_NONFINITE,
    REFUSE,
    SPIKE,
    WINDOW_COLUMN,
)
from zclip.reference.report import health_of, report
from zclip.reference.ring import filled_part, push

STD_FLOOR = 1e-6  # of |mean|: a window of equal values must not make rounding noise a spike


def spike_skip_(
    state: Tensor,
    stats: Tensor,
    loss: Tensor,
    window: int,
    sigma: float,
    min_count: int,
    on_nonfinite: int,
) -> tuple[Tensor, Tensor]:
    """Skip the step if norm or loss exceeds ``mean + sigma * std`` of the last accepted ones.

    The standard deviation is the unbiased one, as in OLMo-core. A window judges once it holds
    max(2, min_count) values. What is skipped never enters a window; with ``official``, as in
    OLMo-core, everything does, and a NaN is let through while the window is too short to judge.

    Args:
        state: float64 [5 + 2 * window].
        stats: float64 [N, 3].
        loss: 0-dim, of any floating dtype; an empty tensor if there is none.
        window: how many values to remember.
        sigma: how many standard deviations are a spike.
        min_count: how many values it takes to judge.
        on_nonfinite: as in :data:`zclip.layout.ON_NONFINITE`.
    """
    health = health_of(stats)
    official = on_nonfinite == ON_NONFINITE["official"]
    norms = state[WINDOW_COLUMN : WINDOW_COLUMN + window]
    losses = state[WINDOW_COLUMN + window : WINDOW_COLUMN + 2 * window]
    enough = max(2, min_count)

    norm_view = _view(norms, state[NORMS_SEEN_COLUMN], health.norm, sigma, enough, official)
    no = torch.zeros_like(health.has_nan)
    bad_loss = loss_spike = no
    loss_value: Tensor | float = 0.0
    if loss.numel():
        loss_value = loss.detach().reshape(()).to(state.dtype)
        loss_view = _view(losses, state[LOSSES_SEEN_COLUMN], loss_value, sigma, enough, official)
        bad_loss, loss_spike = ~loss_value.isfinite(), loss_view.is_spike

    unfit = (health.unfit | bad_loss) & (not official)
    norm_spike = norm_view.is_spike & ~unfit
    loss_spike = loss_spike & ~unfit
    refused = unfit | norm_spike | loss_spike
    enters = ~refused | official
    push(norms, state[NORMS_SEEN_COLUMN], health.norm, enters)
    if isinstance(loss_value, Tensor):
        push(losses, state[LOSSES_SEEN_COLUMN], loss_value, enters)

    coef = torch.where(refused, REFUSE, torch.full_like(health.norm, KEEP))
    verdict = report(
        state,
        stats,
        health,
        blocked=refused,
        clipped=no,
        clipped_norm=torch.where(refused, 0.0, health.norm),
        flags=SPIKE * norm_spike + LOSS_NAN * bad_loss + LOSS_SPIKE * loss_spike,
        z=norm_view.z,
        threshold=norm_view.threshold,
        mean=norm_view.mean,
        std=norm_view.std,
        loss=loss_value,
    )
    return coef.expand(stats.shape[0]).clone(), verdict


class _View(NamedTuple):
    """A value seen against its window; all zero while the window is too short to judge."""

    is_spike: Tensor
    z: Tensor
    threshold: Tensor
    mean: Tensor
    std: Tensor


def _view(
    values: Tensor, seen: Tensor, value: Tensor, sigma: float, enough: int, official: bool
) -> _View:
    filled = filled_part(values, seen)
    count = filled.sum()
    ready = count >= enough
    mean = torch.where(filled, values, 0.0).sum() / count
    var = torch.where(filled, values - mean, 0.0).square().sum() / (count - 1)
    std = var.sqrt()
    if not official:
        std = torch.maximum(std, STD_FLOOR * mean.abs())
    # Not "value > threshold": a NaN must be skipped.
    is_spike = ready & ~(value - mean <= sigma * std)
    shown = ((value - mean) / std, mean + sigma * std, mean, std)
    return _View(is_spike, *(torch.where(ready, x, 0.0) for x in shown))
