"""A rank's tensors in one safetensors file: written without a copy, read with every byte checked.

The header follows from the manifest to the byte, so it is compared, not parsed; the rest of the
file is the tensors, each with its checksum. No byte of a shard is beyond suspicion. Any reader of
safetensors can open one; none is needed here.
"""

import ctypes
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from heal.checkpoint.encode import torch_dtype
from heal.checkpoint.files import CannotEncode, CheckpointCorrupt, open_file, read_into, write_file
from heal.checkpoint.manifest import ITEM_BYTES, Entry, shard_name
from heal.integrity import fingerprints

ALIGNMENT = 8  # of the header, as the format asks for
BATCH_BYTES = 64 * 2**20  # that are read and checked in one go
LENGTH_BYTES = 8  # of the header's length, little-endian, at the beginning


def dtype_name(tensor: Tensor, name: str) -> str:
    """Return the name under which a tensor's dtype is saved.

    Raises:
        CannotEncode: there is none.
    """
    found = str(tensor.dtype).removeprefix("torch.")
    if found not in ITEM_BYTES or tensor.layout is not torch.strided:
        raise CannotEncode(
            f"{name}: expected a dense tensor of numbers, got a {tensor.layout} one of "
            f"{tensor.dtype}"
        )
    return found


def checksums(tensors: Sequence[Tensor]) -> Tensor:
    """Return the checksum of each tensor: int64, on the device; nothing waits."""
    return fingerprints(tensors)


def checksum_text(number: int) -> str:
    """Return a checksum as the manifest has it."""
    return f"{number & (2**64 - 1):016x}"


EMPTY_CHECKSUM = checksum_text(0)  # of a tensor without elements


def placed(entries: Mapping[str, Entry], rank: int) -> dict[str, Entry]:
    """Return the entries with the offsets at which ``rank`` writes those that it holds."""
    made: dict[str, Entry] = {}
    offset = 0
    for name, e in entries.items():
        if e.held_by != rank:
            made[name] = e
            continue
        made[name] = Entry(e.held_by, e.dtype, e.shape, e.whole, e.start, e.checksum, offset)
        offset += e.num_bytes
    return made


def header(entries: Mapping[str, Entry], rank: int) -> bytes:
    """Return the beginning of a rank's shard: the length of the JSON, and the JSON, padded."""
    table = {
        name: {
            "dtype": ITEM_BYTES[e.dtype][0],
            "shape": _shape_on_disk(e),
            "data_offsets": [e.offset, e.offset + e.num_bytes],
        }
        for name, e in entries.items()
        if e.held_by == rank
    }
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def _shape_on_disk(entry: Entry) -> list[int]:
    code, item_bytes = ITEM_BYTES[entry.dtype]
    return [*entry.shape, item_bytes] if code == "U8" and item_bytes > 1 else list(entry.shape)


def write_shard(
    folder: Path, rank: int, entries: Mapping[str, Entry], tensors: Mapping[str, Tensor]
) -> None:
    """Write the tensors that a rank holds; they must be on the host and stay as they are.

    Raises:
        OSError: the disk is full or broken.
    """
    held = [tensors[name].contiguous() for name, e in entries.items() if e.held_by == rank]
    write_file(
        folder / shard_name(rank),
        (header(entries, rank), *(memory_of(t) for t in held if t.numel())),
    )


class ShardReader:
    """Reads the shard of one rank. The size and the header are checked when it is opened.

    Args:
        folder: of the checkpoint.
        rank: whose shard.
        entries: that rank's, from its manifest.

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
            self.close()
            raise

    def __enter__(self) -> "ShardReader":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Return tensors in memory of their own, each of them checked.

        Raises:
            CheckpointCorrupt: names the first tensor whose bytes have changed.
        """
        found: dict[str, Tensor] = {}
        for name in names:
            entry = self._entries.get(name)
            if entry is None:
                raise CheckpointCorrupt(f"{self._path} does not hold tensor {name!r}")
            found[name] = self._read_one(entry)
        self._compare(found)
        return found

    def check(self) -> None:
        """Read every tensor and compare it with its checksum, in memory that is used again.

        Raises:
            CheckpointCorrupt: names the first that has changed.
        """
        memory = torch.empty(0, dtype=torch.uint8)
        for names in _batches(self._entries):
            begin = self._entries[names[0]].offset
            end = self._entries[names[-1]].offset + self._entries[names[-1]].num_bytes
            if end - begin > len(memory):
                memory = torch.empty(end - begin, dtype=torch.uint8)
            if end > begin:
                target = memory_of(memory[: end - begin])
                read_into(self._file, target, len(self._header) + begin, self._path)
            spans = {n: (self._entries[n].offset, self._entries[n].num_bytes) for n in names}
            self._compare({n: memory[at - begin : at - begin + k] for n, (at, k) in spans.items()})

    def _compare(self, found: Mapping[str, Tensor]) -> None:
        """Raise unless every tensor, or its bytes, has the checksum of its entry."""
        filled = {name: tensor for name, tensor in found.items() if tensor.numel()}
        sums = checksums(list(filled.values())).tolist()
        now = dict(zip(filled, map(checksum_text, sums), strict=True))
        for name in found:
            there, wanted = now.get(name, EMPTY_CHECKSUM), self._entries[name].checksum
            if there != wanted:
                raise CheckpointCorrupt(
                    f"{self._path}: tensor {name!r} is not what was saved: its checksum is "
                    f"{there}, that of the manifest {wanted}"
                )

    def _check_layout(self) -> None:
        offset = 0
        for name, entry in self._entries.items():
            if entry.offset != offset:
                raise CheckpointCorrupt(
                    f"{self._path}: tensor {name!r}: expected byte {offset}, got {entry.offset}"
                )
            offset += entry.num_bytes
        wanted = len(self._header) + offset
        size = os.fstat(self._file).st_size
        if size != wanted:
            raise CheckpointCorrupt(f"{self._path}: expected {wanted} bytes, got {size}")
        there = bytearray(len(self._header))
        read_into(self._file, memoryview(there), 0, self._path)
        if there != self._header:
            raise CheckpointCorrupt(f"{self._path}: the header is not that of its manifest")

    def _read_one(self, entry: Entry) -> Tensor:
        memory = torch.empty(entry.num_bytes, dtype=torch.uint8)
        if entry.num_bytes:
            at = len(self._header) + entry.offset
            read_into(self._file, memory_of(memory), at, self._path)
        return memory.view(torch_dtype(entry.dtype)).view(entry.shape)


def _batches(entries: Mapping[str, Entry]) -> Iterator[list[str]]:
    """Put neighbours together, so that many small tensors cost one call and not many."""
    names: list[str] = []
    size = 0
    for name, entry in entries.items():
        if names and size + entry.num_bytes > BATCH_BYTES:
            yield names
            names, size = [], 0
        names.append(name)
        size += entry.num_bytes
    if names:
        yield names


def memory_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor on the host, shared; it must outlive them."""
    array = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    return memoryview(array).cast("B")
