"""Durable checkpoints: no crash can spoil them, and no damage goes unnoticed.

Safetensors and JSON, a checksum for every byte, COMMIT last, no pickle: ``docs/checkpoints.md``.
:mod:`~heal.checkpoint.store` is what others use. :mod:`~heal.checkpoint.contents` names the tensors
of a run, :mod:`~heal.checkpoint.saving` and :mod:`~heal.checkpoint.reading` move the bytes.
"""

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
from heal.former import names_of

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

__getattr__ = names_of(__name__, NEEDS_TORCH)
