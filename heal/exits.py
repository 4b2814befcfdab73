"""How a run ends: whatever the way, a postmortem is left behind."""

import atexit
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from heal.actions import CannotHeal
from heal.cluster.shutdown import ShutdownHandler
from heal.exit_codes import ExitCode
from heal.journal import Journal

if TYPE_CHECKING:
    from heal.loop import Healer

SIGNALS = ("SIGTERM", "SIGUSR1")  # what schedulers send before they kill


class Exits:
    """Writes one postmortem: at the end of ``run`` or ``with``, on a halt, or when Python exits.

    Args:
        healer: asked for the last step and metrics; not kept alive.
        journal: where the postmortem goes.
        clock: seconds.
    """

    def __init__(self, healer: "Healer", journal: Journal, clock: Callable[[], float]) -> None:
        self._healer = weakref.ref(healer)
        self._journal = journal
        self._clock = clock
        self._began = clock()
        self._closed = False
        self._shutdown: ShutdownHandler | None = None
        atexit.register(_close_at_exit, weakref.ref(self))

    def catch_signals(self) -> None:
        """Stop all ranks after a step when one is told to; see :class:`ShutdownHandler`."""
        self._closed = False
        healer = self._healer()
        if healer is None or threading.current_thread() is not threading.main_thread():
            return
        if self._shutdown is None:
            self._shutdown = ShutdownHandler(
                healer,
                shutdown_timeout_sec=healer.config.shutdown_timeout_sec,
                signals=SIGNALS,
                run_dir=self._journal.run_dir,
            )
            self._shutdown.install()

    def close(self, error: BaseException | None = None) -> None:
        """Write the postmortem, once, and give the signals back; then no deadline runs any more."""
        shutdown = self._release_signals()
        if not self._closed:
            self._closed = True
            self._write(error)
        if shutdown is not None:
            shutdown.finish()

    def _write(self, error: BaseException | None) -> None:
        healer = self._healer()
        if healer is None:
            return
        sudden = isinstance(error, Exception) and not isinstance(error, CannotHeal)
        healer.hear_the_rest(hurries=sudden)
        self._journal.postmortem(
            exception=error,
            exit_code=_exit_code(error),
            last_step=healer.last_step,
            final_metrics=_final_metrics(healer),
            running_time_seconds=self._clock() - self._began,
        )
        self._journal.close()

    def dismiss(self) -> None:
        """Write no postmortem: this run is watched, not trained, by its healer."""
        self._closed = True

    @contextmanager
    def halting(self) -> Iterator[None]:
        """Leave the postmortem before a halt reaches the caller."""
        try:
            yield
        except CannotHeal as halt:
            self.close(halt)
            raise

    def at_exit(self) -> None:
        """Close a run that nobody closed; an exception nobody caught is in ``sys``."""
        self.close(getattr(sys, "last_exc", None) or getattr(sys, "last_value", None))

    def _release_signals(self) -> ShutdownHandler | None:
        shutdown, self._shutdown = self._shutdown, None
        if shutdown is not None and threading.current_thread() is threading.main_thread():
            shutdown.restore()
            return shutdown
        return None


def _close_at_exit(reference: "weakref.ref[Exits]") -> None:
    exits = reference()
    if exits is not None:
        exits.at_exit()


def _exit_code(error: BaseException | None) -> int:
    if error is None:
        return int(ExitCode.OK)
    if isinstance(error, CannotHeal):
        return error.exit_code
    if isinstance(error, KeyboardInterrupt):
        return 128 + int(signal.SIGINT)
    if isinstance(error, SystemExit) and isinstance(error.code, int):
        return error.code
    return 1


def _final_metrics(healer: "Healer") -> dict[str, float]:
    latest = healer.latest
    seen = {} if latest is None else {"loss": latest.loss, "grad_norm": latest.norm}
    return {**seen, **healer.metrics()}
