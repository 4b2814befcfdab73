"""Which implementation answers for which operator, decided once, at import.

``ZCLIP_BACKEND`` forces one of them and raises if it cannot load; otherwise the best that loads
is taken and :mod:`zclip.info` says which and why.
"""

import warnings

import torch

from zclip import reference
from zclip.backends import foreach, local_build, native, triton
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

REASONS: dict[str, str] = {}
"""Why each backend is active or not; filled by :func:`load`."""

_triton_keys: set[str] = set()
_foreach_ops: set[str] = set()


def load() -> dict[str, str]:
    """Register the backends; return for each the reason why it is active or not.

    Raises:
        RuntimeError: ``ZCLIP_BACKEND`` asks for a backend that cannot load.
    """
    wanted = wanted_backend()
    for name in (*OPS, "reference_rule_"):
        library.impl(name, getattr(reference, name), "CompositeExplicitAutograd")
    reasons = REASONS
    reasons["reference"] = "plain torch; answers wherever nothing faster does"

    if wanted in ("auto", "native"):
        problem = native.load()
        if problem and wanted == "native":
            raise RuntimeError(f"ZCLIP_BACKEND=native, but {problem}")
        reasons["native"] = problem or f"loaded, {native.describe()}"
        if problem:
            local_build.note_once(f"zclip: {problem}")
    else:
        reasons["native"] = f"not loaded: ZCLIP_BACKEND={wanted}"
    reasons["foreach"] = _choose_foreach(wanted)
    reasons["triton"] = _choose_triton(wanted)
    if not native.is_loaded():
        library.impl("native_features", reference.native_features, "CompositeExplicitAutograd")
    return reasons


def _choose_foreach(wanted: str) -> str:
    """Register torch's foreach operators where no kernel is; return why, or why not."""
    if native.is_loaded():
        return "not needed: the extension is loaded"
    if wanted not in ("auto", "foreach"):
        return f"not used: ZCLIP_BACKEND={wanted}"
    for name, implementation in foreach.implementations(OPS).items():
        library.impl(name, implementation, "CPU")
        _foreach_ops.add(name)
    return "measures and clips CPU tensors by torch's foreach operators"


def _choose_triton(wanted: str) -> str:
    """Register Triton where nothing better answers; return why, or why not."""
    if wanted not in ("auto", "triton"):
        return f"not loaded: ZCLIP_BACKEND={wanted}"
    if native.has_cuda():
        # Which devices there are is known when the first is used, and not to be asked before.
        torch.cuda._lazy_call(lambda: fall_back_from_native(native.devices_without_image()))
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


def fall_back_from_native(devices: list[int]) -> None:
    """Let Triton answer for CUDA if the extension has no code for some of the devices."""
    if not devices:
        return
    names = ", ".join(f"device {device}" for device in devices)
    problem = triton.problem()
    if problem or wanted_backend() == "native":
        reason = problem or "ZCLIP_BACKEND=native forbids Triton"
        warnings.warn(
            f"zclip: the extension has no CUDA code for {names}, and {reason}. Build it for this "
            "GPU: ZCLIP_BUILD=cuda pip install --no-build-isolation .",
            stacklevel=2,
        )
        return
    triton.register("CUDA")
    _triton_keys.add("CUDA")
    REASONS["triton"] = f"answers for CUDA tensors: the extension has no code for {names}"


def answering(op: str, device_type: str) -> str:
    """Return the name of the backend that serves ``op`` for tensors of a device type."""
    key = {"cpu": "CPU", "cuda": "CUDA"}.get(device_type)
    if key is None or not torch._C._dispatch_has_kernel_for_dispatch_key(f"zclip::{op}", key):
        return "reference"
    if key in _triton_keys:
        return "triton"
    return "foreach" if key == "CPU" and op in _foreach_ops else "native"
