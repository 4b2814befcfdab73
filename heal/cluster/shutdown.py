"""Stopping because a signal said so: every rank after the same step, with a code of its own.

A handler runs between two bytecodes of the main thread, so that one which is stuck in a collective
never gets to run it. Deadline and second signal therefore belong to a thread that hears of signals
from the C level, through a pipe.
"""

import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterable
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

from heal.cluster.groups import Agreement
from heal.cluster.watchdog import dump_stacks
from heal.exit_codes import ExitCode

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


# The thread that ends a process which was told to stop and does not.


SIGNAL_BASE = 128  # a shell's code for "ended by signal n" is this plus n
SAME_SECONDS = 1.0
"""Schedulers tell a job, torchrun tells its workers, and both tell the same: within this time
another signal is taken for an echo of the first."""

LAST_SECONDS = 5.0
"""For what is written before a process is ended; a disk that hangs must not keep it alive."""

STOP = 0  # no signal has this number: the byte that sends the thread home


class Deadline:
    """Hears of signals even while the main thread cannot, and keeps the time since the first.

    Args:
        seconds: from the first signal, or from ``arm``, to the end of the process; 0: no end.
        run_dir: where the stacks of a process that did not stop go; standard error if None.
        before_exit: called with the exit code before the process is ended, in a thread of its own
            that may take ``LAST_SECONDS``: it may write, and must not wait for the main thread.
        leave: ends the process; ``os._exit``, since a clean exit is what did not happen.

    Raises:
        ValueError: the time is negative or not a number.
    """

    def __init__(
        self,
        seconds: float,
        run_dir: str | os.PathLike[str] | None = None,
        before_exit: Callable[[int], object] | None = None,
        leave: Callable[[int], object] = os._exit,
    ) -> None:
        if not 0 <= seconds < float("inf"):
            raise ValueError(f"shutdown_timeout_sec: expected 0 (never) or more, got {seconds!r}")
        self._seconds = seconds
        self._run_dir = run_dir
        self._before_exit = before_exit
        self._leave = leave
        self._armed = False
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._pipe: tuple[int, int] | None = None
        self._earlier_wakeup = -1
        self._only_passes_on = False

    def listen(self, numbers: Collection[int]) -> None:
        """Have the C level of Python tell of signals; in the main thread only."""
        if self._pipe is not None and not self._only_passes_on:
            return
        self._only_passes_on = False
        self._armed, self._over = False, threading.Event()
        self._pipe = os.pipe()
        reader, writer = self._pipe
        os.set_blocking(writer, False)
        self._earlier_wakeup = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        threading.Thread(
            target=self._hear,
            args=(reader, self._earlier_wakeup, frozenset(numbers), self._over),
            name="heal-shutdown",
            daemon=True,
        ).start()

    def stop_listening(self) -> None:
        """Give the wake-up descriptor back to whoever had it."""
        if self._pipe is None:
            return
        _, writer = self._pipe
        current = signal.set_wakeup_fd(-1)
        if current not in (writer, -1):
            # A later listener passes signals on to us, and will put us back: the pipe has to stay.
            signal.set_wakeup_fd(current, warn_on_full_buffer=False)
            self._only_passes_on = True
            _PASSING_ON[writer] = self._earlier_wakeup
            return
        earlier = self._earlier_wakeup
        _end_thread(writer)
        self._pipe = None
        while earlier in _PASSING_ON:
            passing, earlier = earlier, _PASSING_ON.pop(earlier)
            _end_thread(passing)
        if current != -1:
            signal.set_wakeup_fd(earlier, warn_on_full_buffer=False)

    def forget(self) -> None:
        """In a child that was forked: there is no thread here, and the pipe is the parent's."""
        if self._pipe is None:
            return
        reader, writer = self._pipe
        current = signal.set_wakeup_fd(-1)
        if current not in (writer, -1):
            signal.set_wakeup_fd(current)
        os.close(writer)
        os.close(reader)
        self._pipe = None
        _PASSING_ON.pop(writer, None)

    def arm(self) -> None:
        """Start the clock, once."""
        with self._lock:
            if self._armed or not self._seconds:
                return
            self._armed = True
            over = self._over
        threading.Thread(
            target=self._expire, args=(over,), name="heal-deadline", daemon=True
        ).start()

    def disarm(self) -> None:
        """Stop the clock until ``listen`` is called again; a signal ends nothing until then."""
        self._over.set()

    def _hear(
        self, reader: int, earlier: int, numbers: frozenset[int], over: threading.Event
    ) -> None:
        first = 0.0
        while True:
            for number in os.read(reader, 64) or bytes([STOP]):
                if number == STOP:
                    os.close(reader)
                    return
                _pass_on(earlier, number)
                # A byte may be read after the block was left: it must not end what runs then.
                if number not in numbers or self._only_passes_on or over.is_set():
                    continue
                if not first:
                    first = time.monotonic()
                    self.arm()
                elif time.monotonic() - first > SAME_SECONDS:
                    self._end(SIGNAL_BASE + number)

    def _expire(self, over: threading.Event) -> None:
        if over.wait(self._seconds):
            return
        print(
            f"heal: told to stop {self._seconds:g} s ago and still here; exiting with code "
            f"{int(ExitCode.SHUTDOWN_TIMEOUT)}",
            file=sys.stderr,
            flush=True,
        )
        dump_stacks(self._run_dir, "shutdown")
        self._end(int(ExitCode.SHUTDOWN_TIMEOUT))

    def _end(self, code: int) -> None:
        if self._before_exit is not None:
            last = threading.Thread(
                target=self._before_exit, args=(code,), name="heal-last-words", daemon=True
            )
            last.start()
            last.join(LAST_SECONDS)
        self._leave(code)


_PASSING_ON: dict[int, int] = {}
"""Pipes of those that stopped listening while a later one passed signals on to them: the writing
end, and the descriptor from before it."""


def _end_thread(writer: int) -> None:
    os.write(writer, bytes([STOP]))
    os.close(writer)


def _pass_on(descriptor: int, number: int) -> None:
    """Tell whoever listened before us, such as an event loop."""
    if descriptor != -1:
        try:
            os.write(descriptor, bytes([number]))
        except OSError:
            return  # full or closed: the loop has enough to wake up for, or is gone


SIGNALS = ("SIGTERM", "SIGUSR1", "SIGINT")
SHUTDOWN_TIMEOUT_SEC = 600.0


class ShutdownHandler:
    """Turns a signal to any rank into one agreed stop of all.

    The handler sets a flag and nothing else. ``should_stop`` tells all ranks of it, in the same
    call on each: with a healer the flag also rides in the record of the next step, and ``step``
    raises on every rank after the same step. A second signal (a second after the first or later;
    what comes sooner is an echo) ends the process at once, even where the main thread hangs.

    Deadline and second signal end only code inside the block. A process that leaves it and goes on
    (an upload, an evaluation, a notebook) runs as long as it likes.

    Args:
        healer: whose ``request_stop`` is called on a signal; None in a loop without one.
        group: the ranks that stop together; all of them if None.
        shutdown_timeout_sec: seconds from the signal (or from the news of it) after which the
            process dumps its stacks and exits with ``SHUTDOWN_TIMEOUT``; 0: never.
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
        group: "ProcessGroup | None" = None,
        shutdown_timeout_sec: float = SHUTDOWN_TIMEOUT_SEC,
        signals: Iterable[str] = SIGNALS,
        run_dir: str | os.PathLike[str] | None = None,
        before_exit: Callable[[int], object] | None = None,
    ) -> None:
        self._healer = healer
        self._numbers = _numbers(signals)
        self._deadline = Deadline(shutdown_timeout_sec, run_dir, before_exit)
        self._agreement = Agreement(group)
        self._asked = 0
        self._agreed = False
        self._previous: dict[int, Any] = {}
        self._is_released = True

    @property
    def signal(self) -> int:
        """The first signal that this rank was sent, 0 if none; other ranks may know more."""
        return self._asked

    def request_stop(self) -> None:
        """Stop as a signal would have it; for schedulers that ask by other means."""
        self._note(signal.SIGTERM)
        self._deadline.arm()

    def should_stop(self, wait: bool = False) -> bool:
        """Return whether to stop, the same answer on every rank: all have to call it alike.

        It starts a tiny all-reduce on a group of its own and answers by the one of the call before,
        which has long arrived. Poll it in every loop that may last: training, evaluation, warm-up.

        Args:
            wait: answer by the news of this very call, which waits for the slowest rank.
        """
        if not self._agreed:
            self._agreed = self._agreement.any(bool(self._asked), wait)
            if self._agreed:
                self._deadline.arm()
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
        self._is_released = False
        for number in self._numbers:
            if number not in self._previous:
                self._previous[number] = signal.signal(number, self._on_signal)
        self._deadline.listen(self._numbers)
        _INSTALLED.add(self)

    def finish(self) -> None:
        """Give the signals back and stop the clock: what comes next may take its time."""
        self.restore()
        self._deadline.disarm()

    def restore(self) -> None:
        """Give the signals back, and let the deadline run: the process still has to save."""
        self._give_back()
        self._deadline.stop_listening()
        self._agreement.close()
        _INSTALLED.discard(self)

    def leave_to_parent(self) -> None:
        """In a child that was forked: signals are its own affair, and our pipe is its parent's."""
        self._give_back()
        self._deadline.forget()

    def _give_back(self) -> None:
        self._is_released = True
        for number in list(self._previous):
            if signal.getsignal(number) == self._on_signal:
                previous = self._before(number)
                signal.signal(number, previous if previous is not None else signal.SIG_DFL)
                del self._previous[number]
            # Else somebody came after us, who may call us or put us back: see _on_signal.

    def __enter__(self) -> "ShutdownHandler":
        self.install()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.finish()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """Take note, and let the handler from before have its turn: no lock, no file, no message.

        Python's own answer to Ctrl-C is left out: it would raise in the middle of a step. Once the
        signals were given back, it is as if we were not here.
        """
        if self._is_released:
            previous = self._previous.get(number)
            if callable(previous):
                previous(number, frame)
            elif previous == signal.SIG_DFL:
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
            return
        self._note(number)
        previous = self._before(number)
        if _answers(previous):
            previous(number, frame)

    def _before(self, number: int) -> Any:
        """The handler from before, past those of ours that have given their signals back.

        Such a one would let the signal take its course, which is for the newest to decide.
        """
        previous = self._previous.get(number)
        while (ours := _handler_of(previous)) and ours._is_released:
            previous = ours._previous.get(number)
        return previous

    def _note(self, number: int) -> None:
        self._asked = self._asked or number
        if self._healer is not None:
            self._healer.request_stop()


def _answers(handler: Any) -> bool:
    return callable(handler) and handler is not signal.default_int_handler


def _handler_of(handler: Any) -> ShutdownHandler | None:
    """Whose method a handler of signals is; None if it is none of ours."""
    owner = getattr(handler, "__self__", None)
    return owner if isinstance(owner, ShutdownHandler) else None


_INSTALLED: "weakref.WeakSet[ShutdownHandler]" = weakref.WeakSet()


def _leave_all_to_parent() -> None:
    for handler in list(_INSTALLED):
        handler.leave_to_parent()
    _INSTALLED.clear()


if hasattr(os, "register_at_fork"):
    # A worker that ignored SIGTERM would never end, and what it heard, its parent would take for
    # a signal of its own.
    os.register_at_fork(after_in_child=_leave_all_to_parent)


def _numbers(names: Iterable[str]) -> list[int]:
    known = []
    for name in names:
        number = getattr(signal, name, None)
        if isinstance(number, signal.Signals):
            known.append(int(number))
        elif name not in SIGNALS:  # Windows lacks some of ours; any other name is a slip
            raise ValueError(f"signals: expected names such as {', '.join(SIGNALS)}, got {name!r}")
    return known
