"""Triton backend of the adaptive zclip::clip_by_<rule>_: measure, judge, scale.

Four launches, two more per further dtype, whatever the number of tensors: partials, finish, the
rule, scale.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from zclip.backends.triton.adagc_ import launch_adagc
from zclip.backends.triton.auto_clip_ import launch_auto_clip
from zclip.backends.triton.grad_stats import launch_finish, launch_partials
from zclip.backends.triton.launch import on_device
from zclip.backends.triton.scale_ import launch_scale
from zclip.backends.triton.spike_skip_ import launch_spike_skip
from zclip.backends.triton.tensor_list import WRITE, TensorList
from zclip.backends.triton.zclip_ import launch_zclip

Clipped = tuple[Tensor, Tensor, Tensor, Tensor]
"""Norm before clipping (float64 if a gradient is), stats, coefs, verdict."""


def clip_by_zclip_(grads: list[Tensor], state: Tensor, *settings: Any) -> Clipped:
    """Clip by :func:`zclip.reference.zclip_`."""
    return _clip_by(launch_zclip, grads, state, *settings)


def clip_by_adagc_(grads: list[Tensor], state: Tensor, *settings: Any) -> Clipped:
    """Clip by :func:`zclip.reference.adagc_`."""
    return _clip_by(launch_adagc, grads, state, *settings)


def clip_by_spike_skip_(grads: list[Tensor], state: Tensor, *loss_and_settings: Any) -> Clipped:
    """Clip by :func:`zclip.reference.spike_skip_`."""
    return _clip_by(launch_spike_skip, grads, state, *loss_and_settings)


def clip_by_auto_clip_(grads: list[Tensor], state: Tensor, *settings: Any) -> Clipped:
    """Clip by :func:`zclip.reference.auto_clip_`."""
    return _clip_by(launch_auto_clip, grads, state, *settings)


def _clip_by(
    launch_rule: Callable[..., tuple[Tensor, Tensor, Tensor]],
    grads: list[Tensor],
    state: Tensor,
    *settings: Any,
) -> Clipped:
    tensors = TensorList(grads, WRITE)
    table = tensors.table
    with on_device(table.device):
        slots, _ = launch_partials(table)
        stats = launch_finish(table, slots)
        norm_dtype = torch.float64 if table.has_float64 else torch.float32
        norm, coefs, verdict = launch_rule(state, stats, norm_dtype, *settings)
        launch_scale(table, coefs)
        tensors.write_back()
    return norm, stats, coefs, verdict
