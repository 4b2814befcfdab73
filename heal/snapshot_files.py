"""Snapshots on the disk, for those that host memory has no room for.

A file has no name: nothing is left behind, however the process ends. Its tensors are mapped, so
that reading them takes no memory that the system could not use for something else at once.
"""

import mmap
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from heal.buffers import Key, memory_of

ALIGNMENT = 64  # bytes; what vector instructions like
PIECE = 16 << 20  # bytes written at once: how long a write goes on after it was cancelled
SYNC_BYTES = 256 << 20  # most bytes that wait in memory for the disk
MEMORY_FILESYSTEMS = ("tmpfs", "ramfs", "devtmpfs")  # a file there takes memory all the same

Layout = dict[Key, tuple[int, torch.Size, tuple[int, ...], torch.dtype]]
"""Per tensor: its offset in the file, and what it looks like."""


def layout_of(tensors: Mapping[Key, Tensor]) -> tuple[Layout, int]:
    """Return where in a file to put tensors, and how long it becomes."""
    layout, end = {}, 0
    for key, tensor in tensors.items():
        begin = -(-end // ALIGNMENT) * ALIGNMENT
        strides = torch.empty_like(tensor, device="meta").stride()
        layout[key] = begin, tensor.shape, strides, tensor.dtype
        end = begin + tensor.nbytes
    return layout, end


class SpillFile:
    """Tensors in a file without a name; the space is reserved, so that a write cannot lack it.

    Raises:
        OSError: the folder cannot be written, or has no room.
    """

    def __init__(self, folder: Path, tensors: Mapping[Key, Tensor]) -> None:
        self.layout, self.num_bytes = layout_of(tensors)
        size = max(1, self.num_bytes)
        self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115
        try:
            self._file.truncate(size)
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(self._file.fileno(), 0, size)
            # Shared and written by others only: private maps would count as memory in use.
            self._map = mmap.mmap(self._file.fileno(), size)
        except BaseException:
            self._file.close()
            raise

    def fits(self, tensors: Mapping[Key, Tensor]) -> bool:
        """Return whether other tensors have the same layout, so that the file can be used again."""
        return layout_of(tensors)[0] == self.layout

    def tensors(self) -> dict[Key, Tensor]:
        """Return the tensors, mapped."""
        return {key: self._mapped(*place) for key, place in self.layout.items()}

    def _mapped(
        self, begin: int, shape: torch.Size, strides: tuple[int, ...], dtype: torch.dtype
    ) -> Tensor:
        numel = shape.numel()
        if not numel:
            return torch.empty(shape, dtype=dtype)
        flat = torch.frombuffer(self._map, dtype=dtype, count=numel, offset=begin)
        return flat.as_strided(shape, strides)

    @torch.no_grad()
    def write(
        self, tensors: Mapping[Key, Tensor], is_cancelled: Callable[[], bool] = lambda: False
    ) -> bool:
        """Write tensors; False if that was cancelled.

        Each is copied to the host first if it is not there, one at a time.

        Raises:
            OSError: the disk is full or broken.
        """
        waiting = 0
        for key, (begin, _, strides, _) in self.layout.items():
            tensor = tensors[key].detach()
            if tensor.device.type != "cpu" or tensor.stride() != strides or tensor.is_conj():
                tensor = torch.empty_like(tensor, device="cpu").copy_(tensor)
            if not tensor.numel():
                continue
            view = memory_of(tensor)
            self._file.seek(begin)
            while view:
                if is_cancelled():
                    return False
                count = self._file.write(view[:PIECE]) or 0
                view, waiting = view[count:], waiting + count
                if waiting >= SYNC_BYTES:
                    self._sync()
                    waiting = 0
        return True

    def _sync(self) -> None:
        """Wait for the disk, so that what was written need not be in memory any more."""
        os.fsync(self._file.fileno())
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def check(self) -> None:
        """Read the file once: an error of the disk is an OSError here, and a signal in the map."""
        self._file.seek(0)
        piece = bytearray(min(PIECE, max(1, self.num_bytes)))
        while self._file.readinto(piece):
            pass


class BackgroundWrite:
    """A write beside the run. ``error`` is what ended it, once it has ended.

    Opening the file may take long, and is done there too. The tensors must stay as they are until
    it has ended; ``ready`` waits until they are there.
    """

    def __init__(
        self,
        open_file: Callable[[], SpillFile],
        tensors: Mapping[Key, Tensor],
        ready: Callable[[], None],
    ) -> None:
        self.file: SpillFile | None = None
        self.error: Exception | None = None
        self._cancelled = False
        self._thread = threading.Thread(
            target=self._run, args=(open_file, tensors, ready), name="heal-snapshot", daemon=True
        )
        self._thread.start()

    def _run(
        self,
        open_file: Callable[[], SpillFile],
        tensors: Mapping[Key, Tensor],
        ready: Callable[[], None],
    ) -> None:
        try:
            ready()
            file = open_file()
            if file.write(tensors, lambda: self._cancelled):
                self.file = file
        except Exception as error:
            self.error = error

    @property
    def is_going_on(self) -> bool:
        return self._thread.is_alive()

    def cancel(self) -> None:
        """Have it end soon."""
        self._cancelled = True

    def wait(self) -> float:
        """Wait until it has ended; return for how many seconds."""
        began = time.monotonic()
        self._thread.join()
        return time.monotonic() - began


def folder_on_disk(candidates: Iterable[Path]) -> Path | None:
    """Return the first folder that can be written and is on a disk; None if there is none."""
    mounts = _memory_mounts()
    for folder in candidates:
        try:
            real = folder.resolve()
        except (OSError, RuntimeError):
            continue
        inside = {real, *real.parents}
        point = max((m for m in mounts if m in inside), key=lambda m: len(m.parts), default=None)
        in_memory = point is not None and mounts[point]
        if real.is_dir() and os.access(real, os.W_OK | os.X_OK) and not in_memory:
            return folder
    return None


def temporary_folders() -> list[Path]:
    """Return where temporary files may go, the one that the user chose first."""
    try:
        chosen = [Path(tempfile.gettempdir())]
    except OSError:  # there is none that can be written
        chosen = []
    return [*chosen, Path("/var/tmp")]


def _memory_mounts(table: Path = Path("/proc/mounts")) -> dict[Path, bool]:
    """Return each mount point, and whether its files are in memory; none where no table is."""
    try:
        rows = [line.split() for line in table.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError):
        return {}
    return {
        Path(row[1].replace("\\040", " ")): row[2] in MEMORY_FILESYSTEMS
        for row in rows
        if len(row) > 2
    }
