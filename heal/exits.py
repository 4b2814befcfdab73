"""How a run ends: whatever the way, a postmortem is left behind."""

import atexit
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any

from heal.actions import CannotHeal
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
        self._previous: dict[int, Any] = {}
        atexit.register(_close_at_exit, weakref.ref(self))

    def catch_signals(self) -> None:
        """Stop after a step when told to. A second signal does what it would without us."""
        self._closed = False
        if threading.current_thread() is not threading.main_thread():
            return
        for name in SIGNALS:
            number = getattr(signal, name, None)
            if number is not None and number not in self._previous:
                self._previous[number] = signal.signal(number, self._on_signal)

    def close(self, error: BaseException | None = None) -> None:
        """Write the postmortem, once, and give the signals back."""
        self._release_signals()
        if self._closed:
            return
        self._closed = True
        healer = self._healer()
        if healer is None:
            return
        healer.hear_the_rest()
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

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """Only take note: whatever else a handler does may find locks held."""
        self._release_signals()
        healer = self._healer()
        if healer is not None:
            healer.request_stop()

    def _release_signals(self) -> None:
        if threading.current_thread() is threading.main_thread():
            for number, handler in self._previous.items():
                signal.signal(number, handler if handler is not None else signal.SIG_DFL)
            self._previous.clear()


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
