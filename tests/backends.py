"""Every implementation of the operators that this machine can run, by name.

Each value has the same functions as ``zclip.reference``. A new backend is one new entry.
"""

import functools
import os
from types import SimpleNamespace

import torch

from tests.simt import build, device
from zclip import reference
from zclip.backends import OPS, native


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


BACKENDS = {"reference": reference}
if native.is_loaded():
    BACKENDS["native-portable"] = _native("portable")
    BACKENDS["native-avx2"] = _native("avx2")
if build.CAN_RUN:
    # The CUDA kernels, executed on the CPU. What they leave out, the reference answers.
    for order in ("forward", "reverse", "random"):
        BACKENDS[f"simt-{order}"] = SimpleNamespace(
            **{**vars(reference), **vars(device.backend(order))}
        )
