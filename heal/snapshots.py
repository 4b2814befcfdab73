"""A ring of snapshots: checksummed, quarantined, kept at geometric ages.

They are in host memory; those that it has no room for are on the disk. What belongs to a snapshot
is decided in :mod:`heal.training_state`; this file copies it out, decides which copies to keep,
and vouches for what it gives back.
"""

import math
import operator
import os
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from heal.buffers import Key
from heal.checkpoint.files import free_bytes
from heal.snapshot_files import BackgroundWrite, SpillFile, folder_on_disk
from heal.state_checks import copy_on_host, count_bad, fingerprints
from heal.training_state import available_bytes, copy_by_kind

# Copies to the host on a stream of their own, beside the run.


class SideStream:
    """A CUDA stream that begins where the run's stream is and does not hold it up."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def run(self, work: Callable[[], None]) -> torch.Event:
        """Enqueue work behind what the run has enqueued; return the event of its end."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            work()
            done = torch.Event(self._device)
            done.record(self._stream)
        return done


def host_memory(like: Tensor) -> Tensor:
    """Return memory on the host for a copy, pinned if the source is on a CUDA device."""
    return torch.empty_like(like, device="cpu", pin_memory=like.device.type == "cuda")


AGE_RATIO = 4  # each good one is at most about this many times older than the next younger one
STARVED = 3  # snapshots in a row with NaN or Inf in them that are worth a word
FREE_SHARE = 0.5  # of the memory or disk now free, that all snapshots of a host may take
PATIENCE = 1.0  # seconds that a step may wait for the disk without a word
WAIT_SHARE = 0.02  # of the time, that steps may wait for the disk from then on
ASK_SECONDS = 1.0  # for which free memory counts as free still, to make a place larger


class SnapshotCorrupt(RuntimeError):
    """The bytes of a snapshot are not those that were captured."""


@dataclass(slots=True, eq=False)
class Snapshot:
    """The state before step ``step``: copies, plain values, and what vouches for both.

    ``buffers`` is its host memory, and ``file`` has the same on the disk. It may be in either or,
    until the memory is needed, in both; ``tensors`` are in memory wherever they can be.
    """

    step: int
    tensors: dict[Key, Tensor]
    values: dict[str, Any]
    hashes: Tensor  # int64 [tensors], of the sources, on the host
    num_bad: Tensor  # int64 [], tensors with NaN or Inf that must not; on the host
    landed: torch.Event | None
    clean_steps: int = 0
    is_good: bool = False
    is_proven: bool = False  # it needs no clean steps
    num_bytes: int = 0
    _owners: list["weakref.ref[Tensor]"] = field(default_factory=list, repr=False)
    buffers: dict[Key, Tensor] = field(default_factory=dict, repr=False)
    file: SpillFile | None = field(default=None, repr=False)

    def note_owners(self, params: Sequence[Tensor]) -> None:
        """Remember of which parameters this is."""
        self._owners = [weakref.ref(param) for param in params]

    def is_of(self, params: Sequence[Tensor]) -> bool:
        """Return whether it is of these parameters; a new head of the same shape is another."""
        owners = [owner() for owner in self._owners]
        return len(owners) == len(params) and all(map(operator.is_, owners, params))

    def wait(self) -> None:
        """Wait until the copies are there."""
        landed = self.landed  # once: the thread that writes it to the disk waits too
        if landed is not None:
            landed.synchronize()
            self.landed = None

    def verify(self) -> None:
        """Raise unless every copy still has the bytes of its source.

        Raises:
            SnapshotCorrupt: names the first tensor that differs.
        """
        self.wait()
        if not self.tensors:
            return
        where = "in host memory" if self.buffers or self.file is None else "on the disk"
        if self.file is not None and not self.buffers:
            try:
                self.file.check()
            except OSError as error:
                why = f"snapshot of step {self.step} cannot be read from the disk: {error}"
                raise SnapshotCorrupt(why) from None
        now = torch.ops.zclip.fingerprint(list(self.tensors.values()))
        differs = (now != self.hashes).nonzero()
        if len(differs):
            key = list(self.tensors)[int(differs[0])]
            raise SnapshotCorrupt(
                f"snapshot of step {self.step}: {' '.join(map(str, key))} changed {where}"
            )


NEVER = 2**63


def is_due(step: int, interval: int, is_dense: bool = True) -> bool:
    """Return whether a step is one of every ``interval``, or in the first ones a power of two."""
    if step % interval == 0:
        return True
    return is_dense and step < interval and step & (step - 1) == 0


def next_due(step: int, interval: int, is_dense: bool = True) -> int:
    """Return the first step after ``step`` for which :func:`is_due` holds."""
    following = step - step % interval + interval
    if is_dense and step < interval:
        following = min(following, 1 << step.bit_length() if step else 1)
    return following


class SnapshotRing:
    """Takes snapshots into memory and files that it makes once, and keeps the most useful.

    A snapshot is good once ``quarantine_steps`` clean steps have followed it and its numbers are
    finite. With a CUDA device the copies run on a stream of their own: :meth:`before_step` keeps
    the next update from overtaking them, and nothing waits on the host.

    Where memory has room for fewer than ``count``, the oldest in memory is written to a file in
    the background, so that the next one finds its place free. Where it has room for none, they are
    written to the disk at once, and the run waits.

    Args:
        interval: steps between snapshots.
        count: most snapshots to keep.
        memory_fraction: most host memory, as a multiple of one snapshot.
        quarantine_steps: clean steps before a snapshot is good.
        folders: where files may go, best first; the first one on a disk is taken.

    Attributes:
        degraded: why not all that are asked for are kept in memory; empty if they are.
        is_slow: whether the disk has kept a step waiting: take snapshots only if :attr:`is_ready`.
    """

    def __init__(
        self,
        interval: int,
        count: int,
        memory_fraction: float,
        quarantine_steps: int,
        folders: Sequence[Path] = (),
    ) -> None:
        self.interval = interval
        self.count = count
        self.memory_fraction = memory_fraction
        self.quarantine_steps = quarantine_steps
        self.degraded = ""
        self._limits: tuple[int, int, str] | None = None  # that ``degraded`` is about
        self.is_slow = False
        self._checked_step = -1
        self._suspect_since: int | None = None
        self._pinned: set[int] = set()
        self._num_rejected = 0  # in a row
        self._kept: list[Snapshot] = []  # oldest first
        self._spare: list[dict[Key, Tensor]] = []
        self._folders = folders
        self._folder: Path | None = None  # looked for when memory is short
        self._disk_failed = ""
        self._spare_files: list[SpillFile] = []
        self._writing: tuple[Snapshot, BackgroundWrite] | None = None
        self._not_before = 0.0  # of the clock; when the disk may keep a step waiting again
        self._granted = 0, 0.0  # bytes that each place may have, and until when of the clock
        self.copying: torch.Event | None = None
        self._side: SideStream | None = None

    @property
    def is_starved(self) -> bool:
        """Whether the last snapshots all held NaN or Inf, so that none becomes good any more."""
        return self._num_rejected >= STARVED

    def quarantine_of(self, step: int) -> int:
        """Return how many clean steps prove a snapshot; fewer in the first steps of a run."""
        return max(1, min(self.quarantine_steps, step // 4))

    def good_steps(self) -> list[int]:
        """Return the steps of good snapshots, newest first."""
        self._promote()
        return [s.step for s in reversed(self._kept) if s.is_good]

    def newest_step(self) -> int | None:
        """Return the step of the newest snapshot, good or not."""
        return self._kept[-1].step if self._kept else None

    def newest_good(self) -> Snapshot | None:
        """Return the newest good snapshot, unverified."""
        self._promote()
        return next((s for s in reversed(self._kept) if s.is_good), None)

    def of_step(self, step: int) -> Snapshot | None:
        """Return the snapshot of a step, good or not, unverified."""
        return next((s for s in self._kept if s.step == step), None)

    def held_bytes(self) -> int:
        """Return the host memory in use."""
        slots = [s.buffers for s in self._kept] + self._spare
        return sum(t.nbytes for slot in slots for t in slot.values())

    def disk_bytes(self) -> int:
        """Return the disk space in use."""
        files = [s.file for s in self._kept if s.file is not None] + self._spare_files
        return sum(file.num_bytes for file in files)

    @property
    def is_ready(self) -> bool:
        """Whether a snapshot would not wait for the disk, or may do so by now."""
        is_writing = self._writing is not None and self._writing[1].is_going_on
        return not is_writing and time.monotonic() >= self._not_before

    @torch.no_grad()
    def capture(
        self,
        step: int,
        tensors: Mapping[Key, Tensor],
        values: dict[str, Any],
        is_proven: bool = False,
        without_nan: Mapping[Key, Tensor] | None = None,
    ) -> bool:
        """Copy the state out; False if there is no memory for it, or no place yet.

        Args:
            step: the step that comes next.
            tensors: all that steps may change.
            values: plain values; kept as they are.
            is_proven: whether it needs no quarantine.
            without_nan: buffers in which NaN is a fault, see :func:`heal.state_checks.count_bad`.
        """
        num_bytes = sum([t.nbytes for t in tensors.values()])
        in_memory, places = self._places(num_bytes)
        if not self._make_room(step, in_memory, places):
            return False
        if in_memory:
            snapshot = self._in_memory(step, tensors, values, without_nan)
        else:
            snapshot = self._on_disk(step, tensors, values, without_nan)
        if snapshot is None:
            return False
        snapshot.is_proven, snapshot.num_bytes = is_proven, num_bytes
        self._kept = [s for s in self._kept if s.step < step] + [snapshot]
        self._write_ahead(step, in_memory, places)
        return True

    def _in_memory(
        self,
        step: int,
        tensors: Mapping[Key, Tensor],
        values: dict[str, Any],
        without_nan: Mapping[Key, Tensor] | None,
    ) -> Snapshot | None:
        slot = self._spare.pop() if self._spare else {}
        try:
            copies = {key: _fitting(slot.get(key), t) for key, t in tensors.items()}
        except (RuntimeError, MemoryError) as error:  # torch has no error of its own for the host
            self.degraded = f"no memory for another snapshot: {error}".splitlines()[0]
            self.memory_fraction = len(self._in_host_memory())
            return None
        slot.clear()
        slot.update(copies)
        hashes, num_bad, landed = self._copy(copies, tensors, without_nan)
        return Snapshot(step, copies, values, hashes, num_bad, landed, buffers=slot)

    def _on_disk(
        self,
        step: int,
        tensors: Mapping[Key, Tensor],
        values: dict[str, Any],
        without_nan: Mapping[Key, Tensor] | None,
    ) -> Snapshot | None:
        """Write a snapshot while the run waits."""
        began = time.monotonic()
        try:
            file = self._file_for(tensors)()
            file.write(tensors)
        except OSError as error:
            self._give_up_disk(error)
            return None
        hashes = fingerprints(tensors.values()).cpu()
        num_bad = count_bad(tensors.items(), without_nan).cpu()
        self._note_waited(time.monotonic() - began)
        return Snapshot(step, file.tensors(), values, hashes, num_bad, None, file=file)

    def before_step(self) -> None:
        """Have the device finish copying before anything it copies is written."""
        if self.copying is not None:
            self.copying.wait()
            self.copying = None

    def note_clean(self, step: int) -> None:
        """Count a clean step for every snapshot before it, and promote those that have enough."""
        has_enough = False
        for snapshot in self._kept:
            if snapshot.step <= step:
                snapshot.clean_steps += 1
                if not snapshot.is_good:
                    has_enough |= snapshot.clean_steps >= self.quarantine_of(snapshot.step)
        if has_enough:
            self._promote(trust=False)

    def note_checked(self, step: int) -> None:
        """Note that weights and moments were found sound as they were before ``step``.

        What a later check finds may have begun right after: one good snapshot of that step or
        before is kept until then, the one whose age fits best.
        """
        self._checked_step = step

    def note_suspect(self, since: int) -> None:
        """Call no snapshot good that was taken after ``since``, until the suspicion is settled."""
        self._promote()
        known = since if self._suspect_since is None else self._suspect_since
        self._suspect_since = min(known, since)

    def pin(self, steps: set[int]) -> None:
        """Keep the snapshots of these steps, and no others, from making way for newer ones."""
        self._pinned = steps

    @property
    def is_suspect(self) -> bool:
        """Whether a suspicion is open."""
        return self._suspect_since is not None

    def note_settled(self) -> None:
        """The suspicion is answered: quarantines begin again for what was taken meanwhile."""
        if self._suspect_since is not None:
            for snapshot in self._kept:
                if snapshot.step > self._suspect_since:
                    snapshot.clean_steps = 0
            self._suspect_since = None

    def drop_after(self, step: int) -> None:
        """Forget snapshots of later steps, and those in quarantine: their time did not happen."""
        self._checked_step = min(self._checked_step, step)
        self._suspect_since = None
        for snapshot in list(self._kept):
            if snapshot.step > step or not snapshot.is_good:
                self._drop(snapshot)

    def drop_all(self) -> None:
        """Forget everything: the run has parameters that no snapshot knows."""
        for snapshot in list(self._kept):
            self._drop(snapshot)

    def finite_steps(self) -> list[int]:
        """Return the steps of all snapshots without NaN or Inf, good or not, newest first."""
        for snapshot in self._kept:
            snapshot.wait()
        return [s.step for s in reversed(self._kept) if not float(s.num_bad)]

    def prove(self, step: int) -> None:
        """Call the finite snapshot of a step good: an experiment has shown that it is."""
        for snapshot in self._kept:
            snapshot.is_good |= snapshot.step == step

    def take(self, step: int, is_proven: bool = True) -> Snapshot:
        """Return the snapshot of a step, its bytes verified; a good one if ``is_proven``.

        Raises:
            KeyError: there is none.
            SnapshotCorrupt: its bytes have changed; it is dropped.
        """
        for snapshot in self._kept:
            if snapshot.step == step and (snapshot.is_good or not is_proven):
                try:
                    snapshot.verify()
                except SnapshotCorrupt:
                    self._drop(snapshot)
                    raise
                return snapshot
        raise KeyError(f"no good snapshot of step {step}")

    def _promote(self, trust: bool = True) -> None:
        """Call those good that have enough clean steps; drop those with NaN or Inf in them.

        With ``trust`` also those that need none, which may wait for a copy that has just begun.
        """
        for snapshot in list(self._kept):
            enough = snapshot.clean_steps >= self.quarantine_of(snapshot.step)
            if snapshot.is_good or not (enough or (trust and snapshot.is_proven)):
                continue
            if self._suspect_since is not None and snapshot.step > self._suspect_since:
                continue
            if not trust and snapshot.landed is not None and not snapshot.landed.query():
                continue
            snapshot.wait()
            if float(snapshot.num_bad) > 0:
                self._num_rejected += 1
                self._drop(snapshot)
            else:
                self._num_rejected = 0
                snapshot.is_good = True

    def _drop(self, snapshot: Snapshot) -> None:
        snapshot.wait()  # its memory will be written again
        self._kept.remove(snapshot)
        if self._writing is not None and self._writing[0] is snapshot:
            self._writing[1].cancel()  # it has the memory until it ends
            self._writing = None
        elif snapshot.buffers:
            self._spare.append(snapshot.buffers)
        if snapshot.file is not None:
            self._spare_files.append(snapshot.file)

    def _make_room(self, step: int, in_memory: int, places: int) -> bool:
        """Drop snapshots, or leave them to the disk, until one more fits; False if none does."""
        if places < 1:
            return False
        self._kept.sort(key=lambda s: s.step)
        while in_memory and len(held := self._in_host_memory()) >= in_memory:
            self._note_waited(self._finish_write())
            saved = next((s for s in held if s.file is not None), None)
            if saved is not None and saved.file is not None:
                self._spare.append(saved.buffers)
                saved.buffers, saved.tensors = {}, saved.file.tensors()
                continue
            # The only place cannot be kept for the newest good one: that would grow ever older.
            is_only = in_memory == 1 and bool(self._disk_failed) and held[0].is_good
            victim = self._least_useful(step, held, len(held) > in_memory or is_only)
            if victim is None:
                self._write_ahead(step, in_memory, places)  # for the next time
                return False
            self._drop(victim)
        while len(self._kept) >= places:
            victim = self._least_useful(step, self._kept, len(self._kept) > places)
            if victim is None:
                return False
            self._drop(victim)
        # What was kept for a larger state, or for more of them, goes back to the system.
        del self._spare[max(0, in_memory - len(self._in_host_memory())) :]
        del self._spare_files[max(0, places - len(self._kept)) :]
        return True

    def _in_host_memory(self) -> list[Snapshot]:
        return [s for s in self._kept if s.buffers]

    def _places(self, num_bytes: int) -> tuple[int, int]:
        """How many snapshots of this size host memory has room for, and how many there are."""
        if num_bytes == 0:
            return self.count, self.count
        in_memory = self._affordable(num_bytes)
        if in_memory == self.count:
            self.degraded, self._limits = "", None
            return in_memory, in_memory
        places = min(self.count, in_memory + self._affordable_on_disk(num_bytes))
        self._explain(in_memory, places, num_bytes)
        can_take = in_memory or not self._disk_failed
        return in_memory, places if can_take else 0

    def _affordable(self, num_bytes: int) -> int:
        """How many snapshots of this size the limits of host memory allow."""
        most = min(self.count, math.floor(self.memory_fraction))
        held = self.held_bytes()
        if held >= most * num_bytes:
            return most  # all are there: no need to ask the system for more
        # One of before the first step has no moments, so that its place must grow to be used again.
        has_places = len(self._in_host_memory()) + len(self._spare) >= most
        size, until = self._granted
        if has_places and num_bytes <= size and time.monotonic() < until:
            return most
        free = available_bytes()
        if free is None:
            return most
        affordable = min(most, int((_share(free) + held) // num_bytes))
        granted = num_bytes if affordable == most else 0
        self._granted = granted, time.monotonic() + ASK_SECONDS
        return affordable

    def _affordable_on_disk(self, num_bytes: int) -> int:
        """How many snapshots of this size the disk has room for, those that are there included."""
        if self._folder is None:
            self._folder = folder_on_disk(self._folders)
        if self._folder is None:
            return 0
        if self._disk_failed:
            return sum(s.file is not None for s in self._kept)
        held = self.disk_bytes()
        if held >= self.count * num_bytes:
            return self.count
        try:
            free = free_bytes(self._folder)
        except OSError:
            free = 0
        return int((_share(free) + held) // num_bytes)

    def _explain(self, in_memory: int, places: int, num_bytes: int) -> None:
        """Say what limits the snapshots, and what to do about it; once for each limit."""
        limits = in_memory, places, self._disk_failed
        if limits == self._limits:
            return
        self._limits = limits
        is_set = in_memory == math.floor(self.memory_fraction)
        limit = "snapshot_memory_factor" if is_set else "free host memory"
        got = (
            f"expected {self.count} snapshots of {num_bytes / 1e9:.3g} GB in host memory, got "
            f"room for {in_memory} by {limit}"
        )
        if places == self.count and not self._disk_failed:
            self.degraded = "" if is_set else f"{got}; the others are on disk, in {self._folder}"
            return
        why = self._disk_failed or (
            "no temporary folder is on a disk"
            if self._folder is None
            else f"{self._folder} has room for {places - in_memory} more"
        )
        needed = (self.count - in_memory) * num_bytes / FREE_SHARE / 1e9
        self.degraded = (
            f"{got}, and {why}: {places} are kept; set TMPDIR to a folder on a disk with "
            f"{needed:.3g} GB free"
        )

    # Older ones on the disk.

    def _file_for(self, tensors: Mapping[Key, Tensor]) -> Callable[[], SpillFile]:
        """Return what opens a file to write, in the background; a spare one that fits if any."""
        while self._spare_files:
            file = self._spare_files.pop()
            if file.fits(tensors):
                return lambda: file
        folder = self._folder
        assert folder is not None  # else there is no place on the disk
        return lambda: SpillFile(folder, tensors)

    def _write_ahead(self, step: int, in_memory: int, places: int) -> None:
        """Begin to write the oldest in memory, if the next snapshot will need its place."""
        held = self._in_host_memory()
        is_needed = 0 < in_memory < places and len(held) >= in_memory
        is_done = self._writing is not None or any(s.file is not None for s in held)
        if not is_needed or is_done or self._disk_failed:
            return
        if len(self._kept) >= places:
            # By then the newest one has proven itself, and one of the others makes room.
            good = [s for s in self._kept if s.is_good or s is self._kept[-1]]
            following = self._least_useful(step + self.interval, self._kept, False, good)
            if following in held:
                return
        oldest = held[0]
        write = BackgroundWrite(self._file_for(oldest.tensors), oldest.tensors, oldest.wait)
        self._writing = oldest, write

    def _finish_write(self) -> float:
        """Wait until the write that is under way has ended; return for how many seconds."""
        if self._writing is None:
            return 0.0
        (snapshot, write), self._writing = self._writing, None
        seconds = write.wait()
        if write.error is not None:
            self._give_up_disk(write.error)
        snapshot.file = write.file
        return seconds

    def _note_waited(self, seconds: float) -> None:
        if seconds > PATIENCE:
            self.is_slow = True
            self._not_before = time.monotonic() + seconds / WAIT_SHARE

    def _give_up_disk(self, error: Exception) -> None:
        """Keep what is there, and write no more: a disk that is full or broken stays so."""
        why = getattr(error, "strerror", None) or repr(error)
        self._disk_failed = f"{self._folder} could not be written: {why}"

    def _least_useful(
        self,
        step: int,
        among: Sequence[Snapshot],
        must: bool,
        good: Sequence[Snapshot] | None = None,
    ) -> Snapshot | None:
        """Choose which to drop so that the ages of the others stay closest to geometric.

        Unless one ``must`` go, not one in quarantine (where snapshots come faster than proofs, none
        would ever be good), nor the newest good one or that from before the last sound check.
        """
        good = [s for s in self._kept if s.is_good] if good is None else good
        checked = [s for s in good if s.step <= self._checked_step]
        needed = {s.step for s in [*good[-1:], *checked[-1:]]} if len(self._kept) > 1 else set()
        mine = [s for s in good if s in among]
        choices = [s for s in mine if s.step not in needed | self._pinned]
        choices = choices or (mine or list(among) if must else [])
        misfit = {s.step: _misfit([g for g in good if g is not s], step) for s in choices}
        return min(choices, key=lambda s: misfit[s.step], default=None)

    def _copy(
        self,
        copies: Mapping[Key, Tensor],
        tensors: Mapping[Key, Tensor],
        without_nan: Mapping[Key, Tensor] | None,
    ) -> tuple[Tensor, Tensor, torch.Event | None]:
        """Copy, hash and measure the sources; on the device without waiting for it."""
        device = next((t.device for t in tensors.values() if t.device.type == "cuda"), None)
        if device is None:
            hashes, num_bad = copy_on_host(copies, tensors, without_nan)
            return hashes, num_bad, None
        # Buffers are written by the next forward, which nothing here can hold back: they are
        # copied in the stream of the run. The rest is not written before the next update.
        early = [key for key in tensors if key[0] not in ("parameter", "state")]
        late = [key for key in tensors if key[0] in ("parameter", "state")]
        copy_by_kind([copies[k] for k in early], [tensors[k] for k in early], non_blocking=True)
        there = fingerprints(tensors.values()), count_bad(tensors.items(), without_nan)
        hashes, num_bad = (host_memory(t).copy_(t, non_blocking=True) for t in there)
        if self._side is None:
            self._side = SideStream(device)
        self.copying = self._side.run(
            lambda: copy_by_kind(
                [copies[k] for k in late], [tensors[k] for k in late], non_blocking=True
            )
        )
        return hashes, num_bad, self.copying


def _share(free: int) -> float:
    """Return how much of what is free the snapshots of one rank may take."""
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "")  # on this host; set by torchrun and its like
    return FREE_SHARE * free / max(1, int(ranks) if ranks.isdigit() else 1)


def _fitting(buffer: Tensor | None, like: Tensor) -> Tensor:
    """Return the buffer if it fits, else a new one; pinned if the source is on a device."""
    if (
        buffer is not None
        and buffer.shape == like.shape
        and buffer.dtype == like.dtype
        and (buffer.stride() == like.stride() or not like.is_contiguous())
    ):
        return buffer
    return host_memory(like)


def _misfit(kept: Sequence[Snapshot], step: int) -> float:
    """Return how far ages, oldest first, are from a geometric scale within the run; in octaves."""
    ages = [max(1, step - snapshot.step) for snapshot in reversed(kept)]
    if len(ages) < 2:
        return 0.0
    ratio = min(AGE_RATIO, (step / ages[0]) ** (1 / (len(ages) - 1)))
    return sum(abs(math.log2(age / (ages[0] * ratio**i))) for i, age in enumerate(ages))
