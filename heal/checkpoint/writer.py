"""Writes a save to the disk: in the caller's thread, or in one of its own beside the training."""

import atexit
import contextlib
import queue
import sys
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from torch import Tensor

from heal.checkpoint.files import SaveFailed, make_folder, read_file, remove_file, write_file
from heal.checkpoint.manifest import (
    COMMIT,
    MAX_COMMIT,
    MAX_MANIFEST,
    Commit,
    Manifest,
    StepFolder,
    digest,
    manifest_name,
    remove_folder,
    shard_name,
)
from heal.checkpoint.plan import SavePlan
from heal.checkpoint.shards import ShardReader, write_shard

POLL_SECONDS = 0.02  # between looks for the files of other ranks
HURRY_SECONDS = 3.0  # for their files, when this process has failed: they may be gone


@dataclass(slots=True)
class Job:
    """A save that was agreed upon.

    Attributes:
        plan: what this rank writes, and where to.
        tensors: returns them once they are on the host.
        checksums: returns them by name, once they are; None if the plan has them.
        values: plain values, as JSON.
        read_back: whether to read the shard again before vouching for it.
        wait_seconds: how long other ranks may take.
        after_commit: called on rank 0 when the save is complete.
    """

    plan: SavePlan
    tensors: Callable[[], dict[str, Tensor]]
    checksums: Callable[[], dict[str, str]] | None
    values: object
    read_back: bool = True
    wait_seconds: float = 600.0
    after_commit: Callable[[StepFolder], None] = lambda folder: None
    in_a_hurry: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        """Write this rank's files; on rank 0 also COMMIT, when all others are done.

        Raises:
            SaveFailed: this rank or another could not write; there is no COMMIT.
            OSError: the same, from the disk.
        """
        self.write_own()
        self.commit()

    def write_own(self) -> None:
        """Write this rank's files.

        Raises:
            SaveFailed: it could not.
            OSError: the same, from the disk.
        """
        folder = self.plan.folder.path
        try:
            self._write_own(folder)
        except BaseException as error:
            self._give_up(folder, error)
            raise

    def commit(self) -> None:
        """On rank 0: write COMMIT, when all others are done.

        Raises:
            SaveFailed: another rank could not write, or not in time; there is no COMMIT.
            OSError: this one could not.
        """
        if self.plan.rank == 0:
            try:
                self._commit(self.plan.folder.path)
            except BaseException:
                self.discard()
                raise
            self.after_commit(self.plan.folder)

    def discard(self) -> None:
        """On rank 0: remove the folder of a save that will never be finished, if the disk lets."""
        if self.plan.rank == 0 and not self.plan.folder.is_committed:
            with contextlib.suppress(OSError):
                remove_folder(self.plan.folder)

    def _write_own(self, folder: Path) -> None:
        plan = self.plan
        make_folder(folder)
        entries = plan.entries
        if self.checksums is not None:
            sums = self.checksums()
            entries = {name: replace(e, checksum=sums[name]) for name, e in entries.items()}
        write_shard(folder, plan.rank, entries, self.tensors())
        if self.read_back:
            with ShardReader(folder, plan.rank, entries) as shard:
                shard.check()
        manifest = Manifest(
            plan.save_id, plan.step, plan.rank, plan.world_size, entries, self.values
        )
        write_file(folder / manifest_name(plan.rank), [manifest.to_bytes()])

    def _commit(self, folder: Path) -> None:
        checksums = []
        for rank in range(self.plan.world_size):
            path = folder / manifest_name(rank)
            self._await(path.exists, f"rank {rank} wrote no manifest")
            checksums.append(digest(read_file(path, MAX_MANIFEST)))
        plan = self.plan
        commit = Commit(plan.save_id, plan.step, plan.world_size, tuple(checksums))
        data = commit.to_bytes()
        if len(data) > MAX_COMMIT:
            raise SaveFailed(f"{COMMIT}: expected at most {MAX_COMMIT} bytes, got {len(data)}")
        write_file(folder / COMMIT, [data])

    def _give_up(self, folder: Path, error: BaseException) -> None:
        """Free what half a save takes up, and tell other ranks not to wait for this one.

        The disk that refused the save may refuse that too: then they wait their time.
        """
        rank = self.plan.rank
        try:
            for name in (manifest_name(rank), shard_name(rank)):
                remove_file(folder / name)
            if self.plan.world_size > 1:
                write_file(folder / f"failed-{rank:05d}", [repr(error)[:1000].encode()])
            else:
                remove_folder(self.plan.folder)
        except OSError:
            return

    def _await(self, happened: Callable[[], bool], trouble: str) -> None:
        folder = self.plan.folder.path
        until = time.monotonic() + self.wait_seconds
        hurries = False
        while not happened():
            if not hurries and self.in_a_hurry.is_set():
                hurries, until = True, min(until, time.monotonic() + HURRY_SECONDS)
            failed = sorted(path.name for path in folder.glob("failed-*"))
            if failed:
                raise SaveFailed(
                    f"{folder.name} was not committed: rank {int(failed[0][7:])} failed"
                )
            if not folder.exists():
                raise SaveFailed(f"{folder} was removed while it was being written")
            if time.monotonic() > until:
                raise SaveFailed(
                    f"{folder.name} was not committed: {trouble} in time; "
                    "is it alive, and do all ranks write to the same disk?"
                )
            time.sleep(POLL_SECONDS)


class Writer:
    """Writes one save at a time, in a thread; training never waits for it and never dies of it.

    The thread lives as long as its save, so that nothing is left behind by a writer that nobody
    closed.

    Attributes:
        finished: jobs that ended, with the exception if they failed; emptied by who reads it.
    """

    def __init__(self) -> None:
        self.finished: queue.SimpleQueue[tuple[Job, Exception | None]] = queue.SimpleQueue()
        self._job: Job | None = None
        self._step = -1
        self._idle = threading.Event()
        self._idle.set()
        self._in_a_hurry = threading.Event()
        self._thread: threading.Thread | None = None
        atexit.register(_wait_at_exit, weakref.ref(self))

    @property
    def is_busy(self) -> bool:
        """Whether a save is being written."""
        return not self._idle.is_set()

    @property
    def step(self) -> int | None:
        """The step that is being saved; None if nothing is being written."""
        return None if self._idle.is_set() else self._step

    def submit(self, job: Job) -> None:
        """Have a job written; there must be none.

        Raises:
            SaveFailed: there is one.
        """
        if self.is_busy:
            raise SaveFailed("the save before is still being written")
        self._in_a_hurry.clear()
        job.in_a_hurry = self._in_a_hurry
        self._job, self._step = job, job.plan.step
        self._thread = threading.Thread(target=self._work, name="heal-writer", daemon=True)
        self._idle.clear()
        try:
            self._thread.start()
        except RuntimeError as error:  # no more threads: this save fails, and the next may not
            self._job = None
            self._idle.set()
            raise SaveFailed(f"step {job.plan.step} was not saved: {error}") from error

    def hurry(self) -> None:
        """Wait for other ranks no longer than a moment, from now on: this process is at its end."""
        self._in_a_hurry.set()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until nothing is being written; False if it still is after so many seconds."""
        return self._idle.wait(seconds)

    def close(self) -> None:
        """Finish what was begun and end the thread."""
        self.wait()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _work(self) -> None:
        job, self._job = self._job, None
        assert job is not None
        try:
            job.run()
        except Exception as error:
            self.finished.put((job, error))
        else:
            self.finished.put((job, None))
        finally:
            del job  # it holds the copies
            self._idle.set()


def _wait_at_exit(reference: "weakref.ref[Writer]") -> None:
    writer = reference()
    if writer is None:
        return
    if getattr(sys, "last_type", None) is not None:
        writer.hurry()  # an error ends this process, perhaps because another has died
    writer.wait()
