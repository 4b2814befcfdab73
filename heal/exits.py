"""How a run ends: with a postmortem, whatever the reason.

Outside of ``with healer:``, ``healer.run`` and a trainer's ``train`` nothing of the process is
changed: one ``atexit`` function closes a run that is still open. Inside, SIGTERM and SIGUSR1 stop
the run after a step, and an uncaught halt ends the process with its own exit code.
"""

import atexit
import multiprocessing
import os
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import util
from types import TracebackType
from typing import TYPE_CHECKING, Any

from heal.actions import HealingError
from heal.cluster.shutdown import SIGNAL_BASE, ShutdownHandler
from heal.exit_codes import ExitCode
from heal.journal import ExitReason, Journal

if TYPE_CHECKING:
    from heal.healer import Healer


class OwnExitCode:
    """Ends the process with the exit code of an uncaught halt, not with 1.

    It is ``sys.excepthook`` as long as the halt exists, so not after a halt that was caught and
    dropped. The hook from before prints the traceback. At a prompt nothing ends.
    """

    def __init__(self, halt: HealingError) -> None:
        self.halt = weakref.ref(halt, lambda _: self._restore())
        self._previous = sys.excepthook

    def install(self) -> None:
        """Become the hook, unless there is one for this halt."""
        present = sys.excepthook
        if not isinstance(present, OwnExitCode) or present.halt() is not self.halt():
            sys.excepthook = self

    def __call__(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        self._restore()
        if not isinstance(error, HealingError) or is_interactive():
            self._previous(kind, error, trace)
            return
        try:
            self._previous(kind, error, trace)
        except Exception as failed:  # a hook that fails must not cost the exit code
            sys.__excepthook__(type(failed), failed, failed.__traceback__)
        raise SystemExit(error.exit_code)

    def _restore(self) -> None:
        if sys.excepthook is self:
            sys.excepthook = self._previous


def uncaught() -> BaseException | None:
    """Return the exception that ends the process, if one does; never a SystemExit."""
    if is_interactive():
        return None  # an error at a prompt ended nothing
    error: BaseException | None = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    return error


def is_interactive() -> bool:
    """Return whether Python runs at a prompt."""
    return hasattr(sys, "ps1") or bool(sys.flags.interactive)


SIGNALS = ("SIGTERM", "SIGUSR1")  # what schedulers send before they kill


class Exits:
    """Writes one postmortem: at the end of ``run`` or ``with``, on a halt, or when Python exits.

    It does not keep the healer alive.
    """

    def __init__(self, healer: "Healer", journal: Journal, clock: Callable[[], float]) -> None:
        self._healer = weakref.ref(healer)
        self._journal = journal
        self._clock = clock
        self._began = clock()
        self._closed = self._is_written = False
        self._is_entered = False
        self._unanswered = 0  # a signal after which no step has stopped the run yet
        self._shutdown: ShutdownHandler | None = None
        self._facts: dict[str, Any] = {}  # of a healer that is gone
        self._process = os.getpid()
        atexit.register(self.at_exit)
        if multiprocessing.parent_process() is not None:  # a child that was forked has no atexit
            util.Finalize(None, self.at_exit, exitpriority=0)

    def enter(self) -> None:
        """Let a halt end the process with its own exit code, until :meth:`leave`."""
        self._closed = self._is_written = False
        self._is_entered, self._unanswered = True, 0

    def leave(self) -> None:
        """End what :meth:`enter` began; after :meth:`close`."""
        self._is_entered = False

    def catch_signals(self) -> None:
        """Enter, and stop all ranks after a step when one gets SIGTERM or SIGUSR1."""
        self.enter()
        healer = self._healer()
        if healer is None or threading.current_thread() is not threading.main_thread():
            return
        if self._shutdown is None:
            self._shutdown = ShutdownHandler(
                self,
                shutdown_timeout_sec=healer.config.shutdown_timeout_sec,
                signals=SIGNALS,
                run_dir=self._journal.run_dir,
                before_exit=self.leaving,
            )
            self._shutdown.install()

    def request_stop(self) -> None:
        """Stop after a step, because of a signal; the signal handler calls this."""
        healer, shutdown = self._healer(), self._shutdown
        if healer is not None and shutdown is not None:
            self._unanswered = shutdown.signal
            healer.request_stop()

    def close(self, error: BaseException | None = None) -> None:
        """Write the postmortem, once, and restore the signal handlers; no deadline runs then."""
        is_main = threading.current_thread() is threading.main_thread()
        if isinstance(error, HealingError) and self._is_entered and is_main:
            OwnExitCode(error).install()
        is_stopped = error is None and self._unanswered
        self._finish(error, ExitReason.SIGTERM if is_stopped else None)

    def late_stop(self) -> HealingError | None:
        """Return the stop that a signal asked for after the last step; None if none did."""
        if not self._unanswered:
            return None
        name = signal.Signals(self._unanswered).name
        return HealingError(f"{name} came after the last step", ExitCode.PREEMPTED)

    def draft(self, halt: HealingError) -> None:
        """Write the postmortem of a halt before the last save, which may never end."""
        healer = self._healer()
        if healer is not None and not self._closed:
            self._facts = _facts_of(healer)
            self._journal.draft_postmortem(**self._page(halt))

    def leaving(self, code: int) -> None:
        """Write the postmortem in a thread that is about to end the process.

        The main thread may be anywhere, so the page has only what needs no device and no rank.
        """
        healer = self._healer()
        if self._is_written or os.getpid() != self._process:
            return
        reason = ExitReason.HUNG if code == ExitCode.HUNG else ExitReason.SIGTERM
        if healer is not None and not self._facts:
            self._facts = {"last_step": healer.last_step}
        if self._facts:
            self._journal.draft_postmortem(**self._page(None, reason, code))

    def dismiss(self) -> None:
        """Write no postmortem: this run is watched, not trained, by its healer."""
        self._closed = self._is_written = True
        atexit.unregister(self.at_exit)
        with self._signals_given_back():
            pass

    def at_exit(self) -> None:
        """Close a run that is still open, by how the process ended."""
        if self._closed or os.getpid() != self._process:
            return  # in a child that was forked, the run is its parent's
        error, healer = uncaught(), self._healer()
        is_over = healer is not None and not healer.stream.was_left
        if error is not None or (is_over and not self._unanswered):
            self._finish(error)
        else:
            self._finish(None, ExitReason.SIGTERM if self._unanswered else ExitReason.EXITED)

    def collected(self, healer: "Healer") -> None:
        """Write the postmortem of a healer that is garbage.

        If its loop was left early, it is a draft until the process ends, which shows why.
        """
        if self._closed or os.getpid() != self._process:
            return
        if not healer.has_others:  # else a poll would wait for ranks that may be elsewhere
            healer.finish(hurries=True)
        self._facts = _facts_of(healer)
        if not healer.stream.was_left:
            self._finish(None)
            return
        with self._signals_given_back():  # no step will come that could stop the run
            self._journal.draft_postmortem(**self._page(None, ExitReason.EXITED))

    def _finish(self, error: BaseException | None, reason: ExitReason | None = None) -> None:
        with self._signals_given_back():
            if self._closed:
                return
            self._closed = True
            healer = self._healer()
            if healer is not None:
                sudden = isinstance(error, Exception) and not isinstance(error, HealingError)
                healer.finish(hurries=sudden)
                self._facts = _facts_of(healer)
            if self._facts:
                self._is_written = True
                self._journal.postmortem(**self._page(error, reason))
                self._journal.close()
            atexit.unregister(self.at_exit)

    def _page(
        self,
        error: BaseException | None,
        reason: ExitReason | None = None,
        code: int | None = None,
    ) -> dict[str, Any]:
        """Return what the postmortem needs; without a reason, what follows from the error."""
        return {
            "exception": error,
            "exit_reason": reason,
            "exit_code": _exit_code(error) if reason is None else code,
            "running_time_seconds": self._clock() - self._began,
            **self._facts,
        }

    @contextmanager
    def _signals_given_back(self) -> Iterator[None]:
        """Restore the signal handlers; our deadline covers the body, and ends with it."""
        if threading.current_thread() is not threading.main_thread() or self._shutdown is None:
            yield
            return
        shutdown, self._shutdown = self._shutdown, None
        shutdown.restore()
        yield
        shutdown.finish()


def _exit_code(error: BaseException | None) -> int:
    if error is None:
        return int(ExitCode.OK)
    if isinstance(error, HealingError):
        return error.exit_code
    if isinstance(error, KeyboardInterrupt):
        return SIGNAL_BASE + int(signal.SIGINT)
    if isinstance(error, SystemExit) and (error.code is None or isinstance(error.code, int)):
        return error.code or int(ExitCode.OK)
    return 1


def _facts_of(healer: "Healer") -> dict[str, Any]:
    latest = healer.latest
    seen = {} if latest is None else {"loss": latest.loss, "grad_norm": latest.norm}
    metrics = {**seen, **healer.metrics()}
    facts: dict[str, Any] = {"last_step": healer.last_step, "final_metrics": metrics}
    if healer.failed_checkpoints is not None:
        facts["failed_checkpoints"] = healer.failed_checkpoints
    return facts
