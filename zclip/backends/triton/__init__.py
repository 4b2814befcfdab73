"""Triton kernels for NVIDIA and AMD: no compiler on the user's machine. Registered here, not loaded.

``import zclip`` must not import triton, which takes seconds and may not be there: the operators are
registered as functions that import their kernels when first called.
"""

import importlib
import importlib.util
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from zclip.schemas import library

OLDEST = (3, 6)
"""The Triton that torch 2.10 comes with."""

MODULE_OF = {
    "grad_stats": "grad_stats",
    "power_stats": "power_stats",
    "global_norm_": "global_norm_",
    "scale_": "scale_",
    "zero_nonfinite_": "scale_",
    "clamp_": "clamp_",
    "clip_by_global_norm_": "clip_by_global_norm_",
}
"""Where each operator lives; read_probe is a benchmark's yardstick and stays with the reference."""


def problem() -> str | None:
    """Return why Triton cannot be used, or None. Reads its version without importing it."""
    wanted = f"wanted triton >= {'.'.join(map(str, OLDEST))}: pip install -U triton"
    spec = importlib.util.find_spec("triton")
    if spec is None or spec.origin is None:
        return f"triton is not installed; {wanted}"
    version = _version_in(Path(spec.origin))
    if version is not None and tuple(map(int, version.split(".")[:2])) < OLDEST:
        return f"triton {version} is too old; {wanted}"
    return None


def register(dispatch_key: str) -> None:
    """Let Triton answer for every tensor of this dispatch key; HIP tensors have the key "CUDA"."""
    for name in MODULE_OF:
        implementation = call_on_cpu(name) if dispatch_key == "CPU" else call(name)
        library.impl(name, implementation, dispatch_key)


def call(name: str) -> Callable[..., Any]:
    """Return the operator, which loads Triton and its kernels when first called."""

    def load_and_call(*args: Any) -> Any:
        return implementation_of(name)(*args)

    return load_and_call


def call_on_cpu(name: str) -> Callable[..., Any]:
    """As :func:`call`, for tensors that only the interpreter can read."""

    def check_load_and_call(*args: Any) -> Any:
        from triton import knobs

        if not knobs.runtime.interpret:
            raise RuntimeError(
                f"zclip::{name}: ZCLIP_BACKEND=triton, but the tensors are on the CPU, where Triton"
                " only runs under TRITON_INTERPRET=1, for tests; wanted CUDA or HIP tensors, or"
                " ZCLIP_BACKEND=auto"
            )
        return implementation_of(name)(*args)

    return check_load_and_call


def implementation_of(name: str) -> Callable[..., Any]:
    """Import and return the operator of this name."""
    module = importlib.import_module(f"{__name__}.{MODULE_OF[name]}")
    implementation: Callable[..., Any] = getattr(module, name)
    return implementation


def _version_in(module: Path) -> str | None:
    found = re.search(r"""^__version__ = ['"]([0-9.]+)""", module.read_text(), re.MULTILINE)
    return found and found[1]
