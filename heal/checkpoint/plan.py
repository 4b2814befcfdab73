"""What ranks agree on: which of them writes what in a save, and which checkpoint they all load.

Tensors that several ranks have alike, to the bit, are written once, by the rank that has least to
write. So replicas share the work, and what differs between ranks is kept for each.
"""

import secrets
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from heal.checkpoint.files import CheckpointError, NoSpace, SaveFailed, StillWriting, free_bytes
from heal.checkpoint.folders import StepFolder, committed, folder_for, list_folders
from heal.checkpoint.manifest import Entry, Manifest
from heal.checkpoint.shards import placed
from heal.checkpoint.strict_json import from_bytes, to_bytes

SPARE_BYTES = 16 * 2**20  # left free for manifests, the journal, and other programs
MAX_RETRY = 9999
BUSY = "the save before is still being written"
NO_CHECKPOINT = (-1, 0)
Found = TypeVar("Found")


class Ranks:
    """All ranks of a process group, the default one if None; this process alone if there is none.

    Every rank has to call :meth:`gather`, in the same order. Ranks exchange bytes, without pickle.
    """

    def __init__(self, group: Any = None) -> None:
        self._group = group
        together = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank(group) if together else 0
        self.size = dist.get_world_size(group) if together else 1

    def gather(self, payload: bytes) -> list[bytes]:
        """Return the payload of every rank, by rank."""
        if self.size == 1:
            return [payload]
        is_gloo = "gloo" in str(dist.get_backend_config(self._group))
        device = "cpu" if is_gloo else torch.device("cuda", torch.cuda.current_device())
        length = torch.tensor([len(payload)], device=device)
        lengths = [torch.zeros_like(length) for _ in range(self.size)]
        dist.all_gather(lengths, length, group=self._group)
        sizes = [int(size) for size in lengths]
        padded = bytearray(payload.ljust(max(1, *sizes), b"\0"))
        mine = torch.frombuffer(padded, dtype=torch.uint8).to(device)
        gathered = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(gathered, mine, group=self._group)
        return [bytes(t.tolist()[:size]) for t, size in zip(gathered, sizes, strict=True)]

    def gather_json(self, value: Any) -> list[Any]:
        """Return the plain value of every rank, by rank."""
        return [from_bytes(data, Path("ranks")) for data in self.gather(to_bytes(value))]


class Proposal(NamedTuple):
    """What a rank offers before a save. With ``trouble`` no rank saves."""

    entries: dict[str, Entry]
    trouble: str
    retry: int
    free: int
    save_id: str


def agree(
    directory: Path,
    ranks: Ranks,
    step: int,
    entries: dict[str, Entry],
    values: Any = None,
    trouble: str = "",
) -> tuple[StepFolder, Manifest]:
    """Return the folder to write to, and this rank's manifest; every rank has to call this.

    Args:
        directory: of the store.
        ranks: that save together.
        step: the step that comes next.
        entries: what this rank has.
        values: its plain values, as JSON.
        trouble: why this rank cannot save; empty if it can. Then every rank raises SaveFailed.
    """
    free = 0 if trouble else free_bytes(directory)
    mine = Proposal(entries, trouble, _next_retry(directory, step), free, secrets.token_hex(16))
    offered = [mine]
    if ranks.size > 1:
        listed = {name: entry.to_json() for name, entry in entries.items()}
        offered = [
            Proposal({name: Entry.from_json(e) for name, e in theirs.items()}, *rest)
            for theirs, *rest in ranks.gather_json([listed, *mine[1:]])
        ]
    for rank, proposal in enumerate(offered):
        if proposal.trouble:
            where = f"rank {rank}: " if ranks.size > 1 else ""
            kind = StillWriting if proposal.trouble == BUSY else SaveFailed
            raise kind(f"step {step} was not saved: {where}{proposal.trouble}")
    held = share([proposal.entries for proposal in offered])
    needed = sum(e.num_bytes for r, es in enumerate(held) for e in es.values() if e.held_by == r)
    free = min(proposal.free for proposal in offered)
    if needed + SPARE_BYTES > free:
        raise NoSpace(
            f"step {step} was not saved: {needed} bytes and a reserve of {SPARE_BYTES} are needed, "
            f"and {free} are free at {directory}; free some, or keep fewer checkpoints"
        )
    folder = folder_for(directory, step, max(proposal.retry for proposal in offered))
    own = placed(held[ranks.rank], ranks.rank)
    return folder, Manifest(offered[0].save_id, step, ranks.rank, ranks.size, own, values)


def share(offered: list[dict[str, Entry]]) -> list[dict[str, Entry]]:
    """Return every rank's entries with the rank that holds each; the same result on every rank."""
    groups: dict[tuple[Any, ...], list[int]] = {}
    for rank, entries in enumerate(offered):
        for name, entry in entries.items():
            groups.setdefault((name, entry.content), []).append(rank)

    def num_bytes(same: tuple[Any, ...]) -> int:
        return offered[groups[same][0]][same[0]].num_bytes

    load = [0] * len(offered)
    holder: dict[tuple[Any, ...], int] = {}
    for same in sorted(groups, key=lambda same: (-num_bytes(same), same[0], groups[same])):
        chosen = min(groups[same], key=lambda rank: (load[rank], rank))
        holder[same] = chosen
        load[chosen] += num_bytes(same)
    return [
        {name: replace(e, held_by=holder[name, e.content]) for name, e in entries.items()}
        for entries in offered
    ]


def _next_retry(directory: Path, step: int) -> int:
    """A folder is never written to twice: it may hold the only copy."""
    retries = [folder.retry for folder in list_folders(directory) if folder.step == step]
    if retries and max(retries) >= MAX_RETRY:
        raise SaveFailed(f"step {step} was saved {MAX_RETRY} times; remove some of {directory}")
    return max(retries, default=-1) + 1


def newest_common(
    directory: Path,
    ranks: Ranks,
    read: Callable[[StepFolder], Found],
    note: Callable[[str], None],
    most: int | None = None,
) -> tuple[StepFolder, Found] | None:
    """Return the newest checkpoint that every rank can ``read``, and what was read of it.

    Every rank has to call this. One collective if the newest is good everywhere; one more for
    each that some rank could not read: all fall back together. ``note`` gets a text for each that
    was passed over; ``most`` is the latest step that will do.
    """
    bound: StepFolder | None = None
    kept: tuple[StepFolder, Found] | None = None
    while True:
        if kept is None or (bound is not None and bound < kept[0]):
            kept = _newest_readable(directory, read, note, bound, most)
        mine = NO_CHECKPOINT if kept is None else (kept[0].step, kept[0].retry)
        found = [tuple(newest) for newest in ranks.gather_json(mine)]
        lowest = min(found)
        if lowest == NO_CHECKPOINT:
            return None
        if all(newest == lowest for newest in found):
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
