"""Where gradients lie, read from a list natively: a tenth of what it takes to hand over the list.

torch answers for each tensor through its table of DLPack exchange functions, a documented C API.
What cannot be read so (another device, a subclass, sparse) goes to operators that take lists.
"""

import ctypes
import threading
import weakref
from collections.abc import Callable, Sequence
from operator import attrgetter, is_
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

_GRAD = attrgetter("grad")
_exchange = getattr(Tensor, "__dlpack_c_exchange_api__", None)
_kept = (_exchange, Tensor, Parameter, None, "grad", "is_neg", False)
"""What the library goes on using."""


def _are_same(left: Sequence[object], right: Sequence[object]) -> bool:
    return len(left) == len(right) and all(map(is_, left, right))


def _gradients(params: list[Tensor]) -> list[Any]:
    return list(map(_GRAD, params))


def _read_nothing(reader: int, tensors: list[Any], may_lack: bool) -> int:
    return 0


class Native:
    """Functions over lists: those of the library once it is loaded. ``torch.compile`` traces none.

    Attributes:
        is_loaded: whether they are.
        are_same: whether two lists hold the same objects: == on tensors would compute, and wait.
        gradients: the gradient of each parameter of a list, None where there is none.
        read: given the number of a :class:`Reader`, a list of tensors, and whether None may be
            among them (which counts as a tensor without elements), returns a number for the one
            operator that may use it while the caller keeps the list; 0 if not all of them are plain
            dense tensors on the CPU, each of them once.
        read_to_write: the same, for operators that write the tensors.
    """

    def __init__(self) -> None:
        self.is_loaded = False
        self.are_same: Callable[[list[Any], list[Any]], bool] = _are_same
        self.gradients: Callable[[list[Tensor]], list[Any]] = _gradients
        self.read: Callable[[int, list[Any], bool], int] = _read_nothing
        self.read_to_write: Callable[[int, list[Any], bool], int] = _read_nothing
        self._watchers = 0

    def load(self, path: Path) -> None:
        """Take the functions of a library, if its process lets it read lists."""
        library = ctypes.PyDLL(str(path))  # holds the GIL in calls
        begin, self._new = library.zclip_start_reading, library.zclip_new_reader
        begin.argtypes = [ctypes.py_object] * (len(_kept) + 1) + [ctypes.c_int64]
        sample = torch.empty(0)
        if _exchange is None or not begin(*_kept, sample, sample._cdata):
            return
        self.are_same, self.gradients = library.zclip_are_same, library.zclip_gradients
        self._read, self._drop = library.zclip_read, library.zclip_drop_reader
        library.zclip_are_same.argtypes = [ctypes.py_object] * 2
        library.zclip_are_same.restype = ctypes.c_bool
        library.zclip_gradients.argtypes = [ctypes.py_object]
        library.zclip_gradients.restype = ctypes.py_object
        library.zclip_new_reader.restype = library.zclip_read.restype = ctypes.c_int64
        library.zclip_read.argtypes = [ctypes.c_int64, ctypes.py_object, ctypes.c_int]
        self._drop.argtypes, self._drop.restype = [ctypes.c_int64], None
        self.read, self.is_loaded = self._read, True
        self.watch_writes(0)

    def watch_writes(self, change: int) -> None:
        """Add so many who have to see every operator that writes gradients, with its list."""
        self._watchers += change
        may_write = self.is_loaded and not self._watchers
        self.read_to_write = self._read if may_write else _read_nothing

    def new_reader(self, owner: object) -> int:
        """Return the number of a new reader, which lives as long as its owner."""
        if not self.is_loaded:
            return 0
        number: int = self._new()
        weakref.finalize(owner, self._drop, number)
        return number


native = Native()


class Reader:
    """Reads one list after another; those of the same sizes and strides fastest.

    It keeps no tensor. Copies and pickles are new ones.

    Attributes:
        number: for the functions of :class:`Native`.
    """

    def __init__(self) -> None:
        self.number = native.new_reader(self)

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return Reader, ()


class _OfThread(threading.local):
    def __init__(self) -> None:
        self.reader = Reader()


_of_thread = _OfThread()


def reader_of_thread() -> Reader:
    """Return the reader that this thread has for all who keep none."""
    if native.is_loaded and not _of_thread.reader.number:  # made before the library was loaded
        _of_thread.reader = Reader()
    return _of_thread.reader
