"""The thread that ends a process which was told to stop and does not."""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection

from heal.cluster.stacks import dump_stacks
from heal.exit_codes import ExitCode

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
            raise ValueError(f"shutdown_timeout_sec is {seconds!r}; wanted 0 (never) or more")
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
