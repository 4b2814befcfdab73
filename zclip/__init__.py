"""Gradient norms, clipping and NaN/Inf flags that never make the device wait."""

from typing import Any

from zclip import backends as _backends
from zclip import clippers as _clippers
from zclip.clippers import *  # noqa: F403  every clipper
from zclip.functional import clip_grad_norm_, clip_grad_value_, get_total_norm
from zclip.mailbox import Mailbox
from zclip.ops import grad_stats
from zclip.optim import ClippedOptimizer, wrap
from zclip.parallel.fsdp1 import is_fsdp_model

BACKEND_REASONS = _backends.load()
"""Why each backend is active or not; ``python -m zclip.info`` prints it."""

__version__ = "0.1.0"
__all__ = [
    "ClippedOptimizer",
    "Mailbox",
    "clip_grad_norm_",
    "clip_grad_value_",
    "get_total_norm",
    "grad_stats",
    "is_fsdp_model",
    "wrap",
]
__all__ += _clippers.__all__


def __getattr__(name: str) -> Any:
    """Load on first use what needs a package that may not be installed."""
    if name == "ZClipLightningCallback":
        from zclip.integrations.lightning import ZClipLightningCallback

        return ZClipLightningCallback
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
