"""What a checkpoint says about itself, and the distrust with which it is read.

``<folder>/step-000123/`` holds for every rank a shard of tensors and a manifest, and one COMMIT.
A manifest lists the rank's tensors with their checksums and holds its plain values. COMMIT, written
last, has the checksum of every manifest and of itself. File names follow from the rank: no name is
taken from a file. This file imports no torch.
"""

import hashlib
import os
import re
import stat
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from heal.checkpoint import strict_json
from heal.checkpoint.files import CheckpointCorrupt, flush_folder, put_aside, read_file, remove_file
from heal.checkpoint.strict_json import FORMAT, VERSION, Page

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

What safetensors has no name for is bytes in its eyes, with one more dimension; we know better.
"""


def shard_name(rank: int) -> str:
    """Return the name of a rank's file of tensors."""
    return f"rank-{rank:05d}.safetensors"


def manifest_name(rank: int) -> str:
    """Return the name of a rank's manifest."""
    return f"manifest-{rank:05d}.json"


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of one rank.

    Attributes:
        held_by: the rank in whose shard the bytes are; several ranks may share them.
        dtype: torch's name for it.
        shape: of the part that is saved.
        whole: shape of the tensor that this is a part of; None if it is no part.
        start: index of the part's first element in the whole.
        checksum: of the bytes, 16 hexadecimal digits; see ``zclip::fingerprint``.
        offset: of the first byte, after the header of the shard.
    """

    held_by: int
    dtype: str
    shape: tuple[int, ...]
    whole: tuple[int, ...] | None
    start: tuple[int, ...] | None
    checksum: str
    offset: int = 0

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * ITEM_BYTES[self.dtype][1]

    def is_same_part(self, other: "Entry") -> bool:
        """Tell whether two entries are the same numbers of the same tensor."""
        mine = (self.dtype, self.shape, self.whole, self.start, self.checksum)
        return mine == (other.dtype, other.shape, other.whole, other.start, other.checksum)

    def to_json(self) -> list[Any]:
        whole, start = (None if v is None else list(v) for v in (self.whole, self.start))
        head = [self.held_by, self.dtype, list(self.shape), whole, start]
        return [*head, self.checksum, self.offset]


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
        page = {
            "format": FORMAT,
            "version": VERSION,
            "save_id": self.save_id,
            "step": self.step,
            "rank": self.rank,
            "world_size": self.world_size,
            "file": shard_name(self.rank),
            "tensors": {name: entry.to_json() for name, entry in self.entries.items()},
            "values": self.values,
        }
        return strict_json.to_bytes(page)


@dataclass(frozen=True, slots=True)
class Commit:
    """What makes a checkpoint complete: which manifests belong to it."""

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
            "manifests": {
                manifest_name(rank): checksum for rank, checksum in enumerate(self.checksums)
            },
        }
        line = strict_json.to_bytes(page)
        return line + b"\n" + digest(line).encode() + b"\n"


def digest(data: bytes) -> str:
    """Return the checksum of a manifest or of a line of COMMIT."""
    return hashlib.blake2b(data, digest_size=32).hexdigest()


def read_commit(folder: Path) -> Commit:
    """Read COMMIT and check it against its own checksum.

    Raises:
        CheckpointCorrupt: it is missing, torn or changed.
        CheckpointRefused: it is not one of ours.
    """
    path = folder / COMMIT
    data = read_file(path, MAX_COMMIT)
    line, newline, rest = data.partition(b"\n")
    if not newline or rest != digest(line).encode() + b"\n":
        raise CheckpointCorrupt(f"{path} does not match its own checksum")
    page = Page(strict_json.from_bytes(line, path), path)
    page.check_format()
    world_size = page.whole("world_size", 1, MAX_RANKS)
    listed = page.mapping("manifests")
    names = [manifest_name(rank) for rank in range(world_size)]
    if list(listed) != names:
        strange = next((n for n in listed if n not in names), f"not all of {world_size}")
        page.refuse(f"manifests: expected one of each of {world_size} ranks, got {strange[:100]!r}")
    checksums = tuple(page.text(f"checksum of {n}", v, r"[0-9a-f]{64}") for n, v in listed.items())
    save_id = page.text("save_id", page["save_id"], r"[0-9a-f]{32}")
    return Commit(save_id, page.whole("step", 0, MAX_STEP), world_size, checksums)


def read_manifest(folder: Path, commit: Commit, rank: int) -> Manifest:
    """Read the manifest of a rank and check it against COMMIT.

    Raises:
        CheckpointCorrupt: it is missing or changed.
        CheckpointRefused: it says what no manifest of ours says.
    """
    path = folder / manifest_name(rank)
    data = read_file(path, MAX_MANIFEST)
    if digest(data) != commit.checksums[rank]:
        raise CheckpointCorrupt(f"{path} does not match its checksum in {COMMIT}")
    return parse_manifest(data, path, commit, rank)


def parse_manifest(data: bytes, path: Path, commit: Commit, rank: int) -> Manifest:
    """Return the manifest in ``data``, every field of it checked.

    Raises:
        CheckpointRefused: names the field.
    """
    page = Page(strict_json.from_bytes(data, path), path)
    page.check_format()
    for name, wanted in (
        ("save_id", commit.save_id),
        ("step", commit.step),
        ("rank", rank),
        ("world_size", commit.world_size),
        ("file", shard_name(rank)),
    ):
        if page[name] != wanted or type(page[name]) is not type(wanted):
            page.refuse(f"{name}: expected {wanted!r}, got {str(page[name])[:100]!r}")
    entries = {
        name: _entry(page, name, listed, commit.world_size)
        for name, listed in page.mapping("tensors").items()
    }
    values = page["values"]
    return Manifest(commit.save_id, commit.step, rank, commit.world_size, entries, values)


def _entry(page: Page, name: str, listed: Any, world_size: int) -> Entry:
    where = f"tensor {name[:100]!r}"
    if "\0" in name or not re.match(r"[a-z]+/", name):
        page.refuse(f"{where}: expected a name such as param/0, got this one")
    if not isinstance(listed, list) or len(listed) != 7:
        page.refuse(f"{where}: expected a list of seven fields, got {str(listed)[:100]}")
    held_by, dtype, shape, whole, start, checksum, offset = listed
    if type(held_by) is not int or not 0 <= held_by < world_size:
        page.refuse(f"{where}: expected a rank under {world_size}, got {str(held_by)[:40]}")
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        page.refuse(f"{where}: expected a dtype, got {str(dtype)[:40]!r}")
    sizes = page.sizes(where, shape)
    if (whole is None) != (start is None):
        page.refuse(f"{where}: expected both the whole and the start of a part, got one of them")
    part: tuple[tuple[int, ...] | None, tuple[int, ...] | None] = (None, None)
    if whole is not None:
        bounds, begins = page.sizes(where, whole), page.sizes(where, start)
        if len({len(sizes), len(bounds), len(begins)}) != 1 or any(
            b + n > w for b, n, w in zip(begins, sizes, bounds, strict=True)
        ):
            page.refuse(f"{where}: expected a part within {whole}, got {shape} at {start}")
        part = (bounds, begins)
    page.text(f"checksum of {where}", checksum, r"[0-9a-f]{16}")
    if type(offset) is not int or offset < 0:
        page.refuse(f"{where}: expected an offset in bytes, got {str(offset)[:40]}")
    return Entry(held_by, dtype, sizes, *part, checksum, offset)


# The folders of a store: one per save, named after its step, never written to twice.


NAME = re.compile(r"step-(\d{6,14})(?:-r(\d{1,4}))?")
ABANDONED = ".abandoned"
OURS = re.compile(r"rank-\d{5}\.safetensors|manifest-\d{5}\.json|COMMIT|failed-\d{5}|\.tmp-.*")
"""Files that we write; a folder that holds others is not removed."""


@dataclass(frozen=True, order=True, slots=True)
class StepFolder:
    """The folder of one save; a step that is saved again after a rollback gets another one."""

    step: int
    retry: int = 0
    path: Path = field(default=Path(), compare=False)

    @property
    def is_committed(self) -> bool:
        """Whether the save was finished; says nothing about the bytes."""
        try:
            return stat.S_ISREG(os.lstat(self.path / COMMIT).st_mode)
        except OSError:
            return False


def folder_for(directory: Path, step: int, retry: int = 0) -> StepFolder:
    """Return the folder that a save goes to."""
    name = f"step-{step:06d}" + (f"-r{retry}" if retry else "")
    return StepFolder(step, retry, directory / name)


def list_folders(directory: Path) -> list[StepFolder]:
    """Return the folders of all saves, finished or not, oldest first; links are not followed."""
    found = []
    try:
        with os.scandir(directory) as entries:
            for entry in entries:
                match = NAME.fullmatch(entry.name)
                if match and entry.is_dir(follow_symlinks=False):
                    step, retry = int(match[1]), int(match[2] or 0)
                    found.append(StepFolder(step, retry, Path(entry.path)))
    except FileNotFoundError:
        return []
    return sorted(found)


def committed(directory: Path) -> list[StepFolder]:
    """Return the folders of finished saves, oldest first."""
    return [folder for folder in list_folders(directory) if folder.is_committed]


def abandon(folder: StepFolder) -> None:
    """Put a folder aside: its steps were taken back, so that it must not be resumed from."""
    put_aside(folder.path, folder.path.name + ABANDONED)


def remove_folder(folder: StepFolder) -> None:
    """Remove a save. COMMIT goes first, so that a crash leaves no half of one that looks whole.

    Raises:
        OSError: a file cannot be removed, or is none of ours.
    """
    remove_file(folder.path / COMMIT)
    flush_folder(folder.path)
    for name in os.listdir(folder.path):
        if OURS.fullmatch(name):
            remove_file(folder.path / name)
    os.rmdir(folder.path)
    flush_folder(folder.path.parent)
