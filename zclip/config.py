"""Settings from the environment. Plain data: imports nothing of ours and nothing of torch's."""

import os

BACKENDS = ("auto", "native", "triton", "foreach", "reference")


def wanted_backend() -> str:
    """Return ``ZCLIP_BACKEND``, "auto" if unset.

    Raises:
        ValueError: it is set to something that is not a backend.
    """
    wanted = os.environ.get("ZCLIP_BACKEND", "auto") or "auto"
    if wanted not in BACKENDS:
        raise ValueError(f"ZCLIP_BACKEND: expected one of {', '.join(BACKENDS)}, got {wanted!r}")
    return wanted
