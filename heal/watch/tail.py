"""Reads the new lines of a file that somebody else is writing, rotating or replacing."""

import os
from pathlib import Path
from typing import Any, BinaryIO

from heal.report.plain_files import open_regular
from heal.report.read import MAX_LINE, parse_line

START_BYTES = 2**20  # read of a file that is long already; the end is what counts
CHUNK = 2**20


class Tail:
    """The end of one file.

    The file may not exist yet, its last line may be half written, it may be put aside and begun
    anew. Nothing of that raises.

    Args:
        path: of the file.

    Attributes:
        bad_lines: lines that could not be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.bad_lines = 0
        self._file: BinaryIO | None = None
        self._rest = b""

    def lines(self) -> list[dict[str, Any]]:
        """Return the lines that were completed since the last call."""
        found = self._read()
        if self._was_replaced():
            found += self._read()  # what was written between our reading and the rotation
            self.close()
            found += self._read()
        return found

    def close(self) -> None:
        """Let go of the file; the next call opens it again."""
        if self._file is not None:
            self._file.close()
        self._file, self._rest = None, b""

    def _read(self) -> list[dict[str, Any]]:
        try:
            file = self._opened()
            chunks = [] if file is None else list(iter(lambda: file.read(CHUNK), b""))
        except OSError:
            self.close()
            return []
        *whole, self._rest = (self._rest + b"".join(chunks)).split(b"\n")
        if len(self._rest) > MAX_LINE:
            self._rest = b""
            self.bad_lines += 1
        found = []
        for raw in whole:
            line = parse_line(raw)
            if line is not None:
                found.append(line)
            elif raw.strip():
                self.bad_lines += 1
        return found

    def _opened(self) -> BinaryIO | None:
        if self._file is None:
            try:
                self._file = open_regular(self.path)
            except FileNotFoundError:
                return None
            size = os.fstat(self._file.fileno()).st_size
            if size > START_BYTES:
                self._file.seek(size - START_BYTES)
                self._file.readline()  # half a line
        return self._file

    def _was_replaced(self) -> bool:
        if self._file is None:
            return False
        try:
            here, there = os.fstat(self._file.fileno()), os.stat(self.path)
        except OSError:
            return False  # put aside, and the new one is not there yet
        is_shorter = there.st_size < self._file.tell()
        return is_shorter or (here.st_ino, here.st_dev) != (there.st_ino, there.st_dev)
