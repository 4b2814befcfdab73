"""Stopping on a signal: every rank after the same step, with an exit code of its own.

A main thread that is stuck in a collective runs no Python handler. So a thread reads signals from
the pipe of ``signal.set_wakeup_fd``, and enforces deadline and second signal.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from heal.cluster.launch import has_peers, side_group, wait_for
from heal.cluster.watchdog import dump_stacks
from heal.exit_codes import ExitCode

SIGNALS = ("SIGTERM", "SIGUSR1", "SIGINT")
SHUTDOWN_TIMEOUT_SEC = 600.0
SIGNAL_BASE = 128  # a shell's code for "ended by signal n" is this plus n

ECHO_SECONDS = 1.0
"""A scheduler signals a job, and torchrun its workers: within this time another signal is taken
for an echo of the first."""

LAST_SECONDS = 5.0
"""Limit of ``before_exit``: a disk that hangs must not keep the process alive."""

CLOSE_SECONDS = 1.0
"""How long a message under way is waited for at the end: its peers may be gone already."""

STOP = 0  # no signal has this number: the byte that ends the thread


class Agreement:
    """Whether any rank says yes, by an all-reduce over gloo that no rank or device waits for.

    All ranks of the group call :meth:`any` equally often.
    """

    def __init__(self, group: "dist.ProcessGroup | None" = None) -> None:
        self._group = group
        self._under_way: tuple[Any, Tensor] | None = None

    def any(self, vote: bool, wait: bool = False) -> bool:
        """Send the vote of this rank; return the result of the call before, or of this one."""
        if not has_peers(self._group):
            return vote
        if not wait and self._collect():
            return True  # on every rank, so that none starts a message that others miss
        votes = torch.full((1,), int(vote), dtype=torch.int32)
        group = side_group(self._group)
        work = dist.all_reduce(votes, dist.ReduceOp.MAX, group=group, async_op=True)
        earlier = self._collect() if wait else False
        self._under_way = work, votes
        return (self._collect() or earlier) if wait else False

    def close(self) -> None:
        """Wait a second for what is under way: a thread must not write to memory that is gone."""
        if self._under_way is not None:
            wait_for(self._under_way[0].is_completed, CLOSE_SECONDS)
        self._under_way = None

    def _collect(self) -> bool:
        if self._under_way is None:
            return False
        (work, votes), self._under_way = self._under_way, None
        work.wait()
        return bool(votes.item())


class ShutdownHandler:
    """Turns a signal to any rank into one agreed stop of all.

    The handler sets a flag and nothing else. ``should_stop`` shares it with all ranks, in the same
    call on each: with a healer the flag also rides in the record of the next step, and ``step``
    raises on every rank after the same step. A second signal (a second after the first or later;
    what comes sooner is an echo) ends the process at once, even where the main thread hangs.

    Deadline and second signal end only code inside the block. A process that leaves it and goes on
    (an upload, an evaluation, a notebook) runs as long as it likes.

    Args:
        healer: whose ``request_stop`` is called on a signal; None in a loop without one.
        group: the ranks that stop together; all of them if None.
        shutdown_timeout_sec: seconds from the signal (or from the poll that reports it) after which
            the process dumps its stacks and exits with ``SHUTDOWN_TIMEOUT``; 0: never.
        signals: names of the signals to catch; those that the system lacks are left out.
        run_dir: where the stacks go; standard error if None.
        before_exit: called with the exit code before a second signal or the deadline ends the
            process; from another thread, and for a few seconds at most.

    Raises:
        ValueError: the timeout is negative, or a name is no signal.

    Example:
        >>> with ShutdownHandler() as shutdown:
        ...     for step, batch in enumerate(loader):
        ...         train(batch)
        ...         if shutdown.should_stop():
        ...             save(step)
        ...             shutdown.exit()
    """

    def __init__(
        self,
        healer: Any = None,
        *,
        group: "dist.ProcessGroup | None" = None,
        shutdown_timeout_sec: float = SHUTDOWN_TIMEOUT_SEC,
        signals: Iterable[str] = SIGNALS,
        run_dir: str | os.PathLike[str] | None = None,
        before_exit: Callable[[int], object] | None = None,
    ) -> None:
        if not 0 <= shutdown_timeout_sec < float("inf"):
            expected = "shutdown_timeout_sec: expected 0 (never) or more"
            raise ValueError(f"{expected}, got {shutdown_timeout_sec!r}")
        self.numbers = _numbers(signals)
        self._healer = healer
        self._seconds = shutdown_timeout_sec
        self._run_dir = run_dir
        self._before_exit = before_exit
        self._agreement = Agreement(group)
        self._asked = 0
        self._agreed = False
        self._first_seen: float | None = None  # when the thread read the first signal
        self._is_over = threading.Event()  # then neither deadline nor second signal counts
        self._is_armed = False
        self._lock = threading.Lock()

    @property
    def signal(self) -> int:
        """The first signal that this rank was sent, 0 if none; other ranks may know more."""
        return self._asked

    def request_stop(self) -> None:
        """Stop as on a signal, when a scheduler asks by other means."""
        self.note(signal.SIGTERM)
        self._arm()

    def should_stop(self, wait: bool = False) -> bool:
        """Return whether to stop, the same answer on every rank: all have to call it alike.

        It starts a tiny all-reduce on a group of its own and answers by the one of the call before,
        which has long arrived. Poll it in every loop that may last: training, evaluation, warm-up.

        Args:
            wait: answer by the all-reduce of this very call, which waits for the slowest rank.
        """
        if not self._agreed:
            self._agreed = self._agreement.any(bool(self._asked), wait)
            if self._agreed:
                self._arm()
        return self._agreed

    def exit(self, code: int = ExitCode.PREEMPTED) -> NoReturn:
        """Leave with a code that says "run me again"; the deadline runs until the block is left."""
        raise SystemExit(int(code))

    def install(self) -> None:
        """Catch the signals; ``with`` does it for you.

        Raises:
            RuntimeError: not in the main thread, the only one that may.
        """
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError(
                f"ShutdownHandler was entered in thread {threading.current_thread().name!r}; "
                "Python lets only the main thread catch signals: enter it there"
            )
        self._first_seen, self._is_armed, self._is_over = None, False, threading.Event()
        _Listener.current().add(self)

    def restore(self) -> None:
        """Give the signals back, and let the deadline run: the process still has to save."""
        _Listener.current().remove(self)
        self._agreement.close()

    def finish(self) -> None:
        """Give the signals back and stop the clock: what comes next may take its time."""
        self.restore()
        self._is_over.set()

    def __enter__(self) -> "ShutdownHandler":
        self.install()
        return self

    def __exit__(self, *raised: object) -> None:
        self.finish()

    def note(self, number: int) -> None:
        """Remember a signal: no lock, no file, no message, because a signal handler calls this."""
        self._asked = self._asked or number
        if self._healer is not None:
            self._healer.request_stop()

    def count(self, number: int) -> None:
        """Start the clock at the first signal, end the process at the second; not in a handler."""
        if self._is_over.is_set():
            return  # the block was left before this byte was read
        if self._first_seen is None:
            self._first_seen = time.monotonic()
            self._arm()
        elif time.monotonic() - self._first_seen > ECHO_SECONDS:
            self._end_process(SIGNAL_BASE + number)

    def _arm(self) -> None:
        with self._lock:
            if self._is_armed or not self._seconds:
                return
            self._is_armed = True
        threading.Thread(
            target=self._expire, args=(self._is_over,), name="heal-deadline", daemon=True
        ).start()

    def _expire(self, is_over: threading.Event) -> None:
        if is_over.wait(self._seconds):
            return
        code = int(ExitCode.SHUTDOWN_TIMEOUT)
        print(
            f"heal: asked to stop {self._seconds:g} s ago and still here; exiting with code {code}",
            file=sys.stderr,
            flush=True,
        )
        dump_stacks(self._run_dir, "shutdown")
        self._end_process(code)

    def _end_process(self, code: int) -> None:
        if self._before_exit is not None:
            last = threading.Thread(
                target=self._before_exit, args=(code,), name="heal-last-words", daemon=True
            )
            last.start()
            last.join(LAST_SECONDS)
        os._exit(code)  # not sys.exit: a clean exit is what did not happen


class _Listener:
    """What all handlers of the process share: one signal handler per signal, a pipe, a thread.

    It exists from the first ``install`` to the last ``restore``, in whatever order handlers go.
    Handlers and wake-up descriptors that were set before are called too, and put back.
    """

    _current: "_Listener | None" = None

    def __init__(self) -> None:
        self._handlers: list[ShutdownHandler] = []
        self._set: dict[int, tuple[Any, Any]] = {}  # by signal: our handler and that from before
        self._pipe: tuple[int, int] | None = None
        self._earlier = -1  # the wake-up descriptor from before

    @classmethod
    def current(cls) -> "_Listener":
        if cls._current is None:
            cls._current = cls()
        return cls._current

    def add(self, handler: ShutdownHandler) -> None:
        if handler not in self._handlers:
            self._handlers.append(handler)
        for number in handler.numbers:
            if number not in self._set:
                self._take(number)
        if self._pipe is None:
            self._listen()

    def remove(self, handler: ShutdownHandler) -> None:
        if handler in self._handlers:
            self._handlers.remove(handler)
        for number in [n for n in self._set if not self._wanting(n)]:
            self._give_back(number)
        if not self._handlers:
            self._stop_listening()
            _Listener._current = None

    def forget(self) -> None:
        """In a child that was forked: its signals are its own, and the pipe is its parent's."""
        self._handlers.clear()
        for number in list(self._set):
            self._give_back(number)
        if self._pipe is not None:
            reader, writer = self._pipe
            current = signal.set_wakeup_fd(-1)
            if current not in (writer, -1):
                signal.set_wakeup_fd(current)
            os.close(writer)
            os.close(reader)

    def _wanting(self, number: int) -> list[ShutdownHandler]:
        return [handler for handler in self._handlers if number in handler.numbers]

    def _take(self, number: int) -> None:
        before = signal.getsignal(number)

        def on_signal(number: int, frame: FrameType | None) -> None:
            """Note it and call the handler from before; without handlers, as if not there.

            Python's own answer to Ctrl-C is left out: it would raise in the middle of a step.
            """
            wanting = self._wanting(number)
            for handler in wanting:
                handler.note(number)
            if callable(before) and not (wanting and before is signal.default_int_handler):
                before(number, frame)
            elif before == signal.SIG_DFL and not wanting:
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)

        self._set[number] = on_signal, before
        signal.signal(number, on_signal)

    def _give_back(self, number: int) -> None:
        ours, before = self._set.pop(number)
        if signal.getsignal(number) is ours:  # else a later handler may call ours, and stays
            signal.signal(number, signal.SIG_DFL if before is None else before)

    def _listen(self) -> None:
        reader, writer = self._pipe = os.pipe()
        os.set_blocking(writer, False)
        self._earlier = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        threading.Thread(
            target=self._read, args=(reader,), name="heal-shutdown", daemon=True
        ).start()

    def _read(self, reader: int) -> None:
        while True:
            for number in os.read(reader, 64) or bytes([STOP]):
                if number == STOP:
                    os.close(reader)
                    return
                if self._earlier != -1:
                    _write_byte(self._earlier, number)  # to an event loop, say
                for handler in self._wanting(number):
                    handler.count(number)

    def _stop_listening(self) -> None:
        if self._pipe is None:
            return
        _, writer = self._pipe
        current = signal.set_wakeup_fd(-1)
        if current not in (writer, -1):
            # A later listener will put our pipe back: it has to stay, to pass on to the earlier.
            signal.set_wakeup_fd(current, warn_on_full_buffer=False)
            return
        if current == writer:
            signal.set_wakeup_fd(self._earlier, warn_on_full_buffer=False)
        _write_byte(writer, STOP)
        os.close(writer)


def _write_byte(descriptor: int, number: int) -> None:
    try:
        os.write(descriptor, bytes([number]))
    except OSError:
        return  # full or closed: its reader has enough to wake up for, or is gone


def _forget_in_child() -> None:
    if _Listener._current is not None:
        _Listener._current.forget()
        _Listener._current = None


if hasattr(os, "register_at_fork"):
    # A worker that ignored SIGTERM would never end, and its signals would reach the parent's pipe.
    os.register_at_fork(after_in_child=_forget_in_child)


def _numbers(names: Iterable[str]) -> list[int]:
    known = []
    for name in names:
        number = getattr(signal, name, None)
        if isinstance(number, signal.Signals):
            known.append(int(number))
        elif name not in SIGNALS:  # Windows lacks some of ours; any other name is a slip
            raise ValueError(f"signals: expected names such as {', '.join(SIGNALS)}, got {name!r}")
    return known
