"""The folders of a store: one for each save, named after its step, never written to twice.

Retention removes old ones, but never the newest that was verified. This module imports no torch.
"""

import os
import re
import stat
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from heal.checkpoint.files import flush_folder, put_aside, remove_file
from heal.checkpoint.manifest import COMMIT

NAME = re.compile(r"step-(\d{6,14})(?:-r(\d{1,4}))?")
ABANDONED = ".abandoned"
OURS = re.compile(r"rank-\d{5}\.safetensors|manifest-\d{5}\.json|COMMIT|failed-\d{5}|\.tmp-.*")
"""Files that this package writes; a folder that holds any other is not removed."""


@dataclass(frozen=True, order=True, slots=True)
class StepFolder:
    """The folder of one save; a step that is saved again after a rollback gets another one."""

    step: int
    retry: int = 0
    path: Path = field(default=Path(), compare=False)

    @property
    def is_committed(self) -> bool:
        """Whether the save was finished; its bytes are not read."""
        try:
            return stat.S_ISREG(os.lstat(self.path / COMMIT).st_mode)
        except OSError:
            return False


def folder_for(directory: Path, step: int, retry: int = 0) -> StepFolder:
    """Return the folder that a save goes to."""
    name = f"step-{step:06d}" + (f"-r{retry}" if retry else "")
    return StepFolder(step, retry, directory / name)


def list_folders(directory: Path) -> list[StepFolder]:
    """Return the folders of all saves, finished or not, oldest first; links are not followed."""
    found = []
    try:
        with os.scandir(directory) as entries:
            for entry in entries:
                match = NAME.fullmatch(entry.name)
                if match and entry.is_dir(follow_symlinks=False):
                    step, retry = int(match[1]), int(match[2] or 0)
                    found.append(StepFolder(step, retry, Path(entry.path)))
    except FileNotFoundError:
        return []
    return sorted(found)


def committed(directory: Path) -> list[StepFolder]:
    """Return the folders of finished saves, oldest first."""
    return [folder for folder in list_folders(directory) if folder.is_committed]


def abandon(folder: StepFolder) -> None:
    """Rename a folder whose steps a rollback undid, so that no run resumes from it."""
    put_aside(folder.path, folder.path.name + ABANDONED)


def remove_folder(folder: StepFolder) -> None:
    """Remove a save. COMMIT goes first, so that a crash leaves no half of one that looks whole.

    Raises:
        OSError: a file cannot be removed, or is none of ours.
    """
    remove_file(folder.path / COMMIT)
    flush_folder(folder.path)
    for name in os.listdir(folder.path):
        if OURS.fullmatch(name):
            remove_file(folder.path / name)
    os.rmdir(folder.path)
    flush_folder(folder.path.parent)


def surplus(folders: Iterable[StepFolder], keep: int, verified: StepFolder) -> list[StepFolder]:
    """Return which of the finished saves to remove, oldest first.

    Args:
        folders: finished saves.
        keep: how many to keep.
        verified: the newest whose bytes were read and found right. It stays, and so does whatever
            is newer and not verified yet.
    """
    ordered = sorted(folders)
    candidates = ordered[: max(0, len(ordered) - keep)]
    return [folder for folder in candidates if folder < verified]


def retain(
    directory: Path,
    keep: int,
    verified: StepFolder,
    note: Callable[[str], None],
    exempt: Collection[StepFolder] = (),
) -> None:
    """Remove old saves, what crashes left unfinished, and abandoned saves beyond ``keep``.

    Args:
        directory: of the store.
        keep: how many finished saves to keep.
        verified: see :func:`surplus`.
        note: called with the text for each folder that cannot be removed; it is left.
        exempt: neither counted nor removed: no rank could read them, and a person may.
    """
    going = surplus([f for f in committed(directory) if f not in exempt], keep, verified)
    going += [f for f in list_folders(directory) if not f.is_committed and f < verified]
    # Abandoned saves serve the post-mortem; as many of them stay as finished ones.
    abandoned = sorted(directory.glob(f"step-*{ABANDONED}*"), key=lambda path: path.name)
    for path in abandoned[: max(0, len(abandoned) - keep)]:
        if path.is_dir() and not path.is_symlink():
            going.append(StepFolder(0, path=path))
    for folder in going:
        try:
            remove_folder(folder)
        except OSError as error:
            note(f"cannot remove {folder.path}: {error}")
