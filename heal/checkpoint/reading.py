"""Reads a checkpoint for one rank, whatever the number of ranks that wrote it."""

import hashlib
import random
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from heal.checkpoint.encode import decode, torch_dtype
from heal.checkpoint.files import CannotReshard, CheckpointCorrupt, CheckpointRefused
from heal.checkpoint.manifest import (
    Chunk,
    Entry,
    Manifest,
    manifest_name,
    read_commit,
    read_manifest,
)
from heal.checkpoint.shards import ShardReader

PartOf = Callable[[str], Chunk | None]
"""Which part of a tensor is needed, by its name; None if that which the same rank saved."""


@dataclass(frozen=True, slots=True)
class Restored:
    """What was read for one rank, every byte of it verified."""

    step: int  # that comes next
    rank: int  # whose values these are
    world_size: int  # how many ranks saved
    save_id: str
    tensors: dict[str, Tensor]
    values: Any

    def check_values(self, needs: Iterable[str]) -> None:
        """Raise unless the plain values have these names."""
        found = self.values if isinstance(self.values, Mapping) else {}
        lacking = [name for name in needs if name not in found]
        if lacking:
            raise CheckpointRefused(
                f"expected a checkpoint of a healed run, got values without {', '.join(lacking)}"
            )

    def restore_rng(self, rank: int) -> None:
        """Set the generators as they were; a rank that is new gets a stream of its own.

        The state of another rank would give it the same random numbers, and so the same dropout.
        """
        if rank == self.rank:
            self.values["rng"].put_back()
            return
        text = f"{self.save_id} {rank}".encode()
        seed = int.from_bytes(hashlib.blake2b(text, digest_size=4).digest(), "big")
        torch.manual_seed(seed)  # of all devices
        random.seed(seed)
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            numpy.random.seed(seed)


class CheckpointReader:
    """One finished save; raises CheckpointCorrupt if its COMMIT is missing or damaged."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.commit = read_commit(folder)
        self._manifests: dict[int, Manifest] = {}

    def manifest(self, rank: int) -> Manifest:
        """Return the manifest of a rank."""
        if rank not in self._manifests:
            self._manifests[rank] = read_manifest(self.folder, self.commit, rank)
        return self._manifests[rank]

    def check(self, ranks: Iterable[int] | None = None) -> None:
        """Read every byte of every rank, or of some; raise an error that names what has changed."""
        for rank in range(self.commit.world_size) if ranks is None else ranks:
            entries = self.manifest(rank).entries
            for name, entry in entries.items():
                self._check_holder(name, entry)
            with ShardReader(self.folder, rank, entries) as shard:
                shard.check()

    def read(self, rank: int, world_size: int, part_of: PartOf = lambda name: None) -> Restored:
        """Return what a rank of a world needs.

        If as many ranks saved, each gets what it saved. Otherwise shards are put together again,
        and everything else comes from the rank of the same number, counted around.

        Raises:
            CheckpointCorrupt: a file is missing or damaged.
            CannotReshard: the saved parts do not cover what is needed.
        """
        commit = self.commit
        own = self.manifest(rank % commit.world_size)
        entries = dict(own.entries)
        if commit.world_size != world_size:
            for other in range(commit.world_size):
                for name, entry in self.manifest(other).entries.items():
                    if entry.whole is not None:
                        entries.setdefault(name, entry)
        needed = {name: part_of(name) for name in entries}
        tensors = self._read_direct(
            {n: e for n, e in entries.items() if e.chunk is None or needed[n] in (None, e.chunk)}
        )
        for name, chunk in needed.items():
            if chunk is None:
                continue
            if name not in tensors:
                tensors[name] = self._assemble(name, chunk)
            elif entries[name].whole is None and chunk.shape != chunk.whole == entries[name].shape:
                tensors[name] = tensors[name][chunk.box].clone()  # saved whole, needed in part
        ordered = {name: tensors[name] for name in entries}
        values = decode(own.values, ordered, self.folder / manifest_name(own.rank))
        return Restored(commit.step, own.rank, commit.world_size, commit.save_id, ordered, values)

    def read_whole(self) -> Restored:
        """Return everything for one process, with all parts put together."""
        wholes: dict[str, Chunk] = {}
        for rank in range(self.commit.world_size):
            for name, e in self.manifest(rank).entries.items():
                if e.whole is not None:
                    wholes[name] = Chunk(e.whole, (0,) * len(e.whole), e.whole)
        return self.read(0, 1, wholes.get)

    def _read_direct(self, entries: Mapping[str, Entry]) -> dict[str, Tensor]:
        by_holder: dict[int, list[str]] = {}
        for name, entry in entries.items():
            self._check_holder(name, entry)
            by_holder.setdefault(entry.held_by, []).append(name)
        found: dict[str, Tensor] = {}
        for holder, names in by_holder.items():
            with ShardReader(self.folder, holder, self.manifest(holder).entries) as shard:
                found.update(shard.read(names))
        return found

    def _check_holder(self, name: str, entry: Entry) -> None:
        """Check that the manifest of the rank that holds a tensor lists it too."""
        held = self.manifest(entry.held_by).entries.get(name)
        if held is None or held.held_by != entry.held_by or held.content != entry.content:
            raise CheckpointCorrupt(
                f"{self.folder / manifest_name(entry.held_by)} does not hold the {name!r} that "
                "another manifest expects there"
            )

    def _assemble(self, name: str, needed: Chunk) -> Tensor:
        """Put a part together from those that the ranks saved."""
        parts: dict[Chunk, Entry] = {}
        for rank in range(self.commit.world_size):
            entry = self.manifest(rank).entries.get(name)
            chunk = None if entry is None else entry.chunk
            if entry is not None and chunk is not None:
                if chunk.whole != needed.whole:
                    raise CannotReshard(
                        f"{self.folder}: {name!r}: expected {needed.whole} as in this run, got "
                        f"{chunk.whole} in the checkpoint"
                    )
                parts.setdefault(chunk, entry)
        dtype = next((torch_dtype(entry.dtype) for entry in parts.values()), torch.float32)
        made = torch.empty(needed.shape, dtype=dtype)
        covered = 0
        for chunk, entry in parts.items():
            meeting = needed.overlap(chunk)
            if meeting is not None:
                here, there, count = meeting
                made[here] = self._read_direct({name: entry})[name][there]
                covered += count
        if not parts or covered != made.numel():
            raise CannotReshard(
                f"{self.folder}: the parts of {name!r} cover {covered} elements of the "
                f"{needed.shape} at {needed.start} that this rank needs"
            )
        return made
