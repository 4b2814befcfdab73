"""What can go wrong with a checkpoint; every message names the file and what to do."""

__all__ = [
    "CannotEncode",
    "CannotReshard",
    "CheckpointCorrupt",
    "CheckpointError",
    "CheckpointRefused",
    "NoSpace",
    "SaveFailed",
    "StillWriting",
]


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or used."""


class CheckpointCorrupt(CheckpointError):
    """A file is not, byte for byte, the one that was saved."""


class CheckpointRefused(CheckpointCorrupt):
    """A file says what no file of ours says: it is of another kind, or made to do harm."""


class CannotReshard(CheckpointError):
    """The parts that were saved cannot be put together for this number of ranks."""


class SaveFailed(CheckpointError):
    """A save did not end in a commit; what was saved before is untouched."""


class NoSpace(SaveFailed):
    """The disk has no room for another checkpoint; nothing was written."""


class StillWriting(SaveFailed):
    """The save before is not on the disk yet, so that this one was left out."""


class CannotEncode(TypeError):
    """A value is of a type that has no safe form on disk."""
