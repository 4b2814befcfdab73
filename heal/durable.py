"""The checkpoints of a healed run: when they are saved, what is in them, how a run goes on.

:mod:`heal.checkpoint` writes and reads them. A save that fails is reported and counted; training
goes on.
"""

import copy
import logging
import os
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from heal.actions import HealingError
from heal.causes import Cause
from heal.checkpoint.files import (
    CheckpointError,
    StillWriting,
    make_folder,
    read_file,
    write_file,
)
from heal.checkpoint.manifest import from_bytes, to_bytes
from heal.checkpoint.reading import Restored
from heal.checkpoint.store import CheckpointStore
from heal.cluster.launch import RankGroup
from heal.config import HealingConfig
from heal.config_fields import shown
from heal.data.stream import BatchStream
from heal.exit_codes import ExitCode
from heal.journal import Journal, Notes
from heal.json_lines import plain
from heal.monitor import Monitor
from heal.policy import MAX_CONSECUTIVE_DATA_ERRORS
from heal.recovery import Recovery
from heal.snapshots import NEVER, Snapshot, next_due
from heal.training_run import TorchRun
from heal.training_state import RngState, TrainingState

LOG = logging.getLogger("heal")
Values = Callable[[], dict[str, Any]]
"""Returns what healing knows of the run, see :class:`HealingMemory`."""

NEEDED = ("data", "unwanted", "healing", "history", "run")
"""Plain values of a run beside those of its training state."""

MEMORY_VERSION = 2
REMEDY_NAME = re.compile(r"remedy-(\d+)-rank(\d+)-(\d+)\.json")
MAX_REMEDY_BYTES = 2**16


@dataclass(frozen=True, slots=True)
class Remedy:
    """What the next start of a run must do differently, left by a rank that had to exit in a step.

    A resumed run is bit by bit the run that died, so that it would meet the same batch again. Every
    rank of the next start leaves the batch out, or cuts its batches finer.
    """

    step: int  # that could not be taken
    rank: int  # that could not take it
    cause: str  # value of a :class:`heal.causes.Cause`
    error: str = ""
    batches: list[int] = field(default_factory=list)  # to leave out, by their number in the stream
    micro: dict[str, int] = field(default_factory=dict)  # see MicroBatcher.state

    @classmethod
    def from_json(cls, page: Any) -> "Remedy":
        """Return the remedy of a file; raise ValueError if it holds something else."""
        try:
            remedy = cls(**page)
            numbers = [remedy.step, remedy.rank, *remedy.batches, *remedy.micro.values()]
            odd = [number for number in numbers if not isinstance(number, int)]
            if odd:
                raise TypeError(f"expected whole numbers, got {shown(odd[0])}")
        except (TypeError, AttributeError) as error:
            raise ValueError(f"not a remedy: {error}") from None
        return remedy


def _remedy_files(directory: Path) -> dict[Path, int]:
    """Return the files of remedies, and the step of each."""
    try:
        names = sorted(os.listdir(directory))
    except OSError:
        return {}
    matches = [REMEDY_NAME.fullmatch(name) for name in names]
    return {directory / match[0]: int(match[1]) for match in matches if match}


def _read_remedies(directory: Path) -> list[Remedy]:
    found = []
    for path in _remedy_files(directory):
        # One that is torn or forged is skipped: the run meets the batch again and leaves another.
        with suppress(CheckpointError, OSError, ValueError):
            page = from_bytes(read_file(path, MAX_REMEDY_BYTES), path)
            found.append(Remedy.from_json(page))
    return found


class HealingMemory:
    """What was tried, what the detectors learned, and what healing changed about the run.

    Without it a run that was resumed would have all its attempts again, and try what has failed.
    """

    def __init__(self, run: TorchRun, monitor: Monitor, recovery: Recovery) -> None:
        self._run = run
        self._guarded = run.guarded
        self._monitor = monitor
        self._recovery = recovery

    def values(self) -> dict[str, Any]:
        """Return it as plain values, without the tensors of clipping and of the loss."""
        self._recovery.catch_up()  # the detectors are saved with all that they can know
        return {
            "healing": self._monitor.watch.state(),
            "untreated": self._recovery.late_findings(),
            "history": self._recovery.history.state(),
            "run": plain(self._run.state()),
        }

    def resume(self, step: int, values: dict[str, Any]) -> None:
        """Go on at a step of another process, with what :meth:`values` returned there."""
        self._recovery.resume(values["history"], values.get("untreated", ()))
        self._monitor.watch.load_state(values["healing"])
        self._run.resume(step, values["run"])
        self._monitor.forget()

    def state_dict(self) -> dict[str, Any]:
        """Return it with the state of clipping and of the loss, which are tensors of their own."""
        return {
            "version": MEMORY_VERSION,
            "step": self._run.step,
            "clip": [optimizer.clipper.state_dict() for optimizer in self._guarded.optimizers],
            "loss": self._guarded.watch.state.clone(),
            **self.values(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with what :meth:`state_dict` returned; weights and optimizer are as they were then.

        Raises:
            ValueError: it is of another version of this library.
            Exception: it cannot be used. All is as it was before, and healing starts afresh.
        """
        version = state.get("version", 1)  # that of Lightning had none
        if version != MEMORY_VERSION:
            raise ValueError(f"healing state: expected version {MEMORY_VERSION}, got {version}")
        before = copy.deepcopy(self.state_dict())
        try:
            self._load(state)
        except Exception:
            self._load(before)
            raise

    def _load(self, state: dict[str, Any]) -> None:
        for optimizer, clip in zip(self._guarded.optimizers, state["clip"], strict=True):
            optimizer.clipper.load_state_dict(clip)
        self._guarded.watch.state.copy_(state["loss"])
        self.resume(int(state["step"]), state)


class Durable:
    """Saves a run to disk every so many steps, and brings it back.

    The journal gets an event for every save, and ``notes`` a text for every failure. ``group`` are
    the ranks that save together, all if None.

    Attributes:
        failures: how many saves failed.
        is_failing: whether the newest save failed.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        config: HealingConfig,
        state: TrainingState,
        stream: BatchStream,
        journal: Journal,
        notes: Notes,
        group: Any = None,
    ) -> None:
        self.failures = 0
        self.is_failing = False
        self.store = CheckpointStore(
            directory,
            keep=config.checkpoint_keep,
            asynchronous=config.checkpoint_async,
            ranks=RankGroup(group),
        )
        self._interval = config.checkpoint_interval
        self._asynchronous = config.checkpoint_async
        self._state = state
        self._stream = stream
        self._journal = journal
        self._notes = notes
        self._saved_step = -1

    def next_due(self, step: int) -> int:
        """Return the next step after ``step`` at which to save."""
        return next_due(step, self._interval, False) if self._interval > 0 else NEVER

    def save_if_due(self, step: int, values: Values) -> None:
        """Save if it is time, and report how earlier saves ended; waits for no disk."""
        self._report_saves()
        if self._interval > 0 and step % self._interval == 0:
            self._contained(step, lambda: self._save(step, values, self._asynchronous))

    def save(self, step: int, values: Values) -> None:
        """Save now, and return when it is on the disk, else raise; every rank has to call this."""
        self.finish()
        self._save(step, values, asynchronous=False)

    def save_last(self, step: int, values: Values) -> None:
        """Save the end of a run, unless that was just done; a failure is reported, not raised."""
        self.finish()
        if self._saved_step != step:
            self._contained(step, lambda: self._save(step, values, asynchronous=False))

    def saved_before(
        self, halt: HealingError, step: int, values: Values, may_save: bool = True
    ) -> HealingError:
        """Save before a requested stop; return the stop, with another code if saving failed.

        ``may_save``: whether all ranks are here to save together.
        """
        if may_save:
            self.save_last(step, values)
        else:
            self.finish()
        if self._saved_step == step:
            return halt
        known = self.store.steps()
        newest = f"the newest checkpoint is of step {known[0]}" if known else "no checkpoint exists"
        return HealingError(
            f"{halt}; the state of step {step} could not be saved, {newest}",
            ExitCode.NOT_SAVED,
        )

    def finish(self) -> None:
        """Wait until everything is on the disk, and report how that ended."""
        self.store.wait()
        self._report_saves()

    def load(self) -> Restored | None:
        """Read the newest checkpoint that is whole on every rank; every rank has to call.

        Weights, optimizer, schedules, the position in the data and generators are as they were.

        Returns:
            Its step and what healing knew of the run; None if there is no checkpoint.

        Raises:
            StateMismatch: the checkpoint is of another run; nothing was changed.
        """
        restored = self.store.load_state(self._state, needs=NEEDED)
        self._copy_notes()
        if restored is None:
            if self.store.passed_over:
                self._notes.add(
                    f"none of the {len(self.store.passed_over)} checkpoints in "
                    f"{self.store.directory} can be used: training starts at step 0, and they "
                    "are left as they are"
                )
            return None
        position = restored.values["data"]
        if restored.world_size != self.store.ranks.size:
            position = self._moved(position, restored)
        self._stream.resume(position, restored.values["unwanted"])
        restored.restore_rng(self.store.ranks.rank)
        self._saved_step = restored.step
        return restored

    def may_leave(self, remedy: Remedy) -> bool:
        """Return whether a restart may still help: as often as data errors may come in a row."""
        same = [r for r in _read_remedies(self.store.directory) if r.step == remedy.step]
        is_of_data = remedy.cause == Cause.DATA_ERROR.value
        return not is_of_data or len(same) < MAX_CONSECUTIVE_DATA_ERRORS

    def leave(self, remedy: Remedy) -> bool:
        """Write a remedy for the next start; False if the disk does not take it."""
        self._journal.event("remedy", remedy.step, remedy=asdict(remedy))
        directory, known = self.store.directory, _read_remedies(self.store.directory)
        count = sum((other.step, other.rank) == (remedy.step, remedy.rank) for other in known)
        path = directory / f"remedy-{remedy.step}-rank{remedy.rank}-{count}.json"
        try:
            make_folder(directory)
            write_file(path, [to_bytes(asdict(remedy))])
        except OSError:
            return False
        return True

    def remedies(self, step: int) -> list[Remedy]:
        """Return what ranks could not do when this run was last tried; alike on all ranks."""
        ranks, directory = self.store.ranks, self.store.directory
        if ranks.rank == 0:
            for path, taken in _remedy_files(directory).items():
                if taken < step:
                    with suppress(OSError):
                        path.unlink(missing_ok=True)
        own = [asdict(remedy) for remedy in _read_remedies(directory) if remedy.step >= step]
        # Disks may show a new file late on some ranks; what one of them sees, all use.
        pages = chain(*ranks.gather(own))
        return sorted(map(Remedy.from_json, pages), key=lambda r: (r.step, r.rank))

    def steps(self) -> list[int]:
        """Return the steps of checkpoints, newest first; that of a save under way counts."""
        return self.store.saved_or_begun()

    def snapshot(self, step: int) -> Snapshot | None:
        """Return the checkpoint of a step in the form of a snapshot; None if it is damaged."""
        found = self.store.read_state(self._state, step, NEEDED)
        self._copy_notes()
        if found is None:
            return None
        restored, tensors = found
        values = {**restored.values["training"], **restored.values}
        nothing = torch.zeros(0, dtype=torch.int64), torch.zeros((), dtype=torch.float64)
        return Snapshot(step, tensors, values, *nothing, landed=None, is_good=True)

    def abandon_after(self, step: int) -> None:
        """Put checkpoints of later steps aside: the run went back before them."""
        try:
            self.store.abandon_after(step)
        except OSError as error:
            self._notes.add(f"checkpoints after step {step} are not part of the run: {error}")
        self._saved_step = -1

    def _save(self, step: int, values: Values, asynchronous: bool) -> None:
        saved = {
            "rng": RngState.now(),
            "data": self._stream.position(),
            "unwanted": self._stream.unwanted(),
            **values(),
        }
        path = self.store.save_state(step, self._state, saved, asynchronous=asynchronous)
        self._saved_step = step
        if not asynchronous:
            self._worked(step, path)

    def _contained(self, step: int, save: Callable[[], None]) -> None:
        try:
            save()
        except StillWriting as error:
            self._journal.event("checkpoint_skipped", step, reason=str(error))
        except (CheckpointError, OSError) as error:
            self._failed(step, error)

    def _report_saves(self) -> None:
        for report in self.store.finished_saves():
            if report.error is not None:
                self._failed(report.step, report.error)
            elif self.store.ranks.rank == 0:
                self._worked(report.step, report.path)

    def _copy_notes(self) -> None:
        for note in self.store.notes:
            self._notes.add(note)

    def _worked(self, step: int, path: Path) -> None:
        self._journal.event("checkpoint", step, path=str(path))
        if self.is_failing:
            LOG.warning("heal: checkpoint of step %d is saved: saving works again", step)
        self.is_failing = False

    def _failed(self, step: int, error: Exception) -> None:
        self.failures += 1
        self.is_failing = True
        self._saved_step = -1
        self._journal.event("checkpoint_failed", step, error=str(error))
        self._notes.add(f"checkpoint of step {step} failed: {error}")

    def _moved(self, position: Any, restored: Restored) -> Any:
        """The same share of the epoch, where samples are dealt out to another number of ranks."""
        old, new = restored.world_size, self.store.ranks.size
        self._notes.add(
            f"saved by {old} ranks, resumed by {new}: the epoch goes on at the same share of its "
            "samples, which are dealt out again"
        )
        return replace(position, index=position.index * old // new, loader_state=None)
