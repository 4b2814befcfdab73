"""Which implementation answers for which operator, decided once, at import.

``ZCLIP_BACKEND`` forces one of them and raises if it cannot load; otherwise the best that loads
is taken and :mod:`zclip.info` says which and why.
"""

import torch

from zclip import reference
from zclip.backends import native
from zclip.config import wanted_backend
from zclip.schemas import library

OPS = (
    "grad_stats",
    "power_stats",
    "global_norm_",
    "scale_",
    "zero_nonfinite_",
    "clamp_",
    "clip_by_global_norm_",
    "zclip_",
    "clip_by_zclip_",
    "adagc_",
    "clip_by_adagc_",
    "spike_skip_",
    "clip_by_spike_skip_",
    "auto_clip_",
    "clip_by_auto_clip_",
    "agc_",
    "watch_loss_",
    "fingerprint",
    "read_probe",
)
"""Every operator that a backend may implement, by its one name."""


def load() -> dict[str, str]:
    """Register the backends; return for each the reason why it is active or not.

    Raises:
        RuntimeError: ``ZCLIP_BACKEND`` asks for a backend that cannot load.
    """
    wanted = wanted_backend()
    for name in OPS:
        library.impl(name, getattr(reference, name), "CompositeExplicitAutograd")
    reasons = {"reference": "plain torch; answers wherever nothing faster does"}

    if wanted in ("auto", "native"):
        problem = native.load()
        if problem and wanted == "native":
            raise RuntimeError(f"ZCLIP_BACKEND=native, but {problem}")
        reasons["native"] = problem or f"loaded, {native.describe()}"
    else:
        reasons["native"] = f"not loaded: ZCLIP_BACKEND={wanted}"
    if wanted == "triton":
        raise RuntimeError(
            "ZCLIP_BACKEND=triton, but this version has no Triton backend; "
            "wanted auto, native or reference"
        )
    if not native.is_loaded():
        library.impl("native_features", reference.native_features, "CompositeExplicitAutograd")
    return reasons


def answering(op: str, device_type: str) -> str:
    """Return the name of the backend that serves ``op`` for tensors of a device type."""
    key = {"cpu": "CPU", "cuda": "CUDA"}.get(device_type)
    served = key and torch._C._dispatch_has_kernel_for_dispatch_key(f"zclip::{op}", key)
    return "native" if served else "reference"
