"""Checks a folder of checkpoints: is there one to resume from, and what is wrong with the rest?"""

import os
import stat
from collections.abc import Callable
from pathlib import Path

from heal.checkpoint.errors import CheckpointError
from heal.checkpoint.files import free_bytes
from heal.checkpoint.folders import ABANDONED, NAME, StepFolder, committed, list_folders
from heal.doctor.finding import Finding

GIB = 2**30


def check_checkpoints(directory: str | os.PathLike[str], *, quick: bool = False) -> list[Finding]:
    """Return what is right and wrong with a folder of checkpoints; never raises.

    Args:
        directory: as it was given to the healer or the store.
        quick: do not read the tensors.
    """
    path = Path(directory)
    if not path.is_dir():
        todo = "give the folder that was named checkpoint_dir, or start a run that saves there"
        return [Finding("error", f"{path} is no folder", todo)]
    checks: list[Callable[[Path], list[Finding]]] = [
        lambda folder: check_bytes(folder, quick),
        check_unfinished,
        check_strangers,
        check_space,
        check_permissions,
    ]
    found: list[Finding] = []
    for check in checks:
        try:
            found += check(path)
        except OSError as error:
            found.append(Finding("error", f"{path}: {error}", "check disk and permissions"))
    return found


def check_bytes(directory: Path, quick: bool = False) -> list[Finding]:
    """Read every checkpoint, newest first, and say which one a run would resume from."""
    folders = committed(directory)[::-1]
    if not folders:
        todo = "a run that resumes here starts afresh; is this the right folder?"
        return [Finding("error", f"{directory} has no finished checkpoint", todo)]
    found: list[Finding] = []
    resumable: StepFolder | None = None
    for folder in folders:
        trouble = _trouble_of(folder, quick)
        if not trouble:
            resumable = resumable or folder
            found.append(Finding("ok", f"{folder.path.name}: {_described(folder, quick)}"))
            continue
        todo = f"remove {folder.path}, or bring it back from a copy; resuming passes it over"
        found.append(Finding("error", f"{folder.path.name} is damaged: {trouble}", todo))
    if resumable is None:
        todo = "bring one back from a copy; a run that resumes here starts afresh"
        return [*found, Finding("error", "no checkpoint is whole", todo)]
    return [*found, Finding("ok", f"a run resumes from step {resumable.step}")]


def check_unfinished(directory: Path) -> list[Finding]:
    """Name what crashes and rollbacks left."""
    found = []
    for folder in list_folders(directory):
        if not folder.is_committed:
            failed = sorted(path.name[7:] for path in folder.path.glob("failed-*"))
            why = f"rank {int(failed[0])} failed" if failed else "a crash, or a save under way"
            todo = "the next save removes it; if no run is on, remove it yourself"
            found.append(Finding("warn", f"{folder.path.name} is not finished: {why}", todo))
    aside = sorted(path.name for path in directory.glob(f"step-*{ABANDONED}*"))
    if aside:
        what = f"{len(aside)} checkpoints were abandoned by a rollback: {', '.join(aside[-3:])}"
        found.append(Finding("ok", what, "remove them when nobody wants to look at them"))
    return found


def check_strangers(directory: Path) -> list[Finding]:
    """Name links and files that are none of ours."""
    found = []
    for path in sorted(directory.iterdir()):
        if path.is_symlink() and NAME.fullmatch(path.name):
            todo = "copy what it points to, or give that folder itself"
            found.append(Finding("warn", f"{path.name} is a link, which is not followed", todo))
    return found


def check_space(directory: Path) -> list[Finding]:
    """Is there room for the next save?"""
    sizes = [_size(folder) for folder in committed(directory)]
    free = free_bytes(directory)
    if not sizes:
        return []
    told = f"{free / GIB:.2f} GiB are free, a checkpoint takes {sizes[-1] / GIB:.2f} GiB"
    if free < sizes[-1]:
        todo = "free space, or set checkpoint_keep lower; until then nothing is saved"
        return [Finding("error", told, todo)]
    if free < 2 * sizes[-1]:
        return [Finding("warn", told, "room for one more save: free space")]
    return [Finding("ok", told)]


def check_permissions(directory: Path) -> list[Finding]:
    """Can others write what a run will load?"""
    mode = stat.S_IMODE(directory.stat().st_mode)
    found = []
    if mode & 0o002:
        todo = f"chmod o-w {directory}"
        found.append(Finding("warn", f"everybody may write to {directory}", todo))
    if not os.access(directory, os.W_OK):
        found.append(
            Finding("warn", f"{directory} cannot be written", f"chown or chmod {directory}")
        )
    return found


def _trouble_of(folder: StepFolder, quick: bool) -> str:
    from heal.checkpoint.reading import CheckpointReader

    try:
        reader = CheckpointReader(folder.path)
        if quick:
            for rank in range(reader.commit.world_size):
                reader.manifest(rank)
        else:
            reader.check()
    except (CheckpointError, OSError) as error:
        return str(error)
    return ""


def _described(folder: StepFolder, quick: bool) -> str:
    from heal.checkpoint.reading import CheckpointReader

    reader = CheckpointReader(folder.path)
    ranks = reader.commit.world_size
    count = len({n for r in range(ranks) for n in reader.manifest(r).entries})
    told = "manifests are whole" if quick else "every byte is what was saved"
    return f"{told}; {count} tensors of {ranks} ranks, {_size(folder) / 2**20:.1f} MiB"


def _size(folder: StepFolder) -> int:
    return sum(path.lstat().st_size for path in folder.path.iterdir())
