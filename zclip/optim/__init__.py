"""Optimizers that clip: fused ones of our own, and a wrapper for any other."""

from zclip.optim.adam import Adam, AdamW
from zclip.optim.clipped import APPLY, ClippedOptimizer, wrap
from zclip.optim.fused import CLIP_KEY, FusedOptimizer, Guard
from zclip.optim.in_backward import StepInBackward, step_in_backward
from zclip.optim.lion import Lion
from zclip.optim.result import StepResult
from zclip.optim.sgd import SGD

__all__ = [
    "APPLY",
    "CLIP_KEY",
    "SGD",
    "Adam",
    "AdamW",
    "ClippedOptimizer",
    "FusedOptimizer",
    "Guard",
    "Lion",
    "StepInBackward",
    "StepResult",
    "step_in_backward",
    "wrap",
]
