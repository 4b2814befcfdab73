"""A folder of checkpoints: saves into it, keeps the useful ones, finds the newest that is whole."""

import os
import queue
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from heal.checkpoint.contents import (
    Contents,
    Names,
    check_kinds,
    collect,
    put_back,
    wanted_chunk,
)
from heal.checkpoint.files import CannotEncode, CheckpointError, SaveFailed, make_folder
from heal.checkpoint.manifest import (
    ABANDONED,
    Entry,
    StepFolder,
    abandon,
    committed,
    list_folders,
    remove_folder,
)
from heal.checkpoint.plan import BUSY, Ranks, SavePlan, agree, newest_common
from heal.checkpoint.reading import CheckpointReader, Restored, Want
from heal.checkpoint.shards import checksum_text, checksums, dtype_name
from heal.checkpoint.writer import Job, Writer
from heal.integrity import MEASURED
from heal.snapshots import host_memory
from heal.training_state import TrainingState, copy_by_kind
from zclip import grad_stats
from zclip.layout import NAN

# Which checkpoints go when there are more than wanted: never the newest that was verified.


def surplus(folders: Iterable[StepFolder], keep: int, verified: StepFolder) -> list[StepFolder]:
    """Return which of the finished saves to remove, oldest first.

    Args:
        folders: finished saves.
        keep: how many to keep.
        verified: the newest whose bytes were read and found right. It stays, and so does whatever
            is newer: nobody has vouched for that.
    """
    ordered = sorted(folders)
    candidates = ordered[: max(0, len(ordered) - keep)]
    return [folder for folder in candidates if folder < verified]


def retain(
    directory: Path,
    keep: int,
    verified: StepFolder,
    note: Callable[[str], None],
    left_alone: Collection[StepFolder] = (),
) -> list[StepFolder]:
    """Remove old saves, what crashes left unfinished, and what rollbacks abandoned before.

    A folder that cannot be removed is noted and left.

    Args:
        directory: of the store.
        keep: how many finished saves to keep.
        verified: see :func:`surplus`.
        note: told of what cannot be removed.
        left_alone: neither counted nor removed: nobody could read them, and a person may.

    Returns:
        Those that are gone.
    """
    going = surplus([f for f in committed(directory) if f not in left_alone], keep, verified)
    going += [f for f in list_folders(directory) if not f.is_committed and f < verified]
    gone = []
    for folder in going:
        try:
            remove_folder(folder)
        except OSError as error:
            note(f"cannot remove {folder.path}: {error}")
        else:
            gone.append(folder)
    _remove_abandoned(directory, keep, verified, note)
    return gone


def _remove_abandoned(
    directory: Path, keep: int, verified: StepFolder, note: Callable[[str], None]
) -> None:
    """Abandoned saves serve the post-mortem; as many stay as there are good ones."""
    found = sorted(directory.glob(f"step-*{ABANDONED}*"), key=lambda path: path.name)
    for path in found[: max(0, len(found) - keep)]:
        if path.is_symlink() or not path.is_dir():
            continue
        try:
            remove_folder(StepFolder(verified.step, verified.retry, path))
        except OSError as error:
            note(f"cannot remove {path}: {error}")


# Measures and copies a run's tensors, so that training may go on while they are written.


class Measured:
    """Checksums of tensors and the count of NaN and Inf in them, on their way to the host."""

    @torch.no_grad()
    def __init__(self, contents: Contents) -> None:
        self._contents = contents
        self._names = [name for name, t in contents.tensors.items() if t.numel()]
        tensors = [contents.tensors[name] for name in self._names]
        trained = [
            t
            for name, t in zip(self._names, tensors, strict=True)
            if name.startswith(("parameter/", "state/")) and t.dtype in MEASURED
        ]
        bad = grad_stats(trained)[:, NAN:].sum() if trained else torch.zeros(())
        there = (checksums(tensors) if tensors else torch.zeros(0, dtype=torch.int64), bad)
        self._sums, self._bad = (
            host_memory(t).copy_(t, non_blocking=t.device.type == "cuda") for t in there
        )
        self._landed = landing_of(there)

    def num_bad(self) -> int:
        """Return how many NaN and Inf are in parameters and optimizer state; waits for them."""
        self._wait()
        return int(self._bad)

    def entries(self, rank: int) -> dict[str, Entry]:
        """Return what the manifest says of every tensor; waits for the checksums."""
        self._wait()
        sums = dict(zip(self._names, self._sums.tolist(), strict=True))
        return self._listed(rank, sums)

    def outlines(self, rank: int) -> dict[str, Entry]:
        """Return the same without checksums; waits for nothing."""
        return self._listed(rank, {})

    def _listed(self, rank: int, sums: Mapping[str, int]) -> dict[str, Entry]:
        made = {}
        for name, t in self._contents.tensors.items():
            chunk = self._contents.chunks.get(name)
            whole = None if chunk is None else chunk.whole
            start = None if chunk is None else chunk.start
            checksum = checksum_text(sums.get(name, 0))
            made[name] = Entry(rank, dtype_name(t, name), tuple(t.shape), whole, start, checksum)
        return made

    def _wait(self) -> None:
        if self._landed is not None:
            self._landed.synchronize()
            self._landed = None


class Staging:
    """Host memory for copies of the tensors of one save, allocated once and used again."""

    def __init__(self) -> None:
        self._memory: dict[str, Tensor] = {}

    @torch.no_grad()
    def copy(self, tensors: Mapping[str, Tensor], names: Iterable[str]) -> "Copies":
        """Copy tensors to the host; on a device nothing waits."""
        memory = {name: self._fitting(name, tensors[name]) for name in names}
        self._memory = memory
        sources = [tensors[name] for name in memory]
        on_cuda = any(t.device.type == "cuda" for t in sources)
        copy_by_kind(list(memory.values()), sources, non_blocking=on_cuda)
        return Copies(memory, landing_of(sources))

    def _fitting(self, name: str, like: Tensor) -> Tensor:
        there = self._memory.get(name)
        if there is not None and there.shape == like.shape and there.dtype == like.dtype:
            return there
        return torch.empty(like.shape, dtype=like.dtype, pin_memory=like.device.type == "cuda")


class Copies:
    """Tensors on the host that may still be on their way."""

    def __init__(self, tensors: dict[str, Tensor], landed: torch.Event | None = None) -> None:
        self._tensors = tensors
        self._landed = landed

    def wait(self) -> dict[str, Tensor]:
        """Return the tensors once they are there."""
        if self._landed is not None:
            self._landed.synchronize()
            self._landed = None
        return self._tensors


def landing_of(sources: Iterable[Tensor]) -> torch.Event | None:
    """Return an event behind the copies just enqueued; None if they are done already.

    They run in the stream of the run: what it enqueues next cannot overtake them.
    """
    device = next((t.device for t in sources if t.device.type == "cuda"), None)
    if device is None:
        return None
    landed = torch.Event(device)
    landed.record(torch.cuda.current_stream(device))
    return landed


__all__ = ["CheckpointStore", "SaveReport"]


@dataclass(frozen=True, slots=True)
class SaveReport:
    """How a save ended; ``error`` is None if it is on the disk, whole."""

    step: int
    path: Path
    error: Exception | None


class CheckpointStore:
    """Checkpoints of one run, in one folder that all ranks see.

    A save is all or nothing: while it is written, whenever it is killed and however full the disk
    is, the checkpoints of before stay whole. With several ranks every rank calls every method, in
    the same order; :meth:`steps`, :meth:`verify`, :meth:`news` and :meth:`wait` are each rank's
    own.

    Args:
        directory: made if it is not there.
        keep: finished checkpoints to keep; at least 1. The newest whose bytes were verified is
            never removed.
        asynchronous: write in a thread; :meth:`save` then returns when copies are made, errors
            are told by :meth:`news`, and a save is left out while the one before is written.
        ranks: who saves together; the default process group if None.
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
        keep: int = 3,
        asynchronous: bool = False,
        ranks: Ranks | None = None,
        read_back: bool = True,
        wait_seconds: float = 600.0,
    ) -> None:
        if keep < 1:
            raise ValueError(f"keep: expected at least 1, got {keep}")
        self.directory = Path(directory)
        self.keep = keep
        self.ranks = Ranks() if ranks is None else ranks
        self.notes: list[str] = []
        self.passed_over: list[StepFolder] = []
        self._asynchronous = asynchronous
        self._read_back = read_back
        self._wait_seconds = wait_seconds
        self._staging = Staging()
        self._writer = Writer()
        self._said: queue.SimpleQueue[str] = queue.SimpleQueue()  # by the writer's thread
        make_folder(self.directory)

    def save(
        self,
        step: int,
        make: Callable[[], Contents],
        *,
        allow_nonfinite: bool = False,
        asynchronous: bool | None = None,
    ) -> Path:
        """Save what ``make`` returns.

        Args:
            step: the step that comes next.
            make: returns the contents; what it raises keeps all ranks from saving.
            allow_nonfinite: save parameters with NaN or Inf in them too.
            asynchronous: this time other than the store usually does.

        Returns:
            The folder; it is complete only when :meth:`wait` has returned.

        Raises:
            SaveFailed: nothing was saved, and all ranks know; or, if not asynchronous, writing
                failed.
        """
        in_thread = self._asynchronous if asynchronous is None else asynchronous
        if not in_thread:
            self._writer.wait()
        job = self._prepared(step, make, allow_nonfinite, in_thread)
        if in_thread:
            self._writer.submit(job)
        else:
            self._all_do(job, job.write_own)
            self._all_do(job, job.commit)
        return job.plan.folder.path

    def save_state(
        self, step: int, state: TrainingState, extra: Mapping[str, Any], **options: Any
    ) -> Path:
        """Save a run; see :meth:`save` for the options."""
        return self.save(step, lambda: collect(state, extra), **options)

    def load(
        self,
        want: Want = lambda name: None,
        *,
        most: int | None = None,
        needs: Sequence[str] = (),
    ) -> Restored | None:
        """Return the newest checkpoint that every rank can read; None if there is none.

        Those that had to be passed over are left alone from then on: retention neither counts nor
        removes them.

        Args:
            want: which part of each tensor this rank needs.
            most: the latest step that will do.
            needs: names that its plain values must have.
        """
        self._writer.wait()
        rank, size = self.ranks.rank, self.ranks.size

        def read(folder: StepFolder) -> Restored:
            restored = CheckpointReader(folder.path).read(rank, size, want)
            restored.check_values(needs)
            return restored

        found = newest_common(self.directory, self.ranks, read, self._note, most)
        newest = None if found is None else found[0]
        self.passed_over = [
            folder
            for folder in committed(self.directory)
            if (newest is None or folder > newest) and (most is None or folder.step <= most)
        ]
        return None if found is None else found[1]

    def load_state(
        self, state: TrainingState, *, most: int | None = None, needs: Sequence[str] = ()
    ) -> Restored | None:
        """Return a run to its newest checkpoint that every rank can read; None if there is none.

        Raises:
            StateMismatch: the checkpoint is of another run; nothing was changed.
        """
        names = Names(state)
        restored = self.load(
            lambda name: wanted_chunk(state, names, name), most=most, needs=("training", *needs)
        )
        if restored is not None:
            check_kinds(state, restored.values)
            put_back(state, restored.tensors, restored.values["training"])
        return restored

    def steps(self) -> list[int]:
        """Return the steps of finished checkpoints, newest first; their bytes are not read."""
        return [folder.step for folder in reversed(committed(self.directory))]

    def saved_or_begun(self) -> list[int]:
        """Return what :meth:`steps` will when nothing is being written any more, if all goes well.

        Unlike those it does not depend on how fast the disk is.
        """
        begun = self._writer.step  # first: what is finished meanwhile is found on the disk
        known = set(self.steps())
        if begun is None or begun in known:
            return sorted(known, reverse=True)
        return sorted({*known, begun}, reverse=True)[: self.keep]

    def verify(self, step: int) -> None:
        """Read every byte of a checkpoint, of all ranks.

        Raises:
            CheckpointCorrupt: names what has changed.
            CheckpointError: there is no checkpoint of this step.
        """
        for folder in reversed(committed(self.directory)):
            if folder.step == step:
                CheckpointReader(folder.path).check()
                return
        raise CheckpointError(f"{self.directory} has no finished checkpoint of step {step}")

    def abandon_after(self, step: int) -> None:
        """Put checkpoints of later steps aside: a rollback took these steps back."""
        self._writer.wait()
        if self.ranks.rank == 0:
            for folder in committed(self.directory):
                if folder.step > step:
                    abandon(folder)

    def news(self) -> list[SaveReport]:
        """Return how saves ended since last asked; never waits."""
        found = []
        while True:
            try:
                job, error = self._writer.finished.get_nowait()
            except queue.Empty:
                break
            found.append(SaveReport(job.plan.step, job.plan.folder.path, error))
        while not self._said.empty():
            self._note(self._said.get_nowait())
        return found

    @property
    def is_busy(self) -> bool:
        """Whether a save is being written."""
        return self._writer.is_busy

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until everything is on the disk; False if it is not after so many seconds."""
        return self._writer.wait(seconds)

    def hurry(self) -> None:
        """Wait for other ranks no longer than a moment: this process has failed, or they have."""
        self._writer.hurry()

    def close(self) -> None:
        """Finish what was begun."""
        self._writer.close()

    def _prepared(
        self, step: int, make: Callable[[], Contents], allow_nonfinite: bool, in_thread: bool
    ) -> Job:
        """Agree with all ranks and copy what this one writes."""
        contents, trouble = _made(make)
        trouble = trouble or _remade(self.directory)
        if in_thread and self._writer.is_busy:
            trouble = trouble or BUSY
        measured = Measured(contents)
        alone = self.ranks.size == 1
        try:
            # Alone, the device need not be waited for: the writer reads the checksums later.
            outlines = alone and in_thread
            entries = (measured.outlines if outlines else measured.entries)(self.ranks.rank)
            if not outlines and not allow_nonfinite:
                trouble = trouble or _nonfinite(measured.num_bad())
        except CannotEncode as error:
            entries, trouble = {}, trouble or str(error)
        plan = agree(self.directory, self.ranks, step, entries, trouble)
        held = [name for name, entry in plan.entries.items() if entry.held_by == plan.rank]
        needs_copy = in_thread or any(contents.tensors[n].device.type != "cpu" for n in held)
        copies = Copies({name: contents.tensors[name] for name in held})
        if needs_copy:
            copies = self._staging.copy(contents.tensors, held)
        return Job(
            plan,
            copies.wait,
            _later(measured, plan, allow_nonfinite) if outlines else None,
            contents.values,
            self._read_back,
            self._wait_seconds,
            self._committed,
        )

    def _all_do(self, job: Job, part: Callable[[], None]) -> None:
        """Do a part of a save, and hear from all ranks how they fared.

        By the process group, not by looking for files: it notices at once that a rank died.
        """
        trouble = None
        try:
            part()
        except (SaveFailed, OSError) as error:
            trouble = error
        said = self.ranks.gather(repr(trouble).encode() if trouble is not None else b"")
        if any(said):
            job.discard()
        if isinstance(trouble, OSError):
            raise SaveFailed(f"step {job.plan.step} was not saved: {trouble}") from trouble
        if trouble is not None:
            raise trouble
        for rank, text in enumerate(said):
            if text:
                name = job.plan.folder.path.name
                raise SaveFailed(
                    f"{name} was not committed: rank {rank} failed: {text.decode(errors='replace')}"
                )

    def _committed(self, folder: StepFolder) -> None:
        if self._read_back:
            retain(self.directory, self.keep, folder, self._said.put, self.passed_over)

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)


def _made(make: Callable[[], Contents]) -> tuple[Contents, str]:
    """A rank that cannot even collect must still tell the others, or these would wait for ever."""
    try:
        return make(), ""
    except Exception as error:
        return Contents({}), f"{type(error).__name__}: {error}"


def _remade(directory: Path) -> str:
    """Make the folder again if it was removed while the run went on; return why that failed."""
    try:
        make_folder(directory)
    except OSError as error:
        return f"{directory} cannot be made: {error.strerror or error}"
    return ""


def _later(
    measured: Measured, plan: SavePlan, allow_nonfinite: bool
) -> Callable[[], dict[str, str]]:
    def checksums() -> dict[str, str]:
        trouble = "" if allow_nonfinite else _nonfinite(measured.num_bad())
        if trouble:
            raise SaveFailed(f"step {plan.step} was not saved: {trouble}")
        return {name: entry.checksum for name, entry in measured.entries(plan.rank).items()}

    return checksums


def _nonfinite(count: int) -> str:
    return f"parameters and optimizer state hold {count} NaN or Inf" if count else ""
