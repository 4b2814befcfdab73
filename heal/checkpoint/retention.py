"""Which checkpoints go when there are more than wanted: never the newest that was verified."""

from collections.abc import Callable, Collection, Iterable
from pathlib import Path

from heal.checkpoint.folders import ABANDONED, StepFolder, committed, list_folders, remove_folder


def surplus(folders: Iterable[StepFolder], keep: int, verified: StepFolder) -> list[StepFolder]:
    """Return which of the finished saves to remove, oldest first.

    Args:
        folders: finished saves.
        keep: how many to keep.
        verified: the newest whose bytes were read and found right. It stays, and so does whatever
            is newer: nobody has vouched for that.
    """
    ordered = sorted(folders)
    candidates = ordered[: max(0, len(ordered) - keep)]
    return [folder for folder in candidates if folder < verified]


def retain(
    directory: Path,
    keep: int,
    verified: StepFolder,
    note: Callable[[str], None],
    left_alone: Collection[StepFolder] = (),
) -> list[StepFolder]:
    """Remove old saves, what crashes left unfinished, and what rollbacks abandoned before.

    A folder that cannot be removed is noted and left.

    Args:
        directory: of the store.
        keep: how many finished saves to keep.
        verified: see :func:`surplus`.
        note: told of what cannot be removed.
        left_alone: neither counted nor removed: nobody could read them, and a person may.

    Returns:
        Those that are gone.
    """
    going = surplus([f for f in committed(directory) if f not in left_alone], keep, verified)
    going += [f for f in list_folders(directory) if not f.is_committed and f < verified]
    gone = []
    for folder in going:
        try:
            remove_folder(folder)
        except OSError as error:
            note(f"cannot remove {folder.path}: {error}")
        else:
            gone.append(folder)
    _remove_abandoned(directory, keep, verified, note)
    return gone


def _remove_abandoned(
    directory: Path, keep: int, verified: StepFolder, note: Callable[[str], None]
) -> None:
    """Abandoned saves serve the post-mortem; as many stay as there are good ones."""
    found = sorted(directory.glob(f"step-*{ABANDONED}*"), key=lambda path: path.name)
    for path in found[: max(0, len(found) - keep)]:
        if path.is_symlink() or not path.is_dir():
            continue
        try:
            remove_folder(StepFolder(verified.step, verified.retry, path))
        except OSError as error:
            note(f"cannot remove {path}: {error}")
