"""Every implementation of the operators that this machine can run, by name.

Each value has the same functions as ``zclip.reference``. A new backend is one new entry.
"""

import functools
import os
from types import SimpleNamespace

import torch

from zclip import reference
from zclip.backends import OPS, native, triton


def _native(path: str) -> SimpleNamespace:
    """The compiled operators, forced onto one of their CPU paths."""

    def call(name, *args):
        before = os.environ.get("ZCLIP_CPU")
        os.environ["ZCLIP_CPU"] = path
        try:
            return getattr(torch.ops.zclip, name)(*args)
        finally:
            os.environ.pop("ZCLIP_CPU")
            if before is not None:
                os.environ["ZCLIP_CPU"] = before

    return SimpleNamespace(**{name: functools.partial(call, name) for name in OPS})


def _triton() -> SimpleNamespace:
    """The Triton kernels on CPU tensors, run by Triton's interpreter.

    An operator that has none is the reference's, as it would be for a tensor on a GPU.
    """

    def call(name, *args):
        return triton.implementation_of(name, "CPU")(*args)

    ours = {name: functools.partial(call, name) for name in triton.MODULE_OF}
    return SimpleNamespace(**{name: ours.get(name, getattr(reference, name)) for name in OPS})


BACKENDS = {"reference": reference}
if native.is_loaded():
    BACKENDS["native-portable"] = _native("portable")
    BACKENDS["native-avx2"] = _native("avx2")
if triton.problem() is None and os.environ.get("TRITON_INTERPRET") == "1":
    BACKENDS["triton-interpret"] = _triton()


def steps_for(backend, count: int, interpreted: int = 3) -> int:
    """How many steps a test of a whole run takes: the interpreter is a thousand times slower."""
    return min(count, interpreted) if backend is BACKENDS.get("triton-interpret") else count
