"""Reads a checkpoint for one rank, whatever the number of ranks that wrote it."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from heal.checkpoint.encode import Chunk, decode, torch_dtype
from heal.checkpoint.files import CannotReshard, CheckpointCorrupt, CheckpointRefused
from heal.checkpoint.manifest import (
    Commit,
    Entry,
    Manifest,
    manifest_name,
    read_commit,
    read_manifest,
)
from heal.checkpoint.shards import ShardReader

Want = Callable[[str], Chunk | None]
"""Which part of a tensor is needed, by its name; None if that which the same rank saved."""


@dataclass(frozen=True, slots=True)
class Restored:
    """What was read for one rank, every byte of it verified.

    Attributes:
        step: the step that comes next.
        rank: whose values these are.
        world_size: how many ranks saved.
        save_id: of the save, random.
    """

    step: int
    rank: int
    world_size: int
    save_id: str
    tensors: dict[str, Tensor]
    values: Any

    def check_values(self, needs: Iterable[str]) -> None:
        """Raise unless the plain values have these names.

        Raises:
            CheckpointRefused: they have not: the checkpoint was made by another program.
        """
        found = self.values if isinstance(self.values, Mapping) else {}
        lacking = [name for name in needs if name not in found]
        if lacking:
            raise CheckpointRefused(
                f"its values have no {', '.join(lacking)}; expected a checkpoint of a healed run"
            )


class CheckpointReader:
    """One finished save.

    Args:
        folder: of the save.

    Raises:
        CheckpointCorrupt: COMMIT is missing or damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.commit: Commit = read_commit(folder)
        self._manifests: dict[int, Manifest] = {}

    def manifest(self, rank: int) -> Manifest:
        """Return the manifest of a rank."""
        if rank not in self._manifests:
            self._manifests[rank] = read_manifest(self.folder, self.commit, rank)
        return self._manifests[rank]

    def check(self, ranks: Iterable[int] | None = None) -> None:
        """Read every byte of every rank, or of some.

        Raises:
            CheckpointCorrupt: names the first file, and the tensor, that has changed.
        """
        for rank in range(self.commit.world_size) if ranks is None else ranks:
            manifest = self.manifest(rank)
            for name, entry in manifest.entries.items():
                self._holders_entry(name, entry)
            with ShardReader(self.folder, rank, manifest.entries) as shard:
                shard.check()

    def read(self, rank: int, world_size: int, want: Want = lambda name: None) -> Restored:
        """Return what a rank of a world needs.

        If as many ranks saved, each gets what it saved. Otherwise parts are put together anew, and
        what was not cut into parts, as values, comes from the rank of the same number, counted
        around.

        Args:
            rank: who reads.
            world_size: how many do.
            want: which part of each tensor is needed.

        Raises:
            CheckpointCorrupt: a file is missing or damaged.
            CannotReshard: the saved parts do not cover what is wanted.
        """
        saved_size = self.commit.world_size
        own = self.manifest(rank % saved_size)
        entries = dict(own.entries)
        if saved_size != world_size:
            for other in range(saved_size):
                for name, entry in self.manifest(other).entries.items():
                    if entry.whole is not None:
                        entries.setdefault(name, entry)
        needed = {name: want(name) for name in entries}
        tensors = self._read_direct(
            {n: e for n, e in entries.items() if e.whole is None or needed[n] in (None, _chunk(e))}
        )
        for name, chunk in needed.items():
            if chunk is None:
                continue
            if name not in tensors:
                tensors[name] = self._assemble(name, chunk)
            elif entries[name].whole is None and chunk.shape != chunk.whole == entries[name].shape:
                tensors[name] = tensors[name][chunk.box].clone()  # saved whole, wanted in part
        ordered = {name: tensors[name] for name in entries}
        values = decode(own.values, ordered, self.folder / manifest_name(own.rank))
        commit = self.commit
        return Restored(commit.step, own.rank, saved_size, commit.save_id, ordered, values)

    def read_whole(self) -> Restored:
        """Return everything, with all parts put together: for one process that wants it all."""
        wholes: dict[str, Chunk] = {}
        for rank in range(self.commit.world_size):
            for name, e in self.manifest(rank).entries.items():
                if e.whole is not None:
                    wholes[name] = Chunk(e.whole, (0,) * len(e.whole), e.whole)
        return self.read(0, 1, wholes.get)

    def _read_direct(self, entries: Mapping[str, Entry]) -> dict[str, Tensor]:
        by_holder: dict[int, list[str]] = {}
        for name, entry in entries.items():
            self._holders_entry(name, entry)
            by_holder.setdefault(entry.held_by, []).append(name)
        found: dict[str, Tensor] = {}
        for holder, names in by_holder.items():
            with ShardReader(self.folder, holder, self.manifest(holder).entries) as shard:
                found.update(shard.read(names))
        return found

    def _holders_entry(self, name: str, entry: Entry) -> None:
        """Check that the rank that is said to hold a tensor says so too."""
        held = self.manifest(entry.held_by).entries.get(name)
        if held is None or held.held_by != entry.held_by or not held.is_same_part(entry):
            raise CheckpointCorrupt(
                f"{self.folder / manifest_name(entry.held_by)} does not hold the {name!r} that "
                "another manifest expects there"
            )

    def _assemble(self, name: str, needed: Chunk) -> Tensor:
        """Put a part together from those that the ranks saved."""
        parts: dict[tuple[tuple[int, ...], tuple[int, ...]], Entry] = {}
        for rank in range(self.commit.world_size):
            entry = self.manifest(rank).entries.get(name)
            if entry is not None and entry.whole is not None and entry.start is not None:
                if entry.whole != needed.whole:
                    raise CannotReshard(
                        f"{self.folder}: {name!r} was {entry.whole} when it was saved and is "
                        f"{needed.whole}"
                    )
                parts.setdefault((entry.start, entry.shape), entry)
        dtype = next((torch_dtype(entry.dtype) for entry in parts.values()), torch.float32)
        made = torch.empty(needed.shape, dtype=dtype)
        covered = 0
        for entry in parts.values():
            chunk = _chunk(entry)
            meeting = None if chunk is None else needed.overlap(chunk)
            if meeting is None:
                continue
            here, there, count = meeting
            made[here] = self._read_direct({name: entry})[name][there]
            covered += count
        if not parts or covered != made.numel():
            raise CannotReshard(
                f"{self.folder}: the parts of {name!r} cover {covered} elements of the "
                f"{needed.shape} at {needed.start} that this rank needs"
            )
        return made


def _chunk(entry: Entry) -> Chunk | None:
    if entry.whole is None or entry.start is None:
        return None
    return Chunk(entry.whole, entry.start, entry.shape)
