"""Reads a checkpoint for one rank, whatever the number of ranks that wrote it.

A shard is a safetensors file. Its header follows from the manifest to the byte, so it is compared,
not parsed. The rest of the file is the tensors, each with its checksum.
"""

import hashlib
import json
import math
import os
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from heal.buffers import memory_of
from heal.checkpoint.encode import decode, torch_dtype
from heal.checkpoint.files import (
    CannotReshard,
    CheckpointCorrupt,
    CheckpointRefused,
    open_file,
    read_into,
)
from heal.checkpoint.manifest import (
    ITEM_BYTES,
    Chunk,
    Entry,
    Manifest,
    manifest_name,
    read_commit,
    read_manifest,
    shard_name,
)
from heal.state_checks import fingerprints

ALIGNMENT = 8  # of the header, as the format asks for
LENGTH_BYTES = 8  # of the header's length, little-endian, at the beginning

PartOf = Callable[[str], Chunk | None]
"""Which part of a tensor is needed, by its name; None if that which the same rank saved."""

Piece = tuple[Entry, tuple[slice, ...], tuple[slice, ...]]
"""A saved part that a needed one overlaps, and where: in the needed part, and in the saved one."""

ALL: tuple[slice, ...] = ()  # where, if the parts are the same


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

    def manifests(self) -> Iterator[Manifest]:
        """Yield the manifests of all ranks."""
        return map(self.manifest, range(self.commit.world_size))

    def check(self) -> None:
        """Read every byte of every rank; raise an error that names what has changed."""
        for manifest in self.manifests():
            for name, entry in manifest.entries.items():
                self._check_holder(name, entry)
            with Shard(self.folder, manifest.rank, manifest.entries) as shard:
                shard.check()

    def read(self, rank: int, world_size: int, part_of: PartOf = lambda name: None) -> Restored:
        """Return what a rank of a world needs.

        If as many ranks saved, each gets what it saved. Otherwise shards are put together again,
        and everything else comes from the rank of the same number, counted around.
        """
        commit = self.commit
        own = self.manifest(rank % commit.world_size)
        entries = own.entries
        if commit.world_size != world_size:
            entries = own.entries | self._sharded() | own.entries  # ours first, and as we have it
        tensors: dict[str, Tensor] = {}
        by_holder: dict[int, list[tuple[str, Piece]]] = {}
        for name, entry in entries.items():
            needed = part_of(name)
            pieces = self._pieces(name, entry, needed)
            if needed is not None and pieces != [(entry, ALL, ALL)]:
                tensors[name] = torch.empty(needed.shape, dtype=torch_dtype(entry.dtype))
            for piece in pieces:
                self._check_holder(name, piece[0])
                by_holder.setdefault(piece[0].held_by, []).append((name, piece))
        for holder, wanted in by_holder.items():
            with Shard(self.folder, holder, self.manifest(holder).entries) as shard:
                for name, (_, here, there) in wanted:
                    tensor = shard.read(name)
                    if here == there == ALL:
                        tensors[name] = tensor
                    else:
                        tensors[name][here] = tensor[there]
        tensors = {name: tensors[name] for name in entries}
        values = decode(own.values, tensors, self.folder / manifest_name(own.rank))
        return Restored(commit.step, own.rank, commit.world_size, commit.save_id, tensors, values)

    def read_whole(self) -> Restored:
        """Return everything for one process, with all parts put together."""
        wholes = {n: Chunk.all_of(e.whole or ()) for n, e in self._sharded().items()}
        return self.read(0, 1, wholes.get)

    def _sharded(self) -> dict[str, Entry]:
        """Return the entries of tensors that ranks have parts of."""
        found = (pair for manifest in self.manifests() for pair in manifest.entries.items())
        return {name: entry for name, entry in found if entry.whole is not None}

    def _pieces(self, name: str, entry: Entry, needed: Chunk | None) -> list[Piece]:
        """Return the saved parts that a needed part of a tensor overlaps."""
        saved = entry.chunk or Chunk.all_of(entry.shape)
        is_of_another_model = entry.chunk is None and needed and needed.whole != entry.shape
        if needed is None or needed == saved or is_of_another_model:
            return [(entry, ALL, ALL)]
        parts = {saved: entry}
        for manifest in self.manifests() if entry.chunk else ():
            part = manifest.entries.get(name)
            if part is None or part.chunk is None:
                continue
            if part.whole != needed.whole:
                raise CannotReshard(
                    f"{self.folder}: {name!r}: expected {needed.whole} as in this run, got "
                    f"{part.whole} in the checkpoint"
                )
            parts.setdefault(part.chunk, part)  # replicas have the same
        meetings = [(part, *needed.overlap(chunk)) for chunk, part in parts.items()]
        covered = sum(count for *_, count in meetings)
        if covered != math.prod(needed.shape):
            raise CannotReshard(
                f"{self.folder}: the parts of {name!r} cover {covered} elements of the "
                f"{needed.shape} at {needed.start} that this rank needs"
            )
        return [(part, here, there) for part, here, there, count in meetings if count]

    def _check_holder(self, name: str, entry: Entry) -> None:
        """Check that the manifest of the rank that holds a tensor lists it too."""
        held = self.manifest(entry.held_by).entries.get(name)
        if held is None or held.held_by != entry.held_by or held.content != entry.content:
            raise CheckpointCorrupt(
                f"{self.folder / manifest_name(entry.held_by)} does not hold the {name!r} that "
                "another manifest expects there"
            )


class Shard:
    """The tensors of one rank, open for reading; raises CheckpointCorrupt if the file is not so."""

    def __init__(self, folder: Path, rank: int, entries: Mapping[str, Entry]) -> None:
        self._path = folder / shard_name(rank)
        self._entries = {name: e for name, e in entries.items() if e.held_by == rank}
        self._header = header(entries, rank)
        self._file = open_file(self._path)
        try:
            self._check_layout()
        except BaseException:
            os.close(self._file)
            raise

    def __enter__(self) -> "Shard":
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self._file)

    def check(self) -> None:
        """Read every tensor, in memory that is used again; raise if the bytes of one changed."""
        memory = torch.empty(
            max((entry.num_bytes for entry in self._entries.values()), default=0),
            dtype=torch.uint8,
        )
        for name, entry in self._entries.items():
            self._read(name, memory[: entry.num_bytes])

    def read(self, name: str) -> Tensor:
        """Return a tensor in memory of its own; raise if its bytes have changed."""
        entry = self._entries[name]
        memory = self._read(name, torch.empty(entry.num_bytes, dtype=torch.uint8))
        return memory.view(torch_dtype(entry.dtype)).view(entry.shape)

    def _read(self, name: str, memory: Tensor) -> Tensor:
        entry = self._entries[name]
        if len(memory):
            at = len(self._header) + entry.offset
            read_into(self._file, memory_of(memory), at, self._path)
        got = checksum_text(int(fingerprints([memory])) if len(memory) else 0)
        if got != entry.checksum:
            raise CheckpointCorrupt(
                f"{self._path}: tensor {name!r} is not what was saved: expected checksum "
                f"{entry.checksum}, got {got}"
            )
        return memory

    def _check_layout(self) -> None:
        offset = 0
        for name, entry in self._entries.items():
            if entry.offset != offset:
                raise CheckpointCorrupt(
                    f"{self._path}: tensor {name!r}: expected byte {offset}, got {entry.offset}"
                )
            offset += entry.num_bytes
        expected, size = len(self._header) + offset, os.fstat(self._file).st_size
        if size != expected:
            raise CheckpointCorrupt(f"{self._path}: expected {expected} bytes, got {size}")
        found = bytearray(len(self._header))
        read_into(self._file, memoryview(found), 0, self._path)
        if found != self._header:
            raise CheckpointCorrupt(f"{self._path}: the header is not that of its manifest")


def header(entries: Mapping[str, Entry], rank: int) -> bytes:
    """Return the beginning of a rank's shard: the length of the JSON, and the JSON, padded."""
    table = {}
    for name, e in entries.items():
        if e.held_by == rank:
            code, item_bytes = ITEM_BYTES[e.dtype]
            table[name] = {
                "dtype": code,
                "shape": [*e.shape, item_bytes] if code == "U8" and item_bytes > 1 else e.shape,
                "data_offsets": [e.offset, e.offset + e.num_bytes],
            }
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def checksum_text(number: int) -> str:
    """Return a fingerprint as the manifest has it; that of a tensor without elements is 0."""
    return f"{number & (2**64 - 1):016x}"
