"""Clippers: objects that remember the norms of past steps and decide with them."""

import inspect
from collections.abc import Mapping
from typing import Any

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


def make_clipper(clipper: str | Clipper, settings: Mapping[str, Any]) -> Clipper:
    """Return the clipper that an argument ``clipper`` stands for.

    Args:
        clipper: a clipper, which has its settings already, or the name of one.
        settings: those of a clipper given by name.

    Raises:
        ValueError: there is no clipper of that name.
        TypeError: it is neither, or has no such settings.
    """
    if isinstance(clipper, str):
        if clipper not in CLIPPERS:
            raise ValueError(f"clipper: expected one of {', '.join(CLIPPERS)}, got {clipper!r}")
        kind = CLIPPERS[clipper]
        known = inspect.signature(kind).parameters
        if unknown := settings.keys() - known.keys():
            raise TypeError(
                f"{kind.__name__}: expected settings among {', '.join(known)}, got "
                f"{', '.join(sorted(unknown))}"
            )
        return kind(**settings)
    if not isinstance(clipper, Clipper):
        got = repr(clipper) if isinstance(clipper, type) else type(clipper).__name__
        raise TypeError(
            f"clipper: expected a zclip.Clipper or one of {', '.join(CLIPPERS)}, got {got}"
        )
    if settings:
        raise TypeError(
            f"clipper: expected a name beside {', '.join(settings)}, got "
            f"{type(clipper).__name__}; set these on it"
        )
    return clipper


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
