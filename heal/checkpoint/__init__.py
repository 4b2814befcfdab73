"""Durable checkpoints: no crash can spoil them, and no damage goes unnoticed.

Safetensors and JSON, a checksum for every byte, COMMIT last, no pickle: ``docs/checkpoints.md``.
:mod:`~heal.checkpoint.store` is what others use. :mod:`~heal.checkpoint.contents` names the tensors
of a run, :mod:`~heal.checkpoint.saving` and :mod:`~heal.checkpoint.reading` move the bytes.
"""

from importlib import import_module
from typing import Any

from heal.checkpoint.files import (
    CannotEncode,
    CannotReshard,
    CheckpointCorrupt,
    CheckpointError,
    CheckpointRefused,
    NoSpace,
    SaveFailed,
    StillWriting,
)

NEEDS_TORCH: dict[str, str] = {
    "CheckpointStore": "heal.checkpoint.store",
    "Resumed": "heal.checkpoint.store",
    "load": "heal.checkpoint.store",
    "save": "heal.checkpoint.store",
}

__all__ = [
    "CannotEncode",
    "CannotReshard",
    "CheckpointCorrupt",
    "CheckpointError",
    "CheckpointRefused",
    "NoSpace",
    "SaveFailed",
    "StillWriting",
    *NEEDS_TORCH,
]


def __getattr__(name: str) -> Any:
    """Load on first use what needs torch."""
    if name in NEEDS_TORCH:
        return getattr(import_module(NEEDS_TORCH[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
