"""Opens and replaces regular files, and no others: a pipe would hang, a link may lead elsewhere."""

import errno
import os
import stat
import tempfile
from pathlib import Path
from typing import BinaryIO

READ_FLAGS = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)
NOT_REGULAR = "expected a regular file, got a pipe, a device or a folder"


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading, or a link to one.

    Raises:
        OSError: it cannot be opened, or is no regular file.
    """
    descriptor = os.open(path, READ_FLAGS)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, NOT_REGULAR, str(path))
    return os.fdopen(descriptor, "rb")


def replace_text(path: Path, text: str) -> None:
    """Write a file whole or not at all. A link is replaced by the file, its target is untouched.

    Raises:
        OSError: it cannot be written, or something other than a regular file is in its place.
    """
    try:
        is_regular = stat.S_ISREG(os.stat(path).st_mode)
    except FileNotFoundError:
        is_regular = True  # nothing is there, or a link to nothing
    if not is_regular:
        raise OSError(errno.EINVAL, f"{NOT_REGULAR}; give - for standard output", str(path))
    descriptor, beside = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(beside, 0o666 & ~_umask())
        os.replace(beside, path)
    except BaseException:
        os.unlink(beside)
        raise


def _umask() -> int:
    """The mode that new files lack; it can only be read by setting it."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
