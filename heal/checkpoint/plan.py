"""Agreement on a save: which folder, and which rank writes what. One exchange, before any write.

Tensors that several ranks have alike, to the bit, are written once, by the rank that has least to
write. So replicas share the work, and what differs between ranks is kept for each.
"""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from heal.checkpoint import strict_json
from heal.checkpoint.errors import NoSpace, SaveFailed, StillWriting
from heal.checkpoint.files import free_bytes
from heal.checkpoint.folders import StepFolder, folder_for, list_folders
from heal.checkpoint.manifest import Entry
from heal.checkpoint.ranks import Ranks
from heal.checkpoint.shards import placed

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
