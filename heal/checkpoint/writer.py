"""One save: measures and copies a run's tensors, then writes them to the disk, COMMIT last."""

import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from heal.checkpoint.files import SaveFailed, make_folder, read_file, remove_file, write_file
from heal.checkpoint.folders import StepFolder, remove_folder
from heal.checkpoint.manifest import (
    COMMIT,
    MAX_COMMIT,
    MAX_MANIFEST,
    Commit,
    Entry,
    Manifest,
    digest,
    manifest_name,
    shard_name,
)
from heal.checkpoint.shards import ShardReader, checksum_text, write_shard
from heal.integrity import MEASURED, fingerprints
from heal.training_state import copy_by_kind
from zclip import grad_stats
from zclip.layout import NAN

POLL_SECONDS = 0.02  # between looks for the files of other ranks
HURRY_SECONDS = 3.0  # for their files, when this process has failed: they may be gone


class HostCopies:
    """Copies of tensors in host memory, so that training may go on while they are written.

    ``memory`` holds the copies of an earlier save, used again where they fit.
    """

    @torch.no_grad()
    def __init__(self, tensors: Mapping[str, Tensor], memory: Mapping[str, Tensor]) -> None:
        self.tensors = {name: _fitting(memory.get(name), t) for name, t in tensors.items()}
        sources = list(tensors.values())
        device = next((t.device for t in sources if t.device.type == "cuda"), None)
        copy_by_kind(list(self.tensors.values()), sources, non_blocking=device is not None)
        self._landed: torch.Event | None = None
        if device is not None:
            # In the stream of the run: what it enqueues next cannot overtake the copies.
            self._landed = torch.Event(device)
            self._landed.record(torch.cuda.current_stream(device))

    def wait(self) -> dict[str, Tensor]:
        """Return the copies once the device has written them."""
        if self._landed is not None:
            self._landed.synchronize()
            self._landed = None
        return self.tensors


def _fitting(memory: Tensor | None, like: Tensor) -> Tensor:
    if memory is not None and memory.shape == like.shape and memory.dtype == like.dtype:
        return memory
    return torch.empty(like.shape, dtype=like.dtype, pin_memory=like.device.type == "cuda")


class Measured:
    """Checksums of tensors and the count of NaN and Inf in them, on their way to the host."""

    @torch.no_grad()
    def __init__(self, tensors: Mapping[str, Tensor], allow_nonfinite: bool) -> None:
        filled = {name: t for name, t in tensors.items() if t.numel()}
        trained = [
            t
            for name, t in filled.items()
            if name.startswith(("parameter/", "state/")) and t.dtype in MEASURED
        ]
        is_checked = bool(trained) and not allow_nonfinite
        bad = grad_stats(trained)[:, NAN:].sum() if is_checked else torch.zeros(())
        self._names = list(filled)
        self._copies = HostCopies({"sums": fingerprints(filled.values()), "bad": bad}, {})

    def problem(self) -> str:
        """Return why the tensors must not be saved, empty if they may; waits for the device."""
        bad = int(self._copies.wait()["bad"])
        return f"parameters and optimizer state hold {bad} NaN or Inf" if bad else ""

    def added_to(self, entries: Mapping[str, Entry]) -> dict[str, Entry]:
        """Return entries with their checksums; waits for the device."""
        sums = dict(zip(self._names, self._copies.wait()["sums"].tolist(), strict=True))
        return {
            name: replace(entry, checksum=checksum_text(sums.get(name, 0)))
            for name, entry in entries.items()
        }


@dataclass(slots=True)
class Job:
    """A save that all ranks agreed on."""

    folder: StepFolder
    manifest: Manifest  # of this rank
    tensors: Callable[[], dict[str, Tensor]]  # returns those of this rank, once on the host
    measured: Measured | None  # the checksums; None if the manifest has them
    read_back: bool  # whether to read the shard again before its manifest is written
    wait_seconds: float  # that other ranks may take
    in_a_hurry: threading.Event  # set when this process has failed: other ranks may be gone

    def write_own(self) -> None:
        """Write this rank's files; raise SaveFailed or OSError if that is not possible."""
        path, rank = self.folder.path, self.manifest.rank
        try:
            make_folder(path)
            manifest = self.manifest
            if self.measured is not None:
                problem = self.measured.problem()
                if problem:
                    raise SaveFailed(f"step {manifest.step} was not saved: {problem}")
                manifest = replace(manifest, entries=self.measured.added_to(manifest.entries))
            write_shard(path, rank, manifest.entries, self.tensors())
            if self.read_back:
                with ShardReader(path, rank, manifest.entries) as shard:
                    shard.check()
            write_file(path / manifest_name(rank), [manifest.to_bytes()])
        except BaseException as error:
            self._give_up(error)
            raise

    def commit(self) -> None:
        """On rank 0: write COMMIT, when all ranks have written their manifest.

        Raises SaveFailed if a rank could not write, or not in time, and OSError if this one cannot.
        Then there is no COMMIT.
        """
        if self.manifest.rank != 0:
            return
        try:
            size = self.manifest.world_size
            checksums = tuple(digest(self._manifest_of(rank)) for rank in range(size))
            commit = Commit(self.manifest.save_id, self.manifest.step, size, checksums)
            data = commit.to_bytes()
            if len(data) > MAX_COMMIT:
                raise SaveFailed(f"{COMMIT}: expected at most {MAX_COMMIT} bytes, got {len(data)}")
            write_file(self.folder.path / COMMIT, [data])
        except BaseException:
            self.discard()
            raise

    def discard(self) -> None:
        """On rank 0: remove the folder of a save that will never be finished, if the disk lets."""
        if self.manifest.rank == 0 and not self.folder.is_committed:
            with contextlib.suppress(OSError):
                remove_folder(self.folder)

    def _give_up(self, error: BaseException) -> None:
        """Remove the files of a failed save, and mark it failed, so that no rank waits for it.

        If the disk fails at that too, other ranks wait until their time is over.
        """
        path, rank = self.folder.path, self.manifest.rank
        with contextlib.suppress(OSError):
            for name in (manifest_name(rank), shard_name(rank)):
                remove_file(path / name)
            if self.manifest.world_size > 1:
                write_file(path / f"failed-{rank:05d}", [repr(error)[:1000].encode()])
            else:
                remove_folder(self.folder)

    def _manifest_of(self, rank: int) -> bytes:
        """Wait for the manifest of a rank and return its bytes."""
        folder = self.folder.path
        path = folder / manifest_name(rank)
        until = time.monotonic() + self.wait_seconds
        hurries = False
        while not path.exists():
            if not hurries and self.in_a_hurry.is_set():
                hurries, until = True, min(until, time.monotonic() + HURRY_SECONDS)
            failed = sorted(found.name for found in folder.glob("failed-*"))
            if failed:
                raise SaveFailed(
                    f"{folder.name} was not committed: rank {int(failed[0][7:])} failed"
                )
            if not folder.exists():
                raise SaveFailed(f"{folder} was removed while it was being written")
            if time.monotonic() > until:
                raise SaveFailed(
                    f"{folder.name} was not committed: rank {rank} wrote no manifest in time; "
                    "is it alive, and do all ranks write to the same disk?"
                )
            time.sleep(POLL_SECONDS)
        return read_file(path, MAX_MANIFEST)
