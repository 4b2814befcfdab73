"""Clippers: objects that remember the norms of past steps and decide with them."""

from zclip.clippers.adagc import AdaGC
from zclip.clippers.agc import AGC
from zclip.clippers.auto_clip import AutoClip
from zclip.clippers.clipper import Clipper
from zclip.clippers.global_norm import GlobalNorm
from zclip.clippers.loss_watch import LossWatch
from zclip.clippers.python_rule import PythonRule
from zclip.clippers.result import ClipResult
from zclip.clippers.spike_skip import SpikeSkip
from zclip.clippers.zscore import ZClip, apply_in_place_clipping

CLIPPERS: dict[str, type[Clipper]] = {
    "zclip": ZClip,
    "adagc": AdaGC,
    "global_norm": GlobalNorm,
    "spike_skip": SpikeSkip,
    "agc": AGC,
    "auto_clip": AutoClip,
}
"""Every clipper by the name that :func:`zclip.wrap` takes."""

__all__ = [
    "AGC",
    "CLIPPERS",
    "AdaGC",
    "AutoClip",
    "ClipResult",
    "Clipper",
    "GlobalNorm",
    "LossWatch",
    "PythonRule",
    "SpikeSkip",
    "ZClip",
    "apply_in_place_clipping",
]
