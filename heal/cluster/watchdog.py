"""Notices that training has stopped moving, and says where every rank is and who did not come."""

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from heal.cluster.progress_board import ProgressBoard, Standing, blame
from heal.cluster.stacks import dump_stacks

LOOKS_PER_TIMEOUT = 20
SHORTEST_LOOK, LONGEST_LOOK = 0.05, 5.0  # seconds between two looks at the clock
LOOKS_TO_JUDGE = 3  # a watchdog that lives has counted on by then


@dataclass(frozen=True, slots=True)
class HangReport:
    """What is known about a hang.

    Attributes:
        seconds: without progress on the rank that noticed first.
        noticed_by: that rank.
        standings: where each rank is.
        suspects: the ranks that the others wait for; empty if nothing tells them apart.
    """

    seconds: float
    noticed_by: int
    standings: tuple[Standing, ...]
    suspects: tuple[int, ...]

    def __str__(self) -> str:
        whom = (
            f"rank {', '.join(map(str, self.suspects))} did not arrive"
            if self.suspects
            else "every rank waits, and nothing tells who for"
        )
        lines = [f"no progress for {self.seconds:.1f} s, noticed by rank {self.noticed_by}: {whom}"]
        return "\n".join([*lines, *(f"  {standing}" for standing in self.standings)])


class HangWatchdog:
    """A daemon thread that wants to hear from the training loop every so often.

    When it does not, it dumps the stacks of all threads, tells the watchdogs of the other ranks to
    do the same, finds out which ranks did not arrive, and, if asked, ends the process. Time in
    which the whole process was stopped does not count against it. A thread that holds Python's lock
    for ever silences the watchdog of its rank; those of the others then name it.

    Args:
        timeout_seconds: without a ``beat``, from the first one on.
        run_dir: where ``hang.rank<r>.txt`` goes; standard error if None.
        rank: of this process.
        world_size: how many ranks there are.
        store: of torch.distributed, for the talk among ranks; None if there is one rank, or each is
            to watch itself alone.
        exit_code: with which to end the process, say ``ExitCode.HUNG``; None lets it hang on.
        on_hang: called with the report, in the watchdog's thread, before the process ends.

    Raises:
        ValueError: the timeout is not positive.

    Example:
        >>> with HangWatchdog.for_group(600.0, run_dir="run", exit_code=ExitCode.HUNG) as watchdog:
        ...     for step, batch in enumerate(loader):
        ...         watchdog.beat(step)
        ...         train(batch)
    """

    def __init__(
        self,
        timeout_seconds: float,
        *,
        run_dir: str | os.PathLike[str] | None = None,
        rank: int = 0,
        world_size: int = 1,
        store: Any = None,
        exit_code: int | None = None,
        on_hang: Callable[[HangReport], object] | None = None,
    ) -> None:
        if not timeout_seconds > 0:
            raise ValueError(f"timeout_seconds is {timeout_seconds!r}; wanted more than 0")
        self.report: HangReport | None = None
        self._timeout = timeout_seconds
        self._look = min(max(timeout_seconds / LOOKS_PER_TIMEOUT, SHORTEST_LOOK), LONGEST_LOOK)
        self._run_dir = run_dir
        self._rank = rank
        self._exit_code = exit_code
        self._on_hang = on_hang
        hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        self._board = ProgressBoard(store, rank, world_size if store is not None else 1, hosted)
        self._beats = 0
        self._step = -1
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._main = threading.get_ident()

    @classmethod
    def for_group(cls, timeout_seconds: float, **arguments: Any) -> "HangWatchdog":
        """Return a watchdog that talks through the store of the default process group, if any."""
        import torch.distributed as dist

        from heal.cluster.side_group import own_store

        if dist.is_available() and dist.is_initialized():
            arguments |= {"rank": dist.get_rank(), "world_size": dist.get_world_size()}
            arguments["store"] = own_store()
        return cls(timeout_seconds, **arguments)

    def beat(self, step: int) -> None:
        """Say that training moves; costs two assignments."""
        self._step = step
        self._beats += 1

    def start(self) -> None:
        """Begin to watch; ``with`` does it for you. The clock starts with the first beat."""
        self._main = threading.get_ident()
        self._stop.clear()
        self._thread = threading.Thread(target=self._watch, name="heal-watchdog", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the watch."""
        self._stop.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(LOOKS_TO_JUDGE * LONGEST_LOOK)
        self._thread = None
        self._board.close()

    def __enter__(self) -> "HangWatchdog":
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def _watch(self) -> None:
        seen, idle, last = 0, 0.0, time.monotonic()
        self._board.post(self._step, self._main)
        while not self._stop.wait(self._look):
            now = time.monotonic()
            # A process that was stopped as a whole could not beat; that time does not count.
            passed, last = min(now - last, 2 * self._look), now
            idle = idle + passed if self._beats == seen and seen else 0.0
            seen = self._beats
            called = self._board.post(self._step, self._main)
            if idle >= self._timeout or called is not None:
                self._tell(idle, called)
                return

    def _tell(self, idle: float, called: str | None) -> None:
        """Dump first: whatever else fails, the stacks are on disk."""
        where = dump_stacks(self._run_dir, "hang", self._rank)
        if called is None:
            called = self._board.call(json.dumps({"rank": self._rank, "seconds": idle}))
        first = json.loads(called)
        earlier = self._board.read()
        for _ in range(LOOKS_TO_JUDGE):
            time.sleep(self._look)
            self._board.count_on()
        standings, suspects = blame(earlier, self._board.read())
        host = self._board.silent_host()
        suspects = suspects if host is None else (host,)
        self.report = HangReport(first["seconds"], first["rank"], standings, suspects)
        print(f"heal: {self.report}\n  stacks of rank {self._rank}: {where}", file=sys.stderr)
        sys.stderr.flush()
        self._write_report()
        self._board.leave([s.rank for s in standings if not s.stopped])
        if self._on_hang is not None:
            try:
                self._on_hang(self.report)
            except Exception as error:
                print(f"heal: on_hang failed: {error!r}", file=sys.stderr, flush=True)
        if self._exit_code is not None:
            os._exit(int(self._exit_code))

    def _write_report(self) -> None:
        if self._run_dir is None:
            return
        try:
            path = os.path.join(self._run_dir, f"hang.rank{self._rank}.txt")
            with open(path, "a", encoding="utf-8") as file:
                file.write(f"{self.report}\n")
        except OSError as error:
            print(f"heal: cannot write {path}: {error}", file=sys.stderr)
