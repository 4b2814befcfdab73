"""Which implementation answers for which operator, decided once, at import.

``ZCLIP_BACKEND`` forces one of them and raises if it cannot load; otherwise the best that loads
is taken and :mod:`zclip.info` says which and why.
"""

import torch

from zclip import reference
from zclip.backends import native, triton
from zclip.config import wanted_backend
from zclip.schemas import library

OPS = (
    "grad_stats",
    "power_stats",
    "scale_",
    "zero_nonfinite_",
    "clamp_",
    "rule_",
    "clip_by_",
    "decide_by_",
    "agc_",
    "watch_loss_",
    "optim_update_",
    "fingerprint",
    "copy_and_hash_",
    "read_probe",
)
"""Every operator that a backend may implement, by its one name."""

OF_HOST_MEMORY = ("copy_and_hash_", "read_probe")
"""Those without kernels for devices: snapshots in host memory, and the benchmark's yardstick."""

_triton_keys: set[str] = set()


def load() -> dict[str, str]:
    """Register the backends; return for each the reason why it is active or not.

    Raises:
        RuntimeError: ``ZCLIP_BACKEND`` asks for a backend that cannot load.
    """
    wanted = wanted_backend()
    for name in (*OPS, "reference_rule_"):
        library.impl(name, getattr(reference, name), "CompositeExplicitAutograd")
    reasons = {"reference": "plain torch; answers wherever nothing faster does"}

    if wanted in ("auto", "native"):
        problem = native.load()
        if problem and wanted == "native":
            raise RuntimeError(f"ZCLIP_BACKEND=native, but {problem}")
        reasons["native"] = problem or f"loaded, {native.describe()}"
    else:
        reasons["native"] = f"not loaded: ZCLIP_BACKEND={wanted}"
    reasons["triton"] = _choose_triton(wanted)
    if not native.is_loaded():
        library.impl("native_features", reference.native_features, "CompositeExplicitAutograd")
    return reasons


def _choose_triton(wanted: str) -> str:
    """Register Triton where nothing better answers; return why, or why not."""
    if wanted not in ("auto", "triton"):
        return f"not loaded: ZCLIP_BACKEND={wanted}"
    if native.has_cuda():
        return "not needed: the extension has CUDA code"
    problem = triton.problem()
    if problem and wanted == "triton":
        raise RuntimeError(f"ZCLIP_BACKEND=triton, but {problem}")
    if problem:
        return problem
    keys = ("CUDA", "CPU") if wanted == "triton" else ("CUDA",)
    for key in keys:
        triton.register(key)
        _triton_keys.add(key)
    return "answers for CUDA and HIP tensors; loaded when the first of them comes"


def answering(op: str, device_type: str) -> str:
    """Return the name of the backend that serves ``op`` for tensors of a device type."""
    key = {"cpu": "CPU", "cuda": "CUDA"}.get(device_type)
    if key is None or not torch._C._dispatch_has_kernel_for_dispatch_key(f"zclip::{op}", key):
        return "reference"
    return "triton" if key in _triton_keys else "native"
