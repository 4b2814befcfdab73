"""Triton backend of the adaptive zclip::clip_by_<rule>_: kernels measure and scale.

The rule itself runs as the reference has it: a handful of small torch operations on the device,
their number independent of the number of tensors.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from zclip import reference
from zclip.backends.triton.grad_stats import launch_finish, launch_partials
from zclip.backends.triton.launch import on_device
from zclip.backends.triton.scale_ import launch_scale
from zclip.backends.triton.tensor_list import WRITE, TensorList
from zclip.reference.report import reported_norm

Clipped = tuple[Tensor, Tensor, Tensor, Tensor]
"""Norm before clipping (float64 if a gradient is), stats, coefs, verdict."""


def clip_by_zclip_(grads: list[Tensor], state: Tensor, *settings: Any) -> Clipped:
    """Clip by :func:`zclip.reference.zclip_`."""
    return _clip_by(reference.zclip_, grads, state, *settings)


def clip_by_adagc_(grads: list[Tensor], state: Tensor, *settings: Any) -> Clipped:
    """Clip by :func:`zclip.reference.adagc_`."""
    return _clip_by(reference.adagc_, grads, state, *settings)


def clip_by_spike_skip_(grads: list[Tensor], state: Tensor, *loss_and_settings: Any) -> Clipped:
    """Clip by :func:`zclip.reference.spike_skip_`."""
    return _clip_by(reference.spike_skip_, grads, state, *loss_and_settings)


def clip_by_auto_clip_(grads: list[Tensor], state: Tensor, *settings: Any) -> Clipped:
    """Clip by :func:`zclip.reference.auto_clip_`."""
    return _clip_by(reference.auto_clip_, grads, state, *settings)


def _clip_by(
    rule: Callable[..., tuple[Tensor, Tensor]], grads: list[Tensor], state: Tensor, *settings: Any
) -> Clipped:
    tensors = TensorList(grads, WRITE)
    table = tensors.table
    with on_device(table.device):
        slots, _ = launch_partials(table)
        stats = launch_finish(table, slots)
        coefs, verdict = rule(state, stats, *settings)
        launch_scale(table, coefs.contiguous())
        tensors.write_back()
        dtype = torch.float64 if table.has_float64 else torch.float32
        return reported_norm(stats).to(dtype), stats, coefs, verdict
