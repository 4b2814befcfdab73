"""Notices that training has stopped moving, and reports where every rank is and which is missing.

Every rank has a watchdog thread. The watchdogs share how far their ranks are through the store of
the process group, which works while training hangs.
"""

import faulthandler
import json
import os
import re
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from heal.cluster.launch import own_store, wait_for
from heal.json_lines import now

STORE_SECONDS = 3.0  # a store that takes longer to answer is taken for dead
LOOKS_PER_TIMEOUT = 20
SHORTEST_LOOK, LONGEST_LOOK = 0.05, 5.0  # seconds between two looks at the clock
LOOKS_TO_JUDGE = 3  # a watchdog that lives has counted on by then

WAITING = (
    "torch/distributed/",
    "torch/autograd/graph.py",
    "torch/nn/parallel/",
    "torch/cuda/",
    "heal/cluster/",
    "zclip/mailbox.py",
)
"""Files in which a rank waits for others, or for its device."""


class CallsWithTimeout:
    """Makes calls that may never return, such as to a store whose host has died."""

    def __init__(self) -> None:
        self._last: threading.Thread | None = None

    @property
    def silent(self) -> bool:
        """Whether the last call has not come back; until it does, no other is made."""
        return self._last is not None and self._last.is_alive()

    def ask(self, call: Callable[[], Any], otherwise: Any = None) -> Any:
        """Return the answer; ``otherwise`` if there is none in time, or the call failed."""
        answers = []

        def answer() -> None:
            with suppress(Exception):  # a store whose host is gone raises many kinds
                answers.append(call())

        if not self.silent:
            self._last = threading.Thread(target=answer, name="heal-store", daemon=True)
            self._last.start()
            self._last.join(STORE_SECONDS)
        return answers[0] if answers else otherwise


@dataclass(frozen=True, slots=True)
class Standing:
    """One rank, as its watchdog last reported."""

    rank: int
    step: int = -1  # of its last beat; -1 before the first
    count: int = -1  # of its watchdog's looks at the clock: if it stands still, so does the process
    at: str = ""  # the innermost line of its main thread; "" if it never reported
    waits: bool = False  # whether that line waits for other ranks or for the device
    stopped: bool = False  # whether the count stood still while others counted on

    def __str__(self) -> str:
        if not self.at:
            return f"rank {self.rank}: never reported"
        state = "does not run (stopped or dead)" if self.stopped else "runs"
        return f"rank {self.rank}: {state}, step {self.step}, at {self.at}"


class ProgressBoard:
    """One entry per rank in a shared store, None for a single process, and an alarm.

    The store may live on the very rank that hangs: then a watchdog has what it knows itself.
    """

    def __init__(self, store: Any, rank: int, world_size: int) -> None:
        self._store = store
        self._size = world_size
        self._own = Standing(rank)
        self._calls = CallsWithTimeout()

    def post(self, step: int, thread: int) -> str | None:
        """Write our entry; return the alarm of another rank, None if there is none."""
        at, waits = where_is(thread)
        self._own = replace(self._own, step=step, at=at, waits=waits)
        return self.count_on()

    def count_on(self) -> str | None:
        """Show that this process runs; the rest of the entry stays as it was."""
        self._own = replace(self._own, count=self._own.count + 1)
        entry = json.dumps(asdict(self._own))

        def exchange() -> str | None:
            self._store.set(_key(self._own.rank), entry)
            has_alarm = self._store.check([_key("call")])
            return bytes(self._store.get(_key("call"))).decode() if has_alarm else None

        alarm: str | None = self._ask(exchange)
        return alarm

    def raise_alarm(self, alarm: str) -> str:
        """Alarm all ranks; return the alarm that was first."""
        first: str = self._ask(
            lambda: bytes(self._store.compare_set(_key("call"), "", alarm)).decode(), alarm
        )
        return first

    def read(self) -> list[Standing]:
        """Return the entries of all ranks; only ours where the store does not answer."""

        def read_one(rank: int) -> Standing:
            known = self._store.check([_key(rank)])
            return Standing(**json.loads(self._store.get(_key(rank)))) if known else Standing(rank)

        ranks = range(self._size)
        unknown = [Standing(rank) for rank in ranks]
        standings: list[Standing] = self._ask(lambda: [read_one(rank) for rank in ranks], unknown)
        standings[self._own.rank] = self._own
        return standings

    def silent_host(self) -> int | None:
        """Return the rank that hosts the store, if the store does not answer; None if it does."""
        is_hosted_by_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        return 0 if self._calls.silent and not is_hosted_by_launcher else None

    def leave(self, others: Sequence[int]) -> None:
        """Wait until all ``others`` have read too: the store may end with this process."""
        keys = [_key(f"left/{rank}") for rank in others]
        self._ask(lambda: self._store.set(_key(f"left/{self._own.rank}"), ""))
        wait_for(lambda: bool(self._ask(lambda: self._store.check(keys), True)), STORE_SECONDS)

    def _ask(self, call: Callable[[], Any], otherwise: Any = None) -> Any:
        return otherwise if self._store is None else self._calls.ask(call, otherwise)


def _key(name: int | str) -> str:
    return f"heal/watchdog/{name}"


def find_suspects(
    earlier: Sequence[Standing], later: Sequence[Standing]
) -> tuple[tuple[Standing, ...], tuple[int, ...]]:
    """Return where each rank is, and which ranks the others wait for.

    In this order: ranks whose process stands still; ranks at an earlier step than the furthest;
    ranks whose main thread does not wait while that of another does. Ranks that all look alike are
    not suspected.
    """
    standings = [
        replace(after, stopped=after.count == before.count)
        for before, after in zip(earlier, later, strict=True)
    ]
    furthest = max(s.step for s in standings)
    for suspects in (
        [s.rank for s in standings if s.stopped],
        [s.rank for s in standings if s.step < furthest],
        [s.rank for s in standings if not s.waits],
    ):
        if 0 < len(suspects) < len(standings):
            return tuple(standings), tuple(suspects)
    return tuple(standings), ()


UNREADABLE = "a place that cannot be read"
MORE_THREADS = "\n...\n"  # faulthandler stops at a hundred threads
_THREAD = re.compile(r"hread (?P<ident>0x[0-9a-f]+)")  # also "Current thread"
_LINE = re.compile(r'  File "(?P<file>.*)", line (?P<line>\S+) in (?P<name>.*)')


def where_is(thread: int) -> tuple[str, bool]:
    """Return the innermost line of a thread that is not torch's, and whether it waits."""
    try:
        with tempfile.TemporaryFile() as file:
            faulthandler.dump_traceback(file, all_threads=True)
            file.seek(0)
            dump = file.read().decode("ascii", "replace")
    except OSError:
        return UNREADABLE, False
    stack = _stack_of(thread, dump)
    if stack is None and not dump.endswith(MORE_THREADS):
        return "the end of the thread", False
    if not stack:
        return UNREADABLE, False
    files = [line["file"].replace("\\", "/") for line in stack]
    waits = any(place in files[0] for place in WAITING)
    ours = [line for line, file in zip(stack, files, strict=True) if "/torch/" not in file] or stack
    return f"{ours[0]['file']}:{ours[0]['line']} in {ours[0]['name']}", waits


def _stack_of(thread: int, dump: str) -> list[re.Match[str]] | None:
    """Return the lines of a thread in what faulthandler wrote, innermost first; None if none."""
    for block in dump.split("\n\n"):
        head, *lines = block.strip().splitlines() or [""]
        known = _THREAD.search(head)
        if known is not None and int(known["ident"], 16) == thread:
            return [found for found in map(_LINE.match, lines) if found is not None]
    return None


def dump_stacks(run_dir: str | os.PathLike[str] | None, why: str, rank: int | None = None) -> str:
    """Append the Python stacks of all threads to ``<run_dir>/<why>.rank<r>.txt``; never raises.

    Without a ``run_dir`` they go to standard error. The rank is the environment's ``RANK`` if None.
    Returns the path of the file, or "standard error".
    """
    if run_dir is not None:
        rank = rank if rank is not None else int(os.environ.get("RANK", "0") or 0)
        path = Path(run_dir) / f"{why}.rank{rank}.txt"
        head = f"{now()} rank {rank} pid {os.getpid()}: {why}"
        if _append(path, head, faulthandler.dump_traceback):
            return str(path)
    try:
        faulthandler.dump_traceback(sys.__stderr__ or 2, all_threads=True)
    except (OSError, ValueError):
        return "nowhere"  # standard error was closed
    return "standard error"


def _append(path: Path, line: str, add: Callable[[Any], object] = lambda file: None) -> bool:
    """Append a line, and what ``add`` writes; report a failure and return False."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "a", encoding="utf-8") as file:
            print(line, file=file, flush=True)
            add(file)
    except OSError as error:
        print(f"heal: cannot write {path}: {error}", file=sys.stderr)
        return False
    return True


@dataclass(frozen=True, slots=True)
class HangReport:
    """What is known about a hang.

    Attributes:
        seconds: without progress on the rank that noticed first.
        noticed_by: that rank.
        standings: where each rank is.
        suspects: the ranks that the others wait for; empty if all look alike.
    """

    seconds: float
    noticed_by: int
    standings: tuple[Standing, ...]
    suspects: tuple[int, ...]

    def __str__(self) -> str:
        missing = (
            f"rank {', '.join(map(str, self.suspects))} did not arrive"
            if self.suspects
            else "every rank waits, and none differs from the others"
        )
        head = f"no progress for {self.seconds:.1f} s, noticed by rank {self.noticed_by}: {missing}"
        return "\n".join([head, *(f"  {standing}" for standing in self.standings)])


class HangWatchdog:
    """A daemon thread that expects a ``beat`` of the training loop every so often.

    Without one it dumps the stacks of all threads, alarms the watchdogs of the other ranks to do
    the same, finds out which ranks did not arrive, and, if asked, ends the process. Time in which
    the whole process was stopped does not count. A thread that holds Python's lock for ever
    silences the watchdog of its rank; those of the others then name it.

    Args:
        timeout_seconds: without a ``beat``, from the first one on.
        run_dir: where ``hang.rank<r>.txt`` goes; standard error if None.
        rank: of this process.
        world_size: how many ranks there are.
        store: of torch.distributed, shared by the ranks; None if there is one rank, or each is to
            watch itself alone.
        exit_code: with which to end the process, say ``ExitCode.HUNG``; None lets it hang on.
        on_hang: called with the report, in the watchdog's thread, before the process ends.

    Attributes:
        report: the hang that was noticed; None if none was.

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
            raise ValueError(f"timeout_seconds: expected more than 0, got {timeout_seconds!r}")
        self.report: HangReport | None = None
        self._timeout = timeout_seconds
        self._look = min(max(timeout_seconds / LOOKS_PER_TIMEOUT, SHORTEST_LOOK), LONGEST_LOOK)
        self._run_dir = run_dir
        self._rank = rank
        self._exit_code = exit_code
        self._on_hang = on_hang
        self._board = ProgressBoard(store, rank, 1 if store is None else world_size)
        self._beats = 0
        self._step = -1
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._main = threading.get_ident()

    @classmethod
    def for_group(cls, timeout_seconds: float, **arguments: Any) -> "HangWatchdog":
        """Return a watchdog that uses the store of the default process group, if there is one."""
        import torch.distributed as dist

        if dist.is_available() and dist.is_initialized():
            arguments |= {"rank": dist.get_rank(), "world_size": dist.get_world_size()}
            arguments["store"] = own_store()
        return cls(timeout_seconds, **arguments)

    def beat(self, step: int) -> None:
        """Report that training moves; costs two assignments."""
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

    def __enter__(self) -> "HangWatchdog":
        self.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self.stop()

    def _watch(self) -> None:
        seen, idle, last = 0, 0.0, time.monotonic()
        self._board.post(self._step, self._main)
        while not self._stop.wait(self._look):
            # A process that was stopped as a whole could not beat; that time does not count.
            passed = min(time.monotonic() - last, 2 * self._look)
            last = time.monotonic()
            idle = idle + passed if self._beats == seen and seen else 0.0
            seen = self._beats
            alarm = self._board.post(self._step, self._main)
            if idle >= self._timeout or alarm is not None:
                self._handle_hang(idle, alarm)
                return

    def _handle_hang(self, idle: float, alarm: str | None) -> None:
        """Dump first: whatever else fails, the stacks are on disk."""
        where = dump_stacks(self._run_dir, "hang", self._rank)
        own = json.dumps({"rank": self._rank, "seconds": idle})
        first = json.loads(alarm or self._board.raise_alarm(own))
        earlier = self._board.read()
        for _ in range(LOOKS_TO_JUDGE):
            time.sleep(self._look)
            self._board.count_on()
        standings, suspects = find_suspects(earlier, self._board.read())
        host = self._board.silent_host()
        suspects = suspects if host is None else (host,)
        self.report = HangReport(first["seconds"], first["rank"], standings, suspects)
        text = f"heal: {self.report}\n  stacks of rank {self._rank}: {where}"
        print(text, file=sys.stderr, flush=True)
        if self._run_dir is not None:
            _append(Path(self._run_dir) / f"hang.rank{self._rank}.txt", str(self.report))
        self._board.leave([s.rank for s in standings if not s.stopped])
        if self._on_hang is not None:
            try:
                self._on_hang(self.report)
            except Exception as error:
                print(f"heal: on_hang failed: {error!r}", file=sys.stderr, flush=True)
        if self._exit_code is not None:
            os._exit(int(self._exit_code))


LEFT = "heal/left"
"""Key of the message of a rank that left, for ranks that only notice that it is gone."""


def leave_message(rank: int, reason: str, exit_code: int) -> None:
    """Leave a message in the store of the default group; the first one counts."""
    message = json.dumps({"rank": rank, "reason": reason, "exit_code": int(exit_code)})
    CallsWithTimeout().ask(lambda: own_store().compare_set(LEFT, "", message))


def last_message() -> dict[str, Any] | None:
    """Return the message of the rank that left first; None if there is none."""

    def look() -> dict[str, Any] | None:
        store = own_store()
        message = json.loads(bytes(store.get(LEFT))) if store.check([LEFT]) else None
        return message if isinstance(message, dict) else None

    found: dict[str, Any] | None = CallsWithTimeout().ask(look)
    return found
