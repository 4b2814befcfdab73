"""The fused operators: measure, choose and scale in one call, made of the separate ones."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from zclip.checks import check_writable
from zclip.layout import PROPAGATE, ZERO
from zclip.reference.adagc import adagc_
from zclip.reference.auto_clip import auto_clip_
from zclip.reference.global_norm import global_norm_
from zclip.reference.grad_stats import grad_stats
from zclip.reference.report import reported_norm
from zclip.reference.scale import scale_, zero_nonfinite_
from zclip.reference.spike_skip import spike_skip_
from zclip.reference.zclip import zclip_
from zclip.schemas import norm_dtype

Clipped = tuple[Tensor, Tensor, Tensor, Tensor]
"""Norm before clipping (float64 if a gradient is), stats, coefs, verdict."""


def clip_by_global_norm_(
    grads: list[Tensor], state: Tensor, max_norm: float, nonfinite: int
) -> Clipped:
    """Clip by :func:`global_norm_`."""
    return _clip_by(global_norm_, grads, state, max_norm, nonfinite, nonfinite=nonfinite)


def clip_by_zclip_(grads: list[Tensor], state: Tensor, *settings: Any) -> Clipped:
    """Clip by :func:`zclip_`."""
    return _clip_by(zclip_, grads, state, *settings)


def clip_by_adagc_(grads: list[Tensor], state: Tensor, *settings: Any) -> Clipped:
    """Clip by :func:`adagc_`."""
    return _clip_by(adagc_, grads, state, *settings)


def clip_by_spike_skip_(grads: list[Tensor], state: Tensor, *loss_and_settings: Any) -> Clipped:
    """Clip by :func:`spike_skip_`."""
    return _clip_by(spike_skip_, grads, state, *loss_and_settings)


def clip_by_auto_clip_(grads: list[Tensor], state: Tensor, *settings: Any) -> Clipped:
    """Clip by :func:`auto_clip_`."""
    return _clip_by(auto_clip_, grads, state, *settings)


def _clip_by(
    rule: Callable[..., tuple[Tensor, Tensor]],
    grads: list[Tensor],
    state: Tensor,
    *settings: Any,
    nonfinite: int = PROPAGATE,
) -> Clipped:
    check_writable(grads)
    stats = grad_stats(grads)
    coefs, verdict = rule(state, stats, *settings)
    if nonfinite == ZERO:
        zero_nonfinite_(grads, stats)
    scale_(grads, coefs)
    return reported_norm(stats, nonfinite).to(norm_dtype(grads)), stats, coefs, verdict
