"""Agreement on a save: which folder, and which rank writes what. One exchange, before any write.

Tensors that several ranks have alike, to the bit, are written once, by the rank that has least to
write. So replicas share the work, and what differs between ranks is kept for each.
"""

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from heal.checkpoint import strict_json
from heal.checkpoint.files import CheckpointError, NoSpace, SaveFailed, StillWriting, free_bytes
from heal.checkpoint.manifest import Entry, StepFolder, committed, folder_for, list_folders
from heal.checkpoint.shards import placed

# The few words that ranks exchange about checkpoints: bytes, gathered, without pickle.


class Ranks:
    """All ranks of a process group, or this process alone if there is none.

    Every rank has to call :meth:`gather`, in the same order.

    Args:
        group: the default group if None.

    Attributes:
        rank: of this process.
        size: how many there are.
    """

    def __init__(self, group: Any = None) -> None:
        self._group = group
        together = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank(group) if together else 0
        self.size = dist.get_world_size(group) if together else 1

    def gather(self, payload: bytes) -> list[bytes]:
        """Return what every rank says, by rank."""
        if self.size == 1:
            return [payload]
        device = self._device()
        length = torch.tensor([len(payload)], device=device)
        lengths = [torch.zeros_like(length) for _ in range(self.size)]
        dist.all_gather(lengths, length, group=self._group)
        sizes = [int(size) for size in lengths]
        longest = max(1, *sizes)
        mine = torch.zeros(longest, dtype=torch.uint8)
        if payload:
            mine[: len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        mine = mine.to(device)
        said = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(said, mine, group=self._group)
        return [bytes(t.tolist()[:size]) for t, size in zip(said, sizes, strict=True)]

    def _device(self) -> torch.device:
        if "gloo" in str(dist.get_backend_config(self._group)):
            return torch.device("cpu")
        return torch.device("cuda", torch.cuda.current_device())


SPARE_BYTES = 16 * 2**20  # left free for manifests, the journal, and whoever else writes
MAX_RETRY = 9999
BUSY = "the save before is still being written"


@dataclass(frozen=True, slots=True)
class SavePlan:
    """What this rank writes, and where to."""

    folder: StepFolder
    save_id: str
    step: int
    rank: int
    world_size: int
    entries: dict[str, Entry]


@dataclass(frozen=True, slots=True)
class Proposal:
    """What a rank says before a save. With ``trouble`` none of them saves."""

    entries: dict[str, Entry]
    trouble: str = ""
    retry: int = 0
    free: int = 0
    save_id: str = ""

    def to_bytes(self) -> bytes:
        entries = {name: entry.to_json() for name, entry in self.entries.items()}
        return strict_json.to_bytes([entries, self.trouble, self.retry, self.free, self.save_id])

    @classmethod
    def from_bytes(cls, data: bytes, path: Path) -> "Proposal":
        entries, *rest = strict_json.from_bytes(data, path)
        return cls({name: _entry(listed) for name, listed in entries.items()}, *rest)


def agree(
    directory: Path, ranks: Ranks, step: int, entries: Mapping[str, Entry], trouble: str = ""
) -> SavePlan:
    """Agree with all ranks on a save; every rank has to call this, also one that cannot save.

    Args:
        directory: of the store.
        ranks: who saves.
        step: the step that comes next.
        entries: what this rank has.
        trouble: why this rank cannot save; empty if it can.

    Raises:
        SaveFailed: a rank cannot save; the same on every rank.
        NoSpace: the disk has no room.
    """
    mine = Proposal(
        dict(entries),
        trouble,
        _next_retry(directory, step),
        0 if trouble else free_bytes(directory),
        secrets.token_hex(16),
    )
    said = [mine]
    if ranks.size > 1:
        said = [Proposal.from_bytes(word, directory) for word in ranks.gather(mine.to_bytes())]
    for rank, proposal in enumerate(said):
        if proposal.trouble:
            who = f"rank {rank}: " if ranks.size > 1 else ""
            kind = StillWriting if proposal.trouble == BUSY else SaveFailed
            raise kind(f"step {step} was not saved: {who}{proposal.trouble}")
    held = share([p.entries for p in said])
    needed = sum(e.num_bytes for r, es in enumerate(held) for e in es.values() if e.held_by == r)
    free = min(p.free for p in said)
    if needed + SPARE_BYTES > free:
        raise NoSpace(
            f"step {step} was not saved: {needed} bytes and a reserve of {SPARE_BYTES} are needed, "
            f"and {free} are free at {directory}; free some, or keep fewer checkpoints"
        )
    folder = folder_for(directory, step, max(p.retry for p in said))
    own = placed(held[ranks.rank], ranks.rank)
    return SavePlan(folder, said[0].save_id, step, ranks.rank, ranks.size, own)


def share(offered: list[dict[str, Entry]]) -> list[dict[str, Entry]]:
    """Return every rank's entries with the rank that holds each; the same result on every rank."""
    groups: dict[tuple[Any, ...], list[int]] = {}
    for rank, entries in enumerate(offered):
        for name, e in entries.items():
            same = (name, e.dtype, e.shape, e.whole, e.start, e.checksum)
            groups.setdefault(same, []).append(rank)
    load = [0] * len(offered)
    holder: dict[tuple[Any, ...], int] = {}
    sized = sorted(groups, key=lambda g: (-offered[groups[g][0]][g[0]].num_bytes, g[0], groups[g]))
    for same in sized:
        chosen = min(groups[same], key=lambda rank: (load[rank], rank))
        holder[same] = chosen
        load[chosen] += offered[chosen][same[0]].num_bytes
    return [
        {
            name: replace(e, held_by=holder[name, e.dtype, e.shape, e.whole, e.start, e.checksum])
            for name, e in entries.items()
        }
        for entries in offered
    ]


def _next_retry(directory: Path, step: int) -> int:
    """A folder is never written to twice: what is in it may be all that there is."""
    there = [folder.retry for folder in list_folders(directory) if folder.step == step]
    if there and max(there) >= MAX_RETRY:
        raise SaveFailed(f"step {step} was saved {MAX_RETRY} times; remove some of {directory}")
    return max(there, default=-1) + 1


def _entry(listed: Any) -> Entry:
    held_by, dtype, shape, whole, start, checksum, offset = listed
    bounds, begins = (None if v is None else tuple(v) for v in (whole, start))
    return Entry(held_by, dtype, tuple(shape), bounds, begins, checksum, offset)


# Which checkpoint all ranks use: the newest that every one of them can read.


Found = TypeVar("Found")
NONE = [-1, 0]


def newest_common(
    directory: Path,
    ranks: Ranks,
    read: Callable[[StepFolder], Found],
    note: Callable[[str], None],
    most: int | None = None,
) -> tuple[StepFolder, Found] | None:
    """Return the newest checkpoint that every rank can read, and what was read of it.

    Every rank has to call this. One collective if the newest is good everywhere; one more for
    each that some rank could not read: all fall back together.

    Args:
        directory: of the store.
        ranks: who has to agree.
        read: reads and verifies this rank's part.
        note: told of every checkpoint that was passed over.
        most: the latest step that will do.
    """
    bound: StepFolder | None = None
    kept: tuple[StepFolder, Found] | None = None
    while True:
        if kept is None or (bound is not None and bound < kept[0]):
            kept = _newest_readable(directory, read, note, bound, most)
        mine = NONE if kept is None else [kept[0].step, kept[0].retry]
        said = [strict_json.from_bytes(word, directory) for word in ranks.gather(_word(mine))]
        lowest = min(map(tuple, said))
        if lowest == tuple(NONE):
            return None
        if all(tuple(word) == lowest for word in said):
            return kept
        bound = StepFolder(*lowest)
        if kept is not None and bound < kept[0]:
            note(f"{kept[0].path.name}: another rank cannot read it; trying an older one")


def _newest_readable(
    directory: Path,
    read: Callable[[StepFolder], Found],
    note: Callable[[str], None],
    bound: StepFolder | None,
    most: int | None,
) -> tuple[StepFolder, Found] | None:
    for folder in reversed(committed(directory)):
        if (bound is not None and folder > bound) or (most is not None and folder.step > most):
            continue
        try:
            return folder, read(folder)
        except (CheckpointError, OSError, MemoryError) as error:
            note(f"{folder.path.name} cannot be used: {error}")
    return None


def _word(folder: list[int]) -> bytes:
    return strict_json.to_bytes(folder)
