"""Disk operations, and the errors of this package.

A file appears under its name whole or not at all: :func:`write_file` flushes the bytes, renames the
file, and flushes the folder before it returns. Reading follows no links.
"""

import contextlib
import os
import shutil
import stat
from collections.abc import Iterable, Sequence
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


DIRECTORY_MODE, FILE_MODE = 0o700, 0o600
TEMPORARY = ".tmp-"  # prefix of files that are not finished
MAX_VIEWS = 256  # buffers in one write; the system allows 1,024
MAX_WRITE = 64 * 2**20  # bytes in one write: a full disk is noticed while there is work to save

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


def write_file(path: Path, parts: Iterable[memoryview | bytes]) -> None:
    """Write a file so that it is either there whole, on the disk, or not there.

    Raises:
        OSError: the disk is full or broken; nothing is left under the name.
    """
    aside = path.with_name(f"{TEMPORARY}{os.getpid()}-{path.name}")
    descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | NO_FOLLOW, FILE_MODE)
    try:
        try:
            for group in _grouped(parts):
                _write_all(descriptor, group)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.replace(aside, path)
    except BaseException:
        remove_file(aside)
        raise
    flush_folder(path.parent)


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


def remove_file(path: Path) -> None:
    """Remove a file, if it is there; a link goes, not what it points to."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def open_file(path: Path) -> int:
    """Open a plain file for reading, not a link, folder, pipe or device; return its descriptor."""
    try:
        found = os.lstat(path)
        if not stat.S_ISREG(found.st_mode):
            raise CheckpointRefused(f"{path}: expected a plain file, got {_kind(found.st_mode)}")
        descriptor = os.open(path, os.O_RDONLY | NO_FOLLOW | NO_WAIT)
    except OSError as error:
        raise CheckpointCorrupt(f"{path} cannot be read: {error.strerror or error}") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise CheckpointRefused(
            f"{path}: expected a plain file, got one exchanged while it was opened"
        )
    return descriptor


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
            count = os.preadv(descriptor, [target[done : done + MAX_WRITE]], offset + done)
        except OSError as error:
            raise CheckpointCorrupt(f"{path} cannot be read: {error}") from None
        if count == 0:
            raise CheckpointCorrupt(f"{path} ends at byte {offset + done}, within what was saved")
        done += count


def free_bytes(path: Path) -> int:
    """Return how many bytes an ordinary user may still write to the disk of ``path``."""
    return shutil.disk_usage(path).free


def _grouped(parts: Iterable[memoryview | bytes]) -> Iterable[list[memoryview]]:
    """Join small buffers and cut large ones, for writes of at most ``MAX_WRITE`` bytes."""
    group: list[memoryview] = []
    size = 0
    for part in parts:
        view = memoryview(part).cast("B") if len(part) else memoryview(b"")
        while len(view):
            piece = view[: MAX_WRITE - size]
            view = view[len(piece) :]
            group.append(piece)
            size += len(piece)
            if size == MAX_WRITE or len(group) == MAX_VIEWS:
                yield group
                group, size = [], 0
    if group:
        yield group


def _write_all(descriptor: int, views: Sequence[memoryview]) -> None:
    left = list(views)
    while left:
        count = os.writev(descriptor, left)
        while left and count >= len(left[0]):
            count -= len(left.pop(0))
        if count:
            left[0] = left[0][count:]


def _kind(mode: int) -> str:
    kinds = {stat.S_IFLNK: "a link", stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe"}
    return kinds.get(stat.S_IFMT(mode), "no file")
