"""Operators that write gradients without raising their version, made to do so.

All of torch's in-place operators raise the version of what they write; the one of
``GradScaler.unscale_`` and those of this library do not. Gradients that were measured before would
seem unchanged. So as long as something is attached, a kernel in front of them counts.
"""

import weakref
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.library import Library

from zclip.reading import native

_UNSCALE = "_amp_foreach_non_finite_check_and_unscale_"
_WRITERS = {
    "aten": (_UNSCALE,),
    "zclip": ("scale_", "clamp_", "zero_nonfinite_", "clip_by_", "agc_"),
}


class CountedWrites:
    """Counts as long as one of these lives and is not stopped."""

    _running: ClassVar[int] = 0
    _libraries: ClassVar[list[Library]] = []

    def __init__(self) -> None:
        CountedWrites._running += 1
        native.watch_writes(1)
        if not CountedWrites._libraries:
            CountedWrites._libraries = [_counting(space, ops) for space, ops in _WRITERS.items()]
        self.stop = weakref.finalize(self, CountedWrites._end)

    @staticmethod
    def _end() -> None:
        CountedWrites._running -= 1
        native.watch_writes(-1)
        if not CountedWrites._running:
            CountedWrites._libraries = []  # their end takes the registrations back


def _counting(namespace: str, names: tuple[str, ...]) -> Library:
    library = Library(namespace, "IMPL")
    for name in names:
        library.impl(name, _counted(namespace, name), "ADInplaceOrView", with_keyset=True)
    return library


def _counted(namespace: str, name: str) -> Any:
    write = getattr(getattr(torch.ops, namespace), name).default
    below = torch._C._after_ADInplaceOrView_keyset

    def count_and_write(keys: Any, grads: list[Tensor], *arguments: Any) -> Any:
        if not (name == _UNSCALE and _is_one(arguments[-1])):
            increment_version(grads)
        return write.redispatch(keys & below, grads, *arguments)

    return count_and_write


def _is_one(factor: Tensor) -> bool:
    """Return whether GradScaler only looks for Inf; on an accelerator that cannot be known."""
    return factor.device.type == "cpu" and float(factor) == 1.0
