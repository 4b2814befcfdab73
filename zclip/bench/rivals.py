"""How others do the same: torch, and apex, TransformerEngine and DeepSpeed where installed."""

from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec

import torch
from torch import Tensor
from torch.nn import Parameter

NormAndClip = Callable[[Sequence[Parameter], float], Tensor | float]
"""Clips the gradients of the parameters to a norm, in place; returns the norm before."""

PACKAGES = {"apex": "apex", "TransformerEngine": "transformer_engine", "DeepSpeed": "deepspeed"}
"""Rival to the package that it comes with."""

GPU_ONLY = ("apex", "TransformerEngine")


def problem_with(rival: str, device: torch.device) -> str | None:
    """Return in one line why an optional rival cannot take part; None if it can.

    Raises:
        ValueError: there is no such rival.
    """
    if rival not in PACKAGES:
        raise ValueError(f"rival: expected one of {', '.join(PACKAGES)}, got {rival!r}")
    if find_spec(PACKAGES[rival]) is None:
        return f"{rival} takes no part: the package {PACKAGES[rival]} is not installed"
    if rival in GPU_ONLY and device.type != "cuda":
        return f"{rival} takes no part: it needs a GPU, and this run is on {device.type}"
    return None


def by_torch(foreach: bool) -> NormAndClip:
    """Return torch's own clipping, in one of its two forms."""

    def clip(params: Sequence[Parameter], limit: float) -> Tensor:
        return torch.nn.utils.clip_grad_norm_(params, limit, foreach=foreach)

    return clip


def clip_with(rival: str) -> NormAndClip:
    """Return the clipping of an optional rival; see :func:`problem_with` first."""
    return {"apex": _apex, "TransformerEngine": _transformer_engine, "DeepSpeed": _deepspeed}[
        rival
    ]()


def _apex() -> NormAndClip:
    clip: NormAndClip = import_module("apex.contrib.clip_grad").clip_grad_norm_
    return clip


def _transformer_engine() -> NormAndClip:
    """As Megatron-LM calls it: one norm over all gradients, then always a scaling pass."""
    te = import_module("transformer_engine.pytorch.optimizers")

    def clip(params: Sequence[Parameter], limit: float) -> Tensor:
        grads = [p.grad for p in params]
        overflow = torch.zeros(1, dtype=torch.int, device=params[0].device)
        norm: Tensor
        norm, _ = te.multi_tensor_applier(te.multi_tensor_l2norm, overflow, [grads], False)
        coef = (limit / (norm + 1e-6)).clamp(max=1.0)
        scale = getattr(te, "multi_tensor_scale_tensor", None)
        if scale is None:  # older releases take a number, which waits for the device
            te.multi_tensor_applier(te.multi_tensor_scale, overflow, [grads, grads], coef.item())
        else:
            te.multi_tensor_applier(scale, overflow, [grads, grads], coef)
        return norm

    return clip


def _deepspeed() -> NormAndClip:
    utilities = import_module("deepspeed.runtime.utils")

    def clip(params: Sequence[Parameter], limit: float) -> Tensor | float:
        norm: Tensor = utilities.clip_tensors_by_global_norm([p.grad for p in params], limit)
        return norm

    return clip
