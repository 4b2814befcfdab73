"""Our operators as one chosen backend answers them, whatever the dispatcher would choose."""

import functools
import os
from types import SimpleNamespace
from typing import Any

import torch

from zclip import reference
from zclip.backends import OPS, foreach, native, triton

BACKENDS = ("auto", "native", "portable", "triton", "foreach", "reference")
"""``auto`` is what users call. The others are operators: one crossing, no Python around it."""


def operators(backend: str, device: torch.device) -> SimpleNamespace:
    """Return all operators of a backend, by name.

    Raises:
        ValueError: the backend cannot serve tensors of this device; says why.
    """
    if backend == "reference":
        return SimpleNamespace(**{name: getattr(reference, name) for name in OPS})
    if backend == "foreach":
        if device.type != "cpu":
            raise ValueError("--backend foreach serves CPU tensors only")
        theirs = foreach.implementations(OPS)
        return SimpleNamespace(**{n: theirs.get(n, getattr(reference, n)) for n in OPS})
    if backend == "triton":
        if device.type != "cuda":
            raise ValueError("--backend triton needs a GPU: its interpreter measures nothing")
        if problem := triton.problem():
            raise ValueError(f"--backend triton: {problem}")
        ours = {n: triton.implementation_of(n, "CUDA") for n in triton.MODULE_OF}
        return SimpleNamespace(**{n: ours.get(n, getattr(reference, n)) for n in OPS})
    if not native.is_loaded():
        raise ValueError(f"--backend {backend}: the extension is not there; see zclip.info")
    if device.type == "cuda" and not native.has_cuda():
        raise ValueError(f"--backend {backend}: the extension was built without CUDA")
    if backend == "native":
        return SimpleNamespace(**{n: getattr(torch.ops.zclip, n).default for n in OPS})
    return SimpleNamespace(**{name: functools.partial(_portable, name) for name in OPS})


def _portable(name: str, *arguments: Any) -> Any:
    before = os.environ.get("ZCLIP_CPU")
    os.environ["ZCLIP_CPU"] = "portable"
    try:
        return getattr(torch.ops.zclip, name)(*arguments)
    finally:
        os.environ.pop("ZCLIP_CPU")
        if before is not None:
            os.environ["ZCLIP_CPU"] = before
