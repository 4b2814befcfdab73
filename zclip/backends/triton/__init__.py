"""Triton kernels for NVIDIA and AMD, for users without a compiler. Registered here, not loaded.

``import zclip`` must not import triton, which takes seconds and may not be there: the operators are
registered as functions that import their kernels when first called.
"""

import functools
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
    "scale_": "scale_",
    "zero_nonfinite_": "scale_",
    "clamp_": "clamp_",
    "rule_": "rule",
    "clip_by_": "rule",
    "decide_by_": "rule",
    "watch_loss_": "watch_loss_",
    "agc_": "agc_",
    "fingerprint": "fingerprint",
    "optim_update_": "optim_update_",
}
"""Where each operator lives; those of host memory stay with the reference."""


def problem() -> str | None:
    """Return why Triton cannot be used, or None. Reads its version without importing it."""
    expected = f"expected triton >= {'.'.join(map(str, OLDEST))}"
    spec = importlib.util.find_spec("triton")
    if spec is None or spec.origin is None:
        return f"{expected}, got none; pip install -U triton"
    version = _version_in(Path(spec.origin))
    if version is not None and tuple(map(int, version.split(".")[:2])) < OLDEST:
        return f"{expected}, got {version}; pip install -U triton"
    return None


def register(dispatch_key: str) -> None:
    """Let Triton answer for every tensor of this dispatch key; HIP tensors have the key "CUDA"."""
    for name in MODULE_OF:
        library.impl(name, _on_first_call(name, dispatch_key), dispatch_key)


def _on_first_call(name: str, dispatch_key: str) -> Callable[..., Any]:
    def load_and_call(*args: Any) -> Any:
        return implementation_of(name, dispatch_key)(*args)

    return load_and_call


@functools.cache
def implementation_of(name: str, dispatch_key: str) -> Callable[..., Any]:
    """Import Triton and the kernels of an operator, and return it.

    Raises:
        RuntimeError: Triton does not import, or these tensors are out of its reach.
    """
    try:
        from triton import knobs
    except ImportError as error:
        raise RuntimeError(
            f"zclip::{name}: triton is installed but does not import ({error}); reinstall it, or "
            "set ZCLIP_BACKEND=reference"
        ) from error
    if dispatch_key == "CPU" and not knobs.runtime.interpret:
        raise RuntimeError(
            f"zclip::{name}: expected CUDA or HIP tensors, got tensors on the CPU; use "
            "ZCLIP_BACKEND=auto, or TRITON_INTERPRET=1 for tests"
        )
    module = importlib.import_module(f"{__name__}.{MODULE_OF[name]}")
    implementation: Callable[..., Any] = getattr(module, name)
    return implementation


def _version_in(module: Path) -> str | None:
    found = re.search(r"""^__version__ = ['"]([0-9.]+)""", module.read_text(), re.MULTILINE)
    return found and found[1]
