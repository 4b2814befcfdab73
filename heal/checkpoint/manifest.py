"""The files of one checkpoint that describe it: a manifest for each rank, and COMMIT; no torch.

``<folder>/step-000123/`` holds a shard of tensors and a manifest for every rank, and one COMMIT.
A manifest lists the rank's tensors with their checksums and holds its plain values. COMMIT, written
last, has the checksum of every manifest and of itself. No name of a file is taken from a file.
"""

import hashlib
import json
import re
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from heal.checkpoint.files import COMMIT, CheckpointCorrupt, CheckpointRefused, read_file

FORMAT, VERSION = "heal-checkpoint", 1
MAX_MANIFEST = 256 * 2**20  # bytes; a thousand times what a large model needs
MAX_COMMIT = 64 * 2**20
MAX_RANKS = 100_000
MAX_STEP = 10**14
MAX_DIMS = 64
MAX_SIZE = 2**48  # of one dimension
MAX_ELEMENTS = 2**60  # of a tensor; with a size of zero the product would hide the others

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


class Chunk(NamedTuple):
    """A box within a larger tensor: which part of which whole a rank holds."""

    whole: tuple[int, ...]
    start: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def all_of(cls, shape: tuple[int, ...]) -> "Chunk":
        """Return the part that is everything."""
        return cls(tuple(shape), (0,) * len(shape), tuple(shape))

    def overlap(self, other: "Chunk") -> tuple[tuple[slice, ...], tuple[slice, ...], int]:
        """Return where both boxes meet, in coordinates of each, and how many elements that is."""
        mine, theirs, count = [], [], 1
        for begin, size, their_begin, their_size in zip(
            self.start, self.shape, other.start, other.shape, strict=True
        ):
            low, high = max(begin, their_begin), min(begin + size, their_begin + their_size)
            mine.append(slice(low - begin, high - begin))
            theirs.append(slice(low - their_begin, high - their_begin))
            count *= max(0, high - low)
        return tuple(mine), tuple(theirs), count


class Entry(NamedTuple):
    """One tensor of one rank; in JSON it is the list of these fields."""

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
        return self[1:6]

    @classmethod
    def from_json(cls, fields: list[Any]) -> "Entry":
        """Return the entry of a list of fields; nothing is checked."""
        return cls._make(tuple(f) if isinstance(f, list) else f for f in fields)


@dataclass(frozen=True, slots=True)
class Commit:
    """What makes a checkpoint complete: the checksum of each rank's manifest."""

    save_id: str
    step: int
    world_size: int
    checksums: tuple[str, ...]

    def to_bytes(self) -> bytes:
        """Return the file's content: a line of JSON, and a line with its checksum."""
        page = {
            "format": FORMAT,
            "version": VERSION,
            "save_id": self.save_id,
            "step": self.step,
            "world_size": self.world_size,
            "manifests": {manifest_name(rank): sum for rank, sum in enumerate(self.checksums)},
        }
        line = to_bytes(page)
        return line + b"\n" + digest(line).encode() + b"\n"


@dataclass(frozen=True, slots=True)
class Manifest:
    """What one rank saved."""

    save_id: str
    step: int
    rank: int
    world_size: int
    entries: dict[str, Entry]
    values: Any

    @property
    def head(self) -> dict[str, Any]:
        """The fields that COMMIT and the name of the file imply."""
        return {
            "format": FORMAT,
            "version": VERSION,
            "save_id": self.save_id,
            "step": self.step,
            "rank": self.rank,
            "world_size": self.world_size,
            "file": shard_name(self.rank),
        }

    def to_bytes(self) -> bytes:
        """Return the file's content."""
        return to_bytes({**self.head, "tensors": self.entries, "values": self.values})


def digest(data: bytes) -> str:
    """Return the checksum of a manifest or of a line of COMMIT."""
    return hashlib.blake2b(data, digest_size=32).hexdigest()


def read_commit(folder: Path) -> Commit:
    """Read COMMIT and check it against its own checksum."""
    path = folder / COMMIT
    line, newline, rest = read_file(path, MAX_COMMIT).partition(b"\n")
    if not newline or rest != digest(line).encode() + b"\n":
        raise CheckpointCorrupt(f"{path} does not match its own checksum")
    page = _Page(line, path)
    page.expect_same({"format": FORMAT, "version": VERSION})
    save_id = page.text("save_id", page["save_id"], r"[0-9a-f]{32}")
    step, size = page.whole("step", 0, MAX_STEP), page.whole("world_size", 1, MAX_RANKS)
    listed = page.mapping("manifests")
    names = [manifest_name(rank) for rank in range(size)]
    strange = next((n for n in listed if n not in names), f"not all of {size}")
    page.expect(list(listed) == names, "manifests", f"one of each of {size} ranks", strange)
    checksums = tuple(page.text(f"checksum of {n}", v, r"[0-9a-f]{64}") for n, v in listed.items())
    return Commit(save_id, step, size, checksums)


def read_manifest(folder: Path, commit: Commit, rank: int) -> Manifest:
    """Read the manifest of a rank, check it against COMMIT, and check every field of it."""
    path = folder / manifest_name(rank)
    data = read_file(path, MAX_MANIFEST)
    if digest(data) != commit.checksums[rank]:
        raise CheckpointCorrupt(f"{path} does not match its checksum in {COMMIT}")
    page = _Page(data, path)
    entries: dict[str, Entry] = {}
    found = Manifest(commit.save_id, commit.step, rank, commit.world_size, entries, page["values"])
    page.expect_same(found.head)
    for name, fields in page.mapping("tensors").items():
        entries[name] = page.entry(name, fields, commit.world_size)
    return found


class _Page:
    """A parsed file. Each method checks what was read; errors name the file and the field."""

    def __init__(self, data: bytes, path: Path) -> None:
        self._path = path
        self._fields = {"content": from_bytes(data, path)}
        self._fields = self.mapping("content")

    def __getitem__(self, name: str) -> Any:
        if name not in self._fields:
            raise CheckpointRefused(f"{self._path}: {name} is missing")
        return self._fields[name]

    def expect(self, is_so: bool, what: str, expected: object, got: object) -> None:
        if not is_so:
            raise CheckpointRefused(
                f"{self._path}: {what}: expected {expected}, got {repr(got)[:100]}"
            )

    def expect_same(self, fields: dict[str, Any]) -> None:
        for name, expected in fields.items():
            is_same = self[name] == expected and type(self[name]) is type(expected)
            self.expect(is_same, name, repr(expected), self[name])

    def whole(self, name: str, least: int, most: int) -> int:
        value = self[name]
        is_within = type(value) is int and least <= value <= most
        self.expect(is_within, name, f"a whole number {least} to {most}", value)
        return int(value)

    def mapping(self, name: str) -> dict[str, Any]:
        value: dict[str, Any] = self[name]
        self.expect(isinstance(value, dict), name, "an object", value)
        return value

    def text(self, what: str, value: Any, pattern: str) -> str:
        matches = isinstance(value, str) and re.fullmatch(pattern, value) is not None
        self.expect(matches, what, f"text of the form {pattern}", value)
        return str(value)

    def sizes(self, what: str, value: Any) -> None:
        is_list = isinstance(value, list) and len(value) <= MAX_DIMS
        is_shape = is_list and all(type(n) is int and 0 <= n < MAX_SIZE for n in value)
        self.expect(is_shape, what, "a shape", value)
        count = prod(max(n, 1) for n in value)
        self.expect(count < MAX_ELEMENTS, what, f"under {MAX_ELEMENTS} elements", value)

    def entry(self, name: str, fields: Any, world_size: int) -> Entry:
        where = f"tensor {name[:100]!r}"
        is_name = "\0" not in name and re.match(r"[a-z]+/", name) is not None
        self.expect(is_name, where, "a name such as param/0", name)
        is_list = isinstance(fields, list) and len(fields) == 7
        self.expect(is_list, where, "a list of seven fields", fields)
        held_by, dtype, shape, whole, start, checksum, offset = fields
        is_rank = type(held_by) is int and 0 <= held_by < world_size
        self.expect(is_rank, where, f"a rank under {world_size}", held_by)
        self.expect(isinstance(dtype, str) and dtype in ITEM_BYTES, where, "a dtype", dtype)
        self.sizes(where, shape)
        is_both = (whole is None) == (start is None)
        self.expect(is_both, where, "both the whole and the start of a part", [whole, start])
        if whole is not None:
            self.sizes(where, whole)
            self.sizes(where, start)
            is_part = len(shape) == len(whole) == len(start) and all(
                b + n <= w for b, n, w in zip(start, shape, whole, strict=True)
            )
            self.expect(is_part, where, f"a part within {whole}", f"{shape} at {start}")
        self.text(f"checksum of {where}", checksum, r"[0-9a-f]{16}")
        self.expect(type(offset) is int and offset >= 0, where, "an offset in bytes", offset)
        return Entry.from_json(fields)


def to_bytes(value: Any) -> bytes:
    """Return strict JSON, the same bytes for the same value."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).encode()


def from_bytes(data: bytes, path: Path) -> Any:
    """Return what :func:`to_bytes` was given; raise CheckpointRefused if it wrote no such bytes.

    So no key comes twice, and no number is beyond all floats. Errors name ``path``, the source.
    """
    try:
        value = json.loads(data)
        is_ours = to_bytes(value) == data
    except RecursionError:
        raise CheckpointRefused(f"{path} is nested beyond reason") from None
    except ValueError as error:  # also what is not UTF-8
        raise CheckpointRefused(f"{path} is not JSON: {error}") from None
    if not is_ours:
        raise CheckpointRefused(f"{path} is not JSON as it is written here")
    return value
