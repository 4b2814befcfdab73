"""One save: the ranks agree on who writes what, then each copies and writes its own, COMMIT last.

Tensors that several ranks have alike, to the bit, are written once, by the rank that has least to
write. So replicas share the work, and what differs between ranks is kept for each.
"""

import contextlib
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from heal.buffers import memory_of
from heal.checkpoint.files import (
    COMMIT,
    NoSpace,
    SaveFailed,
    StepFolder,
    StillWriting,
    folder_for,
    free_bytes,
    make_folder,
    next_retry,
    read_file,
    remove_folder,
    write_file,
)
from heal.checkpoint.manifest import (
    MAX_COMMIT,
    MAX_MANIFEST,
    Commit,
    Entry,
    Manifest,
    digest,
    manifest_name,
    shard_name,
)
from heal.checkpoint.reading import Shard, checksum_text, header
from heal.cluster.launch import RankGroup
from heal.state_checks import MEASURED, fingerprints
from heal.training_state import copy_by_kind
from zclip import grad_stats
from zclip.layout import NAN

SPARE_BYTES = 16 * 2**20  # left free for manifests, the journal, and other programs
BUSY = "the save before is still being written"
POLL_SECONDS = 0.02  # between looks for the files of other ranks
HURRY_SECONDS = 3.0  # for their files, when this process has failed: they may be gone


class Proposal(NamedTuple):
    """What a rank offers before a save. With ``trouble`` no rank saves."""

    entries: dict[str, Entry]
    trouble: str
    retry: int
    free: int
    save_id: str


def agree(
    directory: Path,
    ranks: RankGroup,
    step: int,
    entries: dict[str, Entry],
    values: Any,
    trouble: str,
) -> tuple[StepFolder, Manifest]:
    """Return the folder to write to, and this rank's manifest; every rank has to call this.

    ``trouble`` says why this rank cannot save; empty if it can. Then every rank raises SaveFailed.
    """
    retry = free = 0
    try:
        make_folder(directory)  # again, if it was removed while the run went on
        retry, free = next_retry(directory, step), free_bytes(directory)
    except (OSError, SaveFailed) as error:
        trouble = trouble or f"{directory} cannot be used: {error}"
    mine = Proposal(entries, trouble, retry, free, secrets.token_hex(16))
    offered = [
        Proposal({name: Entry.from_json(e) for name, e in theirs.items()}, *rest)
        for theirs, *rest in ranks.gather(mine)
    ]
    for rank, proposal in enumerate(offered):
        if proposal.trouble:
            where = f"rank {rank}: " if ranks.size > 1 else ""
            kind = StillWriting if proposal.trouble == BUSY else SaveFailed
            raise kind(f"step {step} was not saved: {where}{proposal.trouble}")
    own, needed = share([proposal.entries for proposal in offered], ranks.rank)
    free = min(proposal.free for proposal in offered)
    if needed + SPARE_BYTES > free:
        raise NoSpace(
            f"step {step} was not saved: {needed} bytes and a reserve of {SPARE_BYTES} are needed, "
            f"and {free} are free at {directory}; free some, or keep fewer checkpoints"
        )
    folder = folder_for(directory, step, max(proposal.retry for proposal in offered))
    return folder, Manifest(offered[0].save_id, step, ranks.rank, ranks.size, own, values)


def share(offered: Sequence[Mapping[str, Entry]], rank: int) -> tuple[dict[str, Entry], int]:
    """Return the entries of a rank with holder and place, and how many bytes all ranks write.

    The result depends on nothing but what was offered, so that all ranks come to the same.
    """
    owners: dict[tuple[str, Any], list[int]] = {}
    num_bytes: dict[tuple[str, Any], int] = {}
    for owner, entries in enumerate(offered):
        for name, entry in entries.items():
            owners.setdefault((name, entry.content), []).append(owner)
            num_bytes[name, entry.content] = entry.num_bytes
    load = [0] * len(offered)
    holder: dict[tuple[str, Any], int] = {}
    for same in sorted(owners, key=lambda same: (-num_bytes[same], same[0], owners[same])):
        holder[same] = min(owners[same], key=load.__getitem__)  # the first of those that tie
        load[holder[same]] += num_bytes[same]
    own: dict[str, Entry] = {}
    offset = 0
    for name, entry in offered[rank].items():
        own[name] = entry._replace(held_by=holder[name, entry.content])
        if own[name].held_by == rank:
            own[name] = own[name]._replace(offset=offset)
            offset += entry.num_bytes
    return own, sum(load)


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
        self._names = [name for name, tensor in tensors.items() if tensor.numel()]
        trained = [
            tensors[name]
            for name in self._names
            if name.startswith(("parameter/", "state/")) and tensors[name].dtype in MEASURED
        ]
        is_checked = bool(trained) and not allow_nonfinite
        bad = grad_stats(trained)[:, NAN:].sum() if is_checked else torch.zeros(())
        sums = fingerprints(tensors[name] for name in self._names)
        self._copies = HostCopies({"sums": sums, "bad": bad}, {})

    def added_to(self, entries: Mapping[str, Entry]) -> tuple[dict[str, Entry], str]:
        """Wait; return entries with checksums, and why not to save them, empty if they may be."""
        found = self._copies.wait()
        sums, bad = dict(zip(self._names, found["sums"].tolist(), strict=True)), int(found["bad"])
        complete = {
            name: entry._replace(checksum=checksum_text(sums.get(name, 0)))
            for name, entry in entries.items()
        }
        return complete, f"parameters and optimizer state hold {bad} NaN or Inf" if bad else ""


def write_shard(
    folder: Path, rank: int, entries: Mapping[str, Entry], tensors: Mapping[str, Tensor]
) -> None:
    """Write the tensors that a rank holds; they must be on the host and stay as they are."""
    held = [tensors[name].contiguous() for name, e in entries.items() if e.held_by == rank]
    tensors_bytes = (memory_of(t) for t in held if t.numel())
    write_file(folder / shard_name(rank), (header(entries, rank), *tensors_bytes))


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
        path, manifest = self.folder.path, self.manifest
        rank = manifest.rank
        try:
            make_folder(path)
            if self.measured is not None:
                entries, problem = self.measured.added_to(manifest.entries)
                if problem:
                    raise SaveFailed(f"step {manifest.step} was not saved: {problem}")
                manifest = replace(manifest, entries=entries)
            write_shard(path, rank, manifest.entries, self.tensors())
            if self.read_back:
                with Shard(path, rank, manifest.entries) as shard:
                    shard.check()
            write_file(path / manifest_name(rank), [manifest.to_bytes()])
        except BaseException as error:
            self.give_up(error)
            raise

    def commit(self) -> None:
        """On rank 0: write COMMIT, when all ranks have written their manifest, or raise."""
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

    def give_up(self, error: BaseException) -> None:
        """Remove the files of a failed save, and mark it failed, so that no rank waits for it.

        If the disk fails at that too, other ranks wait until their time is over.
        """
        path, rank = self.folder.path, self.manifest.rank
        with contextlib.suppress(OSError):
            for name in (manifest_name(rank), shard_name(rank)):
                (path / name).unlink(missing_ok=True)
            if self.manifest.world_size > 1:
                make_folder(path)
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
