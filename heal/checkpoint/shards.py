"""A rank's tensors in one safetensors file: written without a copy, read with every byte checked.

The header follows from the manifest to the byte, so it is compared, not parsed. The rest of the
file is the tensors, each with its checksum. Any reader of safetensors can open a shard; none is
needed here.
"""

import ctypes
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from heal.checkpoint.encode import torch_dtype
from heal.checkpoint.files import CannotEncode, CheckpointCorrupt, open_file, read_into, write_file
from heal.checkpoint.manifest import ITEM_BYTES, Chunk, Entry, shard_name
from heal.integrity import fingerprints

ALIGNMENT = 8  # of the header, as the format asks for
BATCH_BYTES = 64 * 2**20  # that are read and checked in one go
LENGTH_BYTES = 8  # of the header's length, little-endian, at the beginning


def entry_of(tensor: Tensor, name: str, chunk: Chunk | None = None) -> Entry:
    """Return the entry of a tensor, without its checksum and place; raise if it cannot be saved."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in ITEM_BYTES or tensor.layout is not torch.strided:
        raise CannotEncode(
            f"{name}: expected a dense tensor of numbers, got a {tensor.layout} one of "
            f"{tensor.dtype}"
        )
    whole, start = (None, None) if chunk is None else (chunk.whole, chunk.start)
    return Entry(0, dtype, tuple(tensor.shape), whole, start, checksum_text(0))


def checksum_text(number: int) -> str:
    """Return a fingerprint as the manifest has it; that of a tensor without elements is 0."""
    return f"{number & (2**64 - 1):016x}"


def placed(entries: Mapping[str, Entry], rank: int) -> dict[str, Entry]:
    """Return the entries with the offsets at which ``rank`` writes those that it holds."""
    made: dict[str, Entry] = {}
    offset = 0
    for name, entry in entries.items():
        made[name] = entry
        if entry.held_by == rank:
            made[name] = replace(entry, offset=offset)
            offset += entry.num_bytes
    return made


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


def write_shard(
    folder: Path, rank: int, entries: Mapping[str, Entry], tensors: Mapping[str, Tensor]
) -> None:
    """Write the tensors that a rank holds; they must be on the host and stay as they are."""
    held = [tensors[name].contiguous() for name, e in entries.items() if e.held_by == rank]
    tensors_bytes = (memory_of(t) for t in held if t.numel())
    write_file(folder / shard_name(rank), (header(entries, rank), *tensors_bytes))


class ShardReader:
    """Reads the shard of one rank. The size and the header are checked when it is opened.

    Raises:
        CheckpointCorrupt: the file is missing, too short, too long, or its header differs.
    """

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

    def __enter__(self) -> "ShardReader":
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self._file)

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Return tensors in memory of their own; raise if the bytes of one have changed."""
        found: dict[str, Tensor] = {}
        for name in names:
            entry = self._entries.get(name)
            if entry is None:
                raise CheckpointCorrupt(f"{self._path} does not hold tensor {name!r}")
            memory = torch.empty(entry.num_bytes, dtype=torch.uint8)
            self._fill(memory, entry.offset)
            found[name] = memory.view(torch_dtype(entry.dtype)).view(entry.shape)
        self._compare(found)
        return found

    def check(self) -> None:
        """Compare every tensor with its checksum, in memory that is used again."""
        memory = torch.empty(0, dtype=torch.uint8)
        for batch in _batches(self._entries):
            begin = min(entry.offset for entry in batch.values())
            size = sum(entry.num_bytes for entry in batch.values())
            if size > len(memory):
                memory = torch.empty(size, dtype=torch.uint8)
            self._fill(memory[:size], begin)
            parts = memory[:size].split([entry.num_bytes for entry in batch.values()])
            self._compare(dict(zip(batch, parts, strict=True)))

    def _fill(self, memory: Tensor, offset: int) -> None:
        if len(memory):
            at = len(self._header) + offset
            read_into(self._file, memory_of(memory), at, self._path)

    def _compare(self, found: Mapping[str, Tensor]) -> None:
        """Raise unless every tensor, or its bytes, has the checksum of its entry."""
        filled = {name: tensor for name, tensor in found.items() if tensor.numel()}
        sums = dict(zip(filled, fingerprints(filled.values()).tolist(), strict=True))
        for name in found:
            got, expected = checksum_text(sums.get(name, 0)), self._entries[name].checksum
            if got != expected:
                raise CheckpointCorrupt(
                    f"{self._path}: tensor {name!r} is not what was saved: expected checksum "
                    f"{expected}, got {got}"
                )

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


def _batches(entries: Mapping[str, Entry]) -> Iterator[dict[str, Entry]]:
    """Group neighbours, so that many small tensors take one read."""
    batch: dict[str, Entry] = {}
    size = 0
    for name, entry in entries.items():
        if batch and size + entry.num_bytes > BATCH_BYTES:
            yield batch
            batch, size = {}, 0
        batch[name] = entry
        size += entry.num_bytes
    if batch:
        yield batch


def memory_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor on the host, shared; it must outlive them."""
    array = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    return memoryview(array).cast("B")
