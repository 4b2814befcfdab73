"""What is done to the disk: written aside, flushed, renamed; read without following links.

A file appears under its name whole or not at all: its bytes are on the disk before the name is, and
the name is on the disk before the caller goes on.
"""

import os
import stat
from collections.abc import Iterable, Sequence
from pathlib import Path

# What can go wrong with a checkpoint; every message names the file and what to do.


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


DIRECTORY_MODE, FILE_MODE = 0o700, 0o600
TEMPORARY = ".tmp-"  # beginning of the names of files that are not finished
MAX_VIEWS = 256  # buffers in one write; the system allows 1,024
MAX_WRITE = 64 * 2**20  # bytes in one write: a full disk is noticed while there is work to save

NO_FOLLOW = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
NO_WAIT = getattr(os, "O_NONBLOCK", 0)  # a pipe in the place of a file must not hang us


def make_folder(path: Path) -> None:
    """Make a folder, and its parents where they are missing, and have it on the disk."""
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
    """Have the names in a folder on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def put_aside(path: Path, name: str) -> Path:
    """Rename something in its folder, and have that on the disk; return what it is called now.

    If the name is taken, a number is put behind it.
    """
    target, number = path.with_name(name), 1
    while os.path.lexists(target):
        number += 1
        target = path.with_name(f"{name}-{number}")
    os.rename(path, target)
    flush_folder(path.parent)
    return target


def remove_file(path: Path) -> None:
    """Remove a file, if it is there; a link goes, not what it points to."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        return


def open_file(path: Path) -> int:
    """Open a plain file for reading; return its descriptor.

    Raises:
        CheckpointCorrupt: it is missing or cannot be opened.
        CheckpointRefused: it is a link, a folder, a pipe or a device.
    """
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
    """Return what is in a plain file.

    Raises:
        CheckpointCorrupt: it is missing or cannot be read.
        CheckpointRefused: it is no plain file, or larger than ``most_bytes``.
    """
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
    """Fill ``target`` with the bytes from ``offset`` on.

    Raises:
        CheckpointCorrupt: the file ends before, or the disk cannot read it.
    """
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
    """Return how much an ordinary user may still write to the disk of ``path``."""
    there = os.statvfs(path)
    return there.f_bavail * there.f_frsize


def _grouped(parts: Iterable[memoryview | bytes]) -> Iterable[list[memoryview]]:
    """Put small buffers together and cut large ones: writes of a sensible size."""
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
