"""Disk operations, the folders of a store, and the errors of this package; imports no torch.

A file appears under its name whole or not at all. Reading follows no links. A store has one folder
for each save, named after its step and never written to twice.
"""

import contextlib
import os
import re
import secrets
import shutil
import stat
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or used."""


class CheckpointCorrupt(CheckpointError):
    """A file is not, byte for byte, the one that was saved."""


class CheckpointRefused(CheckpointCorrupt):
    """A file holds what this package never writes: it is of another kind, or made to do harm."""


class CannotReshard(CheckpointError):
    """The parts that were saved cannot be put together for this number of ranks."""


class SaveFailed(CheckpointError):
    """A save did not end in a commit; what was saved before is untouched."""


class NoSpace(SaveFailed):
    """The disk has no room for another checkpoint; nothing was written."""


class StillWriting(SaveFailed):
    """The previous save is not on the disk yet, so this one was skipped."""


class CannotEncode(TypeError):
    """A value is of a type that has no safe form on disk."""


COMMIT = "COMMIT"
"""The file that makes a checkpoint complete."""

DIRECTORY_MODE, FILE_MODE = 0o700, 0o600
TEMPORARY = ".tmp-"  # prefix of files that are not finished
MAX_VIEWS = 256  # buffers in one write; the system allows 1,024
MAX_VIEW = 2**22  # bytes of each, so that a write stays below the 2 GiB that some systems allow
MAX_READ = 2**26  # bytes in one read

NO_FOLLOW = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
NO_WAIT = getattr(os, "O_NONBLOCK", 0)  # a pipe in the place of a file must not hang us


def make_folder(path: Path) -> None:
    """Make a folder and its missing parents, and flush that."""
    if path.is_dir():
        return
    make_folder(path.parent)
    try:
        os.mkdir(path, DIRECTORY_MODE)
    except FileExistsError:
        if not path.is_dir():
            raise
        return  # another rank was quicker
    flush_folder(path.parent)


@contextlib.contextmanager
def whole_file(path: Path, mode: int = FILE_MODE) -> Iterator[int]:
    """Yield the descriptor of a file that is whole, and on the disk, when the body ends.

    If the body or the disk fails, nothing is left under the name. A link is replaced by the file.
    """
    aside = path.with_name(f"{TEMPORARY}{secrets.token_hex(4)}-{path.name}")
    descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | NO_FOLLOW, mode)
    try:
        try:
            yield descriptor
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.replace(aside, path)
    except BaseException as error:
        aside.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename is None:
            error.filename = str(path)  # what fails to be written does not say where
        raise
    flush_folder(path.parent)


def write_file(path: Path, parts: Iterable[memoryview | bytes], mode: int = FILE_MODE) -> None:
    """Write many small or few large buffers as a whole file; see :func:`whole_file`."""
    views = (memoryview(part).cast("B") for part in parts if len(part))
    left = deque(view[i : i + MAX_VIEW] for view in views for i in range(0, len(view), MAX_VIEW))
    with whole_file(path, mode) as descriptor:
        while left:
            count = os.writev(descriptor, list(islice(left, MAX_VIEWS)))
            while left and count >= len(left[0]):
                count -= len(left.popleft())
            if count:
                left[0] = left[0][count:]


def flush_folder(path: Path) -> None:
    """Flush the names in a folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def put_aside(path: Path, name: str) -> Path:
    """Rename a file or folder and flush that; append a number if the name is taken."""
    target, number = path.with_name(name), 1
    while os.path.lexists(target):
        number += 1
        target = path.with_name(f"{name}-{number}")
    os.rename(path, target)
    flush_folder(path.parent)
    return target


def open_file(path: Path) -> int:
    """Open a plain file for reading, not a link, folder, pipe or device; return its descriptor."""
    try:
        _check_plain(path, os.lstat(path))
        descriptor = os.open(path, os.O_RDONLY | NO_FOLLOW | NO_WAIT)
    except OSError as error:
        raise CheckpointCorrupt(f"{path} cannot be read: {error.strerror or error}") from None
    try:
        _check_plain(path, os.fstat(descriptor))  # it may have been exchanged meanwhile
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _check_plain(path: Path, found: os.stat_result) -> None:
    kinds = {stat.S_IFLNK: "a link", stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe"}
    if not stat.S_ISREG(found.st_mode):
        kind = kinds.get(stat.S_IFMT(found.st_mode), "no file")
        raise CheckpointRefused(f"{path}: expected a plain file, got {kind}")


def read_file(path: Path, most_bytes: int) -> bytes:
    """Return the bytes of a plain file that has at most ``most_bytes``."""
    descriptor = open_file(path)
    try:
        size = os.fstat(descriptor).st_size
        if size > most_bytes:
            raise CheckpointRefused(f"{path}: expected at most {most_bytes} bytes, got {size}")
        buffer = bytearray(size)
        read_into(descriptor, memoryview(buffer), 0, path)
        return bytes(buffer)
    finally:
        os.close(descriptor)


def read_into(descriptor: int, target: memoryview, offset: int, path: Path) -> None:
    """Fill ``target`` with the bytes from ``offset`` on."""
    done = 0
    while done < len(target):
        try:
            count = os.preadv(descriptor, [target[done : done + MAX_READ]], offset + done)
        except OSError as error:
            raise CheckpointCorrupt(f"{path} cannot be read: {error}") from None
        if count == 0:
            raise CheckpointCorrupt(f"{path} ends at byte {offset + done}, within what was saved")
        done += count


def free_bytes(path: Path) -> int:
    """Return how many bytes an ordinary user may still write to the disk of ``path``."""
    return shutil.disk_usage(path).free


NAME = re.compile(r"step-(\d{6,14})(?:-r(\d{1,4}))?")
MAX_RETRY = 9999
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


def next_retry(directory: Path, step: int) -> int:
    """Return the number of a new folder: one that is there may hold the only copy."""
    retries = [folder.retry for folder in list_folders(directory) if folder.step == step]
    if retries and max(retries) >= MAX_RETRY:
        raise SaveFailed(f"step {step} was saved {MAX_RETRY} times; remove some of {directory}")
    return max(retries, default=-1) + 1


def list_folders(directory: Path) -> list[StepFolder]:
    """Return the folders of all saves, finished or not, oldest first; links are not followed."""
    found = []
    with contextlib.suppress(FileNotFoundError), os.scandir(directory) as entries:
        for entry in entries:
            match = NAME.fullmatch(entry.name)
            if match and entry.is_dir(follow_symlinks=False):
                found.append(StepFolder(int(match[1]), int(match[2] or 0), Path(entry.path)))
    return sorted(found)


def committed(directory: Path, step: int | None = None) -> list[StepFolder]:
    """Return the folders of finished saves, those of one step or all, oldest first."""
    return [f for f in list_folders(directory) if step in (None, f.step) and f.is_committed]


def newest_folder(directory: Path, step: int | None = None) -> StepFolder:
    """Return the folder of the newest finished save; raise CheckpointError if there is none."""
    found = committed(directory, step)
    if not found:
        which = "" if step is None else f" of step {step}"
        raise CheckpointError(f"{directory} has no finished checkpoint{which}")
    return found[-1]


def remove_folder(folder: StepFolder) -> None:
    """Remove a save, COMMIT first; raise OSError if a file stays, or is none of ours."""
    (folder.path / COMMIT).unlink(missing_ok=True)
    flush_folder(folder.path)
    for name in os.listdir(folder.path):
        if OURS.fullmatch(name):
            (folder.path / name).unlink(missing_ok=True)
    os.rmdir(folder.path)
    flush_folder(folder.path.parent)


def surplus(folders: Iterable[StepFolder], keep: int, verified: StepFolder) -> list[StepFolder]:
    """Return what to remove so that ``keep`` are left: nothing verified last, or newer than it."""
    ordered = sorted(folders)
    return [folder for folder in ordered[: max(0, len(ordered) - keep)] if folder < verified]


def retain(
    directory: Path,
    keep: int,
    verified: StepFolder,
    note: Callable[[str], None],
    exempt: Collection[StepFolder] = (),
) -> None:
    """Remove old saves, what crashes left unfinished, and abandoned saves beyond ``keep``.

    Those of ``exempt`` are neither counted nor removed: no rank could read them, and a person may.
    """
    going = surplus([f for f in committed(directory) if f not in exempt], keep, verified)
    going += [f for f in list_folders(directory) if not f.is_committed and f < verified]
    # Abandoned saves serve the post-mortem; as many of them stay as finished ones.
    abandoned = sorted(directory.glob(f"step-*{ABANDONED}*"))
    going += [
        StepFolder(0, path=path)
        for path in abandoned[: max(0, len(abandoned) - keep)]
        if path.is_dir() and not path.is_symlink()
    ]
    for folder in going:
        try:
            remove_folder(folder)
        except OSError as error:
            note(f"cannot remove {folder.path}: {error}")
