"""Saves a run and loads it: two functions, and the folder of checkpoints that they use."""

import atexit
import os
import queue
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from heal.buffers import Key
from heal.checkpoint.contents import Names, collect, matched, put_back
from heal.checkpoint.files import (
    ABANDONED,
    CheckpointError,
    SaveFailed,
    StepFolder,
    committed,
    make_folder,
    newest_folder,
    put_aside,
    retain,
)
from heal.checkpoint.manifest import Entry
from heal.checkpoint.reading import CheckpointReader, PartOf, Restored
from heal.checkpoint.saving import BUSY, HostCopies, Job, Measured, agree
from heal.cluster.launch import RankGroup
from heal.extra_state import listed
from heal.former import OldName
from heal.training_state import RngState, StateMismatch, TrainingState
from zclip import ClippedOptimizer

KEEP = 3
NO_FOLDER = StepFolder(-1)


@dataclass(frozen=True, slots=True)
class Resumed:
    """What was loaded.

    Attributes:
        step: the step that comes next.
        extra: what was given to :func:`save` under this name.
        notes: checkpoints that were passed over, and why.
    """

    step: int
    extra: Any
    notes: tuple[str, ...] = ()


def save(
    directory: str | os.PathLike[str],
    step: int,
    model: Module,
    optimizer: Optimizer | Sequence[Optimizer] = (),
    scheduler: Any = None,
    *,
    scaler: Any = None,
    extra: Any = None,
    keep: int = KEEP,
    allow_nonfinite: bool = False,
) -> Path:
    """Save everything that a run needs to continue bit by bit; return the folder.

    Parameters, all buffers, optimizer state, settings of parameter groups, schedulers, scaler and
    random generators of every rank. Every rank has to call this. It returns when all is on the
    disk; :class:`CheckpointStore` can write in a thread.

    Args:
        directory: of the checkpoints; all ranks see it.
        step: the step that comes next.
        model: may be wrapped in DDP or compiled, or be sharded by FSDP2.
        optimizer: one, several or none.
        scheduler: one, several or None.
        scaler: a GradScaler.
        extra: plain values and tensors of your own, such as the position in the data.
        keep: checkpoints to keep.
        allow_nonfinite: save parameters with NaN or Inf in them too.

    Raises:
        SaveFailed: nothing was saved; what was saved before is untouched.

    Example:
        >>> heal.checkpoint.save("checkpoints", step, model, optimizer)
    """
    store = CheckpointStore(directory, keep=keep)
    state = training_state(model, optimizer, scheduler, scaler)
    values = {"rng": RngState.now(), "extra": extra}
    return store.save_state(step, state, values, allow_nonfinite=allow_nonfinite)


def load(
    directory: str | os.PathLike[str],
    model: Module,
    optimizer: Optimizer | Sequence[Optimizer] = (),
    scheduler: Any = None,
    *,
    scaler: Any = None,
    most: int | None = None,
) -> Resumed | None:
    """Return a run to its newest checkpoint that is whole on every rank; None if there is none.

    Nothing is changed before every byte was read and compared with its checksum. The number of
    ranks may differ from that which saved. Every rank has to call this.

    Args:
        directory: of the checkpoints.
        model: built as it was.
        optimizer: built as it was; it need not have taken a step.
        scheduler: built as it was.
        scaler: a GradScaler.
        most: the latest step that will do.

    Raises:
        StateMismatch: the checkpoint is of another model or optimizer; nothing was changed.

    Example:
        >>> resumed = heal.checkpoint.load("checkpoints", model, optimizer)
        >>> step = resumed.step if resumed else 0
    """
    store = CheckpointStore(directory)
    state = training_state(model, optimizer, scheduler, scaler)
    restored = store.load_state(state, most=most)
    if restored is None:
        return None
    restored.restore_rng(store.ranks.rank)
    return Resumed(restored.step, restored.values.get("extra"), tuple(store.notes))


def training_state(
    model: Module,
    optimizer: Optimizer | Sequence[Optimizer] = (),
    scheduler: Any = None,
    scaler: Any = None,
) -> TrainingState:
    """Return what a run without a healer is made of."""
    wrapped = [
        o if isinstance(o, ClippedOptimizer) else cast(ClippedOptimizer, _Bare(o))
        for o in listed(optimizer)
    ]
    return TrainingState(model, wrapped, listed(scheduler), scaler)


class _Bare:
    """An optimizer without a clipper, in the shape that the training state expects."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.inner = optimizer
        self.clipper = SimpleNamespace(state_dict=dict, load_state_dict=lambda state: None)
        self.forget_momentum = lambda: None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


@dataclass(frozen=True, slots=True)
class SaveReport:
    """How a save ended; ``error`` is None if it is on the disk, whole."""

    step: int
    path: Path
    error: Exception | None


class CheckpointStore:
    """Checkpoints of one run, in one folder that all ranks see.

    A save is all or nothing: while it is written, whenever it is killed and however full the disk
    is, the earlier checkpoints stay whole. With several ranks every rank calls every method, in the
    same order, except :meth:`steps`, :meth:`verify`, :meth:`finished_saves` and :meth:`wait`.

    Args:
        directory: made if it is not there.
        keep: finished checkpoints to keep; at least 1. The newest whose bytes were verified is
            never removed.
        asynchronous: write in a thread; :meth:`save_state` then returns when copies are made,
            :meth:`finished_saves` has the errors. A save is skipped while one is being written.
        ranks: that save together; the default process group if None.
        read_back: read every shard again before it counts as saved.
        wait_seconds: how long a rank may take longer than another.

    Attributes:
        notes: what was passed over or could not be removed.
        passed_over: finished checkpoints that the last load could not use.

    Raises:
        OSError: the folder cannot be made.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        keep: int = KEEP,
        asynchronous: bool = False,
        ranks: RankGroup | None = None,
        read_back: bool = True,
        wait_seconds: float = 600.0,
    ) -> None:
        if keep < 1:
            raise ValueError(f"keep: expected at least 1, got {keep}")
        self.directory = Path(directory)
        self.keep = keep
        self.ranks = RankGroup() if ranks is None else ranks
        self.notes: list[str] = []
        self.passed_over: list[StepFolder] = []
        self._asynchronous = asynchronous
        self._read_back = read_back
        self._wait_seconds = wait_seconds
        self._memory: dict[str, Tensor] = {}  # of the last copies, used again
        self._thread: threading.Thread | None = None  # lives as long as its save
        self._begun = -1  # the step that it saves
        self._in_a_hurry = threading.Event()
        self._reports: queue.SimpleQueue[SaveReport] = queue.SimpleQueue()
        make_folder(self.directory)
        atexit.register(_finish_at_exit, weakref.ref(self))

    def save_state(
        self,
        step: int,
        state: TrainingState,
        extra: Mapping[str, Any],
        *,
        allow_nonfinite: bool = False,
        asynchronous: bool | None = None,
    ) -> Path:
        """Save a run.

        Args:
            step: the step that comes next.
            state: the run.
            extra: further plain values and tensors.
            allow_nonfinite: save parameters with NaN or Inf in them too.
            asynchronous: whether to write in a thread; as the store does by default if None.

        Returns:
            The folder; it is complete only when :meth:`wait` has returned.

        Raises:
            SaveFailed: nothing was saved, on any rank; or, if not asynchronous, writing failed.
        """
        in_thread = self._asynchronous if asynchronous is None else asynchronous
        if not in_thread:
            self.wait()
        job = self._prepare(step, state, extra, allow_nonfinite, in_thread)
        if in_thread:
            self._start(job)
        else:
            self._all_do(job, job.write_own)
            self._all_do(job, lambda: self._commit(job))
        return job.folder.path

    def load(
        self,
        part_of: PartOf = lambda name: None,
        *,
        most: int | None = None,
        needs: Sequence[str] = (),
    ) -> Restored | None:
        """Return the newest checkpoint that every rank can read; None if there is none.

        One collective if the newest is good everywhere; one more for each that some rank could not
        read: all fall back together. Retention neither counts nor removes those passed over.

        Args:
            part_of: which part of each tensor this rank needs.
            most: the latest step that will do.
            needs: names that its plain values must have.
        """
        self.wait()
        latest = bound = StepFolder(sys.maxsize if most is None else most, sys.maxsize)
        mine, restored, is_common = StepFolder(sys.maxsize, sys.maxsize + 1), None, False
        while not is_common:
            if mine > bound:
                folders = [f for f in committed(self.directory) if f <= bound]
                usable = self._readable(folders, part_of, needs)
                mine, restored = next(usable, (NO_FOLDER, None))
            found = self.ranks.gather((mine.step, mine.retry))
            bound, is_common = StepFolder(*min(found)), min(found) == max(found)
            if mine > bound:
                self._note(f"{mine.path.name}: another rank cannot read it; trying an older one")
        self.passed_over = [f for f in committed(self.directory) if bound < f <= latest]
        return restored

    def load_state(
        self, state: TrainingState, *, most: int | None = None, needs: Sequence[str] = ()
    ) -> Restored | None:
        """Return a run to its newest checkpoint that every rank can read; see :meth:`load`.

        Raises:
            StateMismatch: the checkpoint is of another run; nothing was changed.
        """
        names = Names(state)
        restored = self.load(names.part_of, most=most, needs=("training", *needs))
        if restored is not None:
            put_back(names, restored.tensors, restored.values)
        return restored

    def read_state(
        self, state: TrainingState, step: int, needs: Sequence[str] = ()
    ) -> tuple[Restored, dict[Key, Tensor]] | None:
        """Read this rank's checkpoint of a step, with tensors under the keys of a run.

        Waits for a save under way, so that the result does not depend on the speed of the disk.
        None if no checkpoint can be used; the notes have the reason.
        """
        self.wait()
        names = Names(state)
        folders = committed(self.directory, step)
        for folder, restored in self._readable(folders, names.part_of, ("training", *needs)):
            try:
                return restored, matched(names, restored.tensors)[0]
            except StateMismatch as error:
                self._note(f"{folder.path.name} cannot be used: {error}")
        return None

    def steps(self) -> list[int]:
        """Return the steps of finished checkpoints, newest first; their bytes are not read."""
        return [folder.step for folder in reversed(committed(self.directory))]

    def saved_or_begun(self) -> list[int]:
        """Return what :meth:`steps` will be when the save under way has succeeded.

        Unlike :meth:`steps` this does not depend on how fast the disk is.
        """
        begun = {self._begun} if self.is_busy else set()  # first: it may be finished meanwhile
        known = set(self.steps())
        found = sorted(known | begun, reverse=True)
        return found if begun <= known else found[: self.keep]

    def verify(self, step: int) -> None:
        """Read every byte of a checkpoint, of all ranks; raise an error that names a fault."""
        CheckpointReader(newest_folder(self.directory, step).path).check()

    def abandon_after(self, step: int) -> None:
        """Rename checkpoints of later steps: a rollback undid these steps."""
        self.wait()
        if self.ranks.rank == 0:
            for folder in committed(self.directory):
                if folder.step > step:
                    put_aside(folder.path, folder.path.name + ABANDONED)

    def finished_saves(self) -> list[SaveReport]:
        """Return how saves in a thread ended since the last call; never waits."""
        found = []
        while not self._reports.empty():
            found.append(self._reports.get_nowait())
        return found

    news = OldName("finished_saves")

    @property
    def is_busy(self) -> bool:
        """Whether a save is being written."""
        return self._thread is not None and self._thread.is_alive()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until everything is on the disk; False if it is not after so many seconds."""
        if self._thread is not None:
            self._thread.join(seconds)
        return not self.is_busy

    def hurry(self) -> None:
        """Wait for other ranks no longer than a moment: this process has failed, or they have."""
        self._in_a_hurry.set()

    def close(self) -> None:
        """Finish what was begun."""
        self.wait()

    def _readable(
        self, folders: Sequence[StepFolder], part_of: PartOf, needs: Sequence[str]
    ) -> Iterator[tuple[StepFolder, Restored]]:
        """Read checkpoints, newest first; those that cannot be used are noted."""
        for folder in reversed(folders):
            try:
                reader = CheckpointReader(folder.path)
                restored = reader.read(self.ranks.rank, self.ranks.size, part_of)
                restored.check_values(needs)
            except (CheckpointError, OSError, MemoryError) as error:
                self._note(f"{folder.path.name} cannot be used: {error}")
            else:
                yield folder, restored

    def _prepare(
        self,
        step: int,
        state: TrainingState,
        extra: Mapping[str, Any],
        allow_nonfinite: bool,
        in_thread: bool,
    ) -> Job:
        """Agree with all ranks and copy what this one writes.

        A rank that cannot save still takes part, because the other ranks would wait for ever.
        """
        entries: dict[str, Entry] = {}
        tensors: dict[str, Tensor] = {}
        measured, values, trouble = None, None, ""
        try:
            entries, tensors, values = collect(state, extra)
            measured = Measured(tensors, allow_nonfinite)
            # Alone, the device need not be waited for: the thread reads the checksums later.
            if not in_thread or self.ranks.size > 1:
                entries, trouble = measured.added_to(entries)
                measured = None
        except Exception as error:
            trouble = f"{type(error).__name__}: {error}"
        if in_thread and self.is_busy:
            trouble = trouble or BUSY
        folder, manifest = agree(self.directory, self.ranks, step, entries, values, trouble)
        held = {n: tensors[n] for n, e in manifest.entries.items() if e.held_by == manifest.rank}
        copied: Callable[[], dict[str, Tensor]] = held.copy
        if in_thread or any(tensor.device.type != "cpu" for tensor in held.values()):
            try:
                copies = HostCopies(held, self._memory)
                self._memory, copied = copies.tensors, copies.wait
            except Exception as error:  # it ends the writing, and the other ranks learn of it
                copied = partial(_fail, error)
        return Job(
            folder,
            manifest,
            copied,
            measured,
            self._read_back,
            self._wait_seconds,
            self._in_a_hurry,
        )

    def _all_do(self, job: Job, part: Callable[[], None]) -> None:
        """Do a part of a save on every rank; raise on all of them if one failed.

        Through the process group, not by polling for files: it notices at once that a rank died.
        """
        trouble: Exception | None = None
        try:
            part()
        except (OSError, RuntimeError, MemoryError) as error:
            trouble = error
        reports = self.ranks.gather("" if trouble is None else repr(trouble))
        if any(reports):
            job.discard()
            if isinstance(trouble, CheckpointError):
                raise trouble
            if trouble is not None:
                raise SaveFailed(f"step {job.manifest.step} was not saved: {trouble}") from trouble
            rank, text = next((rank, text) for rank, text in enumerate(reports) if text)
            name = job.folder.path.name
            raise SaveFailed(f"{name} was not committed: rank {rank} failed: {text}")

    def _start(self, job: Job) -> None:
        self._in_a_hurry.clear()
        thread = threading.Thread(target=self._write, args=(job,), name="heal-writer", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # no more threads: this save fails, and the next may not
            job.give_up(error)
            raise SaveFailed(f"step {job.manifest.step} was not saved: {error}") from error
        self._thread, self._begun = thread, job.manifest.step

    def _write(self, job: Job) -> None:
        """Write a save in a thread: training never waits for it and never dies of it."""
        failure: Exception | None = None
        try:
            job.write_own()
            self._commit(job)
        except Exception as error:
            failure = error
        self._reports.put(SaveReport(job.manifest.step, job.folder.path, failure))

    def _commit(self, job: Job) -> None:
        job.commit()
        if job.manifest.rank == 0 and self._read_back:
            retain(self.directory, self.keep, job.folder, self._note, self.passed_over)

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)


def _fail(error: Exception) -> Any:
    raise error


def _finish_at_exit(reference: "weakref.ref[CheckpointStore]") -> None:
    store = reference()
    if store is not None:
        if getattr(sys, "last_type", None) is not None:
            store.hurry()  # an error ends this process, perhaps because another has died
        store.wait()
