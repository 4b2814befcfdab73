"""The files of one checkpoint that describe it: a manifest for each rank, and COMMIT.

``<folder>/step-000123/`` holds a shard of tensors and a manifest for every rank, and one COMMIT.
A manifest lists the rank's tensors with their checksums and holds its plain values. COMMIT, written
last, has the checksum of every manifest and of itself. File names follow from the rank: no name is
taken from a file. This module imports no torch.
"""

import hashlib
import re
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from heal.checkpoint.files import CheckpointCorrupt, read_file
from heal.checkpoint.strict_json import Page, page_bytes

COMMIT = "COMMIT"
MAX_MANIFEST = 256 * 2**20  # bytes; a thousand times what a large model needs
MAX_COMMIT = 64 * 2**20
MAX_RANKS = 100_000
MAX_STEP = 10**14

ITEM_BYTES: dict[str, tuple[str, int]] = {
    "bool": ("BOOL", 1),
    "uint8": ("U8", 1),
    "int8": ("I8", 1),
    "float8_e5m2": ("F8_E5M2", 1),
    "float8_e4m3fn": ("F8_E4M3", 1),
    "int16": ("I16", 2),
    "uint16": ("U16", 2),
    "float16": ("F16", 2),
    "bfloat16": ("BF16", 2),
    "int32": ("I32", 4),
    "uint32": ("U32", 4),
    "float32": ("F32", 4),
    "float64": ("F64", 8),
    "int64": ("I64", 8),
    "uint64": ("U64", 8),
    "complex64": ("C64", 8),
    "complex128": ("U8", 16),
    "float8_e4m3fnuz": ("U8", 1),
    "float8_e5m2fnuz": ("U8", 1),
    "float8_e8m0fnu": ("U8", 1),
}
"""Names of torch and of safetensors, and bytes per element.

What safetensors has no name for is stored as bytes, with one more dimension.
"""


def shard_name(rank: int) -> str:
    """Return the name of a rank's file of tensors."""
    return f"rank-{rank:05d}.safetensors"


def manifest_name(rank: int) -> str:
    """Return the name of a rank's manifest."""
    return f"manifest-{rank:05d}.json"


@dataclass(frozen=True, slots=True)
class Chunk:
    """A box within a larger tensor: which part of which whole a rank holds."""

    whole: tuple[int, ...]
    start: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def box(self) -> tuple[slice, ...]:
        """Return where the part is in the whole."""
        return tuple(slice(b, b + n) for b, n in zip(self.start, self.shape, strict=True))

    def overlap(self, other: "Chunk") -> tuple[tuple[slice, ...], tuple[slice, ...], int] | None:
        """Return where both boxes meet, in coordinates of each, and how many elements that is."""
        mine, theirs, count = [], [], 1
        for begin, size, their_begin, their_size in zip(
            self.start, self.shape, other.start, other.shape, strict=True
        ):
            low, high = max(begin, their_begin), min(begin + size, their_begin + their_size)
            if high <= low:
                return None
            mine.append(slice(low - begin, high - begin))
            theirs.append(slice(low - their_begin, high - their_begin))
            count *= high - low
        return tuple(mine), tuple(theirs), count


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of one rank."""

    held_by: int  # the rank in whose shard the bytes are; several ranks may share them
    dtype: str  # torch's name for it
    shape: tuple[int, ...]  # of the part that is saved
    whole: tuple[int, ...] | None  # shape of the tensor that this is a part of, if it is one
    start: tuple[int, ...] | None  # index of the part's first element in the whole
    checksum: str  # 16 hexadecimal digits; see ``zclip::fingerprint``
    offset: int = 0  # of the first byte, after the header of the shard

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * ITEM_BYTES[self.dtype][1]

    @property
    def chunk(self) -> Chunk | None:
        """The part of a larger tensor that this is; None if it is no part."""
        if self.whole is None or self.start is None:
            return None
        return Chunk(self.whole, self.start, self.shape)

    @property
    def content(self) -> tuple[Any, ...]:
        """What two ranks have in common if they hold the same numbers of the same tensor."""
        return self.dtype, self.shape, self.whole, self.start, self.checksum

    def to_json(self) -> list[Any]:
        whole, start = (None if v is None else list(v) for v in (self.whole, self.start))
        head = [self.held_by, self.dtype, list(self.shape), whole, start]
        return [*head, self.checksum, self.offset]

    @classmethod
    def from_json(cls, fields: list[Any]) -> "Entry":
        """Return what :meth:`to_json` made a list of; nothing is checked."""
        held_by, dtype, shape, whole, start, checksum, offset = fields
        bounds, begins = (None if v is None else tuple(v) for v in (whole, start))
        return cls(held_by, dtype, tuple(shape), bounds, begins, checksum, offset)


@dataclass(frozen=True, slots=True)
class Manifest:
    """What one rank saved."""

    save_id: str
    step: int
    rank: int
    world_size: int
    entries: dict[str, Entry]
    values: Any

    def to_bytes(self) -> bytes:
        """Return the file's content."""
        return page_bytes(
            save_id=self.save_id,
            step=self.step,
            rank=self.rank,
            world_size=self.world_size,
            file=shard_name(self.rank),
            tensors={name: entry.to_json() for name, entry in self.entries.items()},
            values=self.values,
        )


@dataclass(frozen=True, slots=True)
class Commit:
    """What makes a checkpoint complete: the checksum of each rank's manifest."""

    save_id: str
    step: int
    world_size: int
    checksums: tuple[str, ...]

    def to_bytes(self) -> bytes:
        """Return the file's content: a line of JSON, and a line with its checksum."""
        line = page_bytes(
            save_id=self.save_id,
            step=self.step,
            world_size=self.world_size,
            manifests={manifest_name(rank): sum for rank, sum in enumerate(self.checksums)},
        )
        return line + b"\n" + digest(line).encode() + b"\n"


def digest(data: bytes) -> str:
    """Return the checksum of a manifest or of a line of COMMIT."""
    return hashlib.blake2b(data, digest_size=32).hexdigest()


def read_commit(folder: Path) -> Commit:
    """Read COMMIT and check it against its own checksum."""
    path = folder / COMMIT
    line, newline, rest = read_file(path, MAX_COMMIT).partition(b"\n")
    if not newline or rest != digest(line).encode() + b"\n":
        raise CheckpointCorrupt(f"{path} does not match its own checksum")
    page = Page(line, path)
    world_size = page.whole("world_size", 1, MAX_RANKS)
    listed = page.mapping("manifests")
    names = [manifest_name(rank) for rank in range(world_size)]
    if list(listed) != names:
        strange = next((n for n in listed if n not in names), f"not all of {world_size}")
        page.fail(f"manifests: expected one of each of {world_size} ranks, got {strange[:100]!r}")
    checksums = tuple(page.text(f"checksum of {n}", v, r"[0-9a-f]{64}") for n, v in listed.items())
    save_id = page.text("save_id", page["save_id"], r"[0-9a-f]{32}")
    return Commit(save_id, page.whole("step", 0, MAX_STEP), world_size, checksums)


def read_manifest(folder: Path, commit: Commit, rank: int) -> Manifest:
    """Read the manifest of a rank, check it against COMMIT, and check every field of it."""
    path = folder / manifest_name(rank)
    data = read_file(path, MAX_MANIFEST)
    if digest(data) != commit.checksums[rank]:
        raise CheckpointCorrupt(f"{path} does not match its checksum in {COMMIT}")
    page = Page(data, path)
    for name, expected in (
        ("save_id", commit.save_id),
        ("step", commit.step),
        ("rank", rank),
        ("world_size", commit.world_size),
        ("file", shard_name(rank)),
    ):
        if page[name] != expected or type(page[name]) is not type(expected):
            page.fail(f"{name}: expected {expected!r}, got {str(page[name])[:100]!r}")
    entries = {
        name: _checked_entry(page, name, fields, commit.world_size)
        for name, fields in page.mapping("tensors").items()
    }
    values = page["values"]
    return Manifest(commit.save_id, commit.step, rank, commit.world_size, entries, values)


def _checked_entry(page: Page, name: str, fields: Any, world_size: int) -> Entry:
    where = f"tensor {name[:100]!r}"
    if "\0" in name or not re.match(r"[a-z]+/", name):
        page.fail(f"{where}: expected a name such as param/0, got this one")
    if not isinstance(fields, list) or len(fields) != 7:
        page.fail(f"{where}: expected a list of seven fields, got {str(fields)[:100]}")
    held_by, dtype, shape, whole, start, checksum, offset = fields
    if type(held_by) is not int or not 0 <= held_by < world_size:
        page.fail(f"{where}: expected a rank under {world_size}, got {str(held_by)[:40]}")
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        page.fail(f"{where}: expected a dtype, got {str(dtype)[:40]!r}")
    sizes = page.sizes(where, shape)
    if (whole is None) != (start is None):
        page.fail(f"{where}: expected both the whole and the start of a part, got one of them")
    if whole is not None:
        bounds, begins = page.sizes(where, whole), page.sizes(where, start)
        if len({len(sizes), len(bounds), len(begins)}) != 1 or any(
            b + n > w for b, n, w in zip(begins, sizes, bounds, strict=True)
        ):
            page.fail(f"{where}: expected a part within {whole}, got {shape} at {start}")
    page.text(f"checksum of {where}", checksum, r"[0-9a-f]{16}")
    if type(offset) is not int or offset < 0:
        page.fail(f"{where}: expected an offset in bytes, got {str(offset)[:40]}")
    return Entry.from_json(fields)
