"""Gradient norms, clipping and NaN/Inf flags that never make the device wait."""

from zclip import backends as _backends
from zclip.functional import clip_grad_norm_, clip_grad_value_, get_total_norm
from zclip.ops import grad_stats

BACKEND_REASONS = _backends.load()
"""Why each backend is active or not; ``python -m zclip.info`` prints it."""

__version__ = "0.1.0"
__all__ = ["clip_grad_norm_", "clip_grad_value_", "get_total_norm", "grad_stats"]
