"""How a run ends: a postmortem is left behind, whichever way it was.

Outside of ``with healer:``, ``healer.run`` and a trainer's ``train`` nothing of the process is
changed: one ``atexit`` function closes a run that nobody closed. Inside, SIGTERM and SIGUSR1 stop
the run after a step, and a halt that nobody catches ends the process with its own exit code.
"""

import atexit
import multiprocessing
import os
import signal
import sys
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import util
from types import TracebackType
from typing import TYPE_CHECKING, Any

from heal.actions import HealingError as HealingError
from heal.cluster.shutdown import ShutdownHandler
from heal.exit_codes import ExitCode
from heal.journal import Journal
from heal.postmortem import ExitReason

if TYPE_CHECKING:
    from heal.healer import Healer


class OwnExitCode:
    """Ends the process with the exit code of a halt that nobody catches, not with 1.

    It is ``sys.excepthook`` as long as the halt exists: a halt that is caught and dropped takes it
    along. The hook from before prints the traceback. At a prompt nothing ends.
    """

    def __init__(self, halt: HealingError) -> None:
        self.halt = weakref.ref(halt, lambda _: self._restore())
        self._previous = sys.excepthook

    def install(self) -> None:
        """Be the hook, unless one for this halt is."""
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
    """Return whether somebody types at a prompt."""
    return hasattr(sys, "ps1") or bool(sys.flags.interactive)


SIGNALS = ("SIGTERM", "SIGUSR1")  # what schedulers send before they kill
SIGNAL_BASE = 128  # a shell's code for "ended by signal n" is this plus n


@dataclass(frozen=True, slots=True)
class Ending:
    """Why a run ended; None stands for what is not known, or follows from the error."""

    error: BaseException | None = None
    reason: ExitReason | None = None
    exit_code: int | None = None

    @classmethod
    def by(cls, error: BaseException | None) -> "Ending":
        """The ending by what was raised, or in order."""
        return cls(error, None, _exit_code(error))


EXITED = Ending(None, ExitReason.EXITED, None)
"""Left before the end, by ``sys.exit`` or by ``break``: Python does not say with which code."""


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
        """Have a halt end the process with its own exit code, until :meth:`leave`."""
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
        """Write the postmortem, once, and give the signals back; then no deadline runs any more."""
        is_main = threading.current_thread() is threading.main_thread()
        if isinstance(error, HealingError) and self._is_entered and is_main:
            OwnExitCode(error).install()
        is_stopped = error is None and self._unanswered
        self._finish(Ending(None, ExitReason.SIGTERM, None) if is_stopped else Ending.by(error))

    def late_stop(self) -> HealingError | None:
        """Return the stop that a signal asked for after the last step; None if none did."""
        if not self._unanswered:
            return None
        name = signal.Signals(self._unanswered).name
        return HealingError(f"told to stop by {name} after the last step", ExitCode.PREEMPTED)

    def draft(self, halt: HealingError) -> None:
        """Write the postmortem of a halt before the last save, which may never end."""
        healer = self._healer()
        if healer is not None and not self._closed:
            self._facts = _facts_of(healer)
            self._journal.draft_postmortem(**self._page(Ending.by(halt)))

    def leaving(self, code: int) -> None:
        """Write the postmortem in a thread that is about to end the process.

        The main thread may be anywhere: only what needs no device and no other rank is told.
        """
        healer = self._healer()
        if self._is_written or os.getpid() != self._process:
            return
        reason = ExitReason.HUNG if code == ExitCode.HUNG else ExitReason.SIGTERM
        if healer is not None and not self._facts:
            self._facts = {"last_step": healer.last_step}
        if self._facts:
            self._journal.draft_postmortem(**self._page(Ending(None, reason, code)))

    def dismiss(self) -> None:
        """Write no postmortem: this run is watched, not trained, by its healer."""
        self._closed = self._is_written = True
        atexit.unregister(self.at_exit)
        shutdown = self._release_signals()
        if shutdown is not None:
            shutdown.finish()

    def at_exit(self) -> None:
        """Close a run that nobody closed, by how the process ended."""
        if self._closed or os.getpid() != self._process:
            return  # in a child that was forked, the run is its parent's
        self._finish(self._ending())

    def collected(self, healer: "Healer") -> None:
        """Write the postmortem of a healer that nobody refers to any more.

        If its loop was left early, how the process ends will tell why; until then it says so.
        """
        if self._closed or os.getpid() != self._process:
            return
        if not healer.has_others:  # else to hear is to wait for ranks that may be elsewhere
            healer.finish(hurries=True)
        self._facts = _facts_of(healer)
        if not healer.stream.was_left:
            self._finish(Ending.by(None))
            return
        self._journal.draft_postmortem(**self._page(EXITED))
        shutdown = self._release_signals()  # no step is to come that could stop the run
        if shutdown is not None:
            shutdown.finish()

    def _ending(self) -> Ending:
        error, healer = uncaught(), self._healer()
        if error is not None:
            return Ending.by(error)
        if self._unanswered:
            return Ending(None, ExitReason.SIGTERM, None)
        is_over = healer is not None and not healer.stream.was_left
        return Ending.by(None) if is_over else EXITED

    def _finish(self, ending: Ending) -> None:
        shutdown = self._release_signals()
        if not self._closed:
            self._closed = True
            self._write(ending)
            atexit.unregister(self.at_exit)
        if shutdown is not None:
            shutdown.finish()  # only now: the deadline also covers the last save and the postmortem

    def _write(self, ending: Ending) -> None:
        healer, error = self._healer(), ending.error
        if healer is not None:
            sudden = isinstance(error, Exception) and not isinstance(error, HealingError)
            healer.finish(hurries=sudden)
            self._facts = _facts_of(healer)
        if self._facts:
            self._is_written = True
            self._journal.postmortem(**self._page(ending))
            self._journal.close()

    def _page(self, ending: Ending) -> dict[str, Any]:
        return {
            "exception": ending.error,
            "exit_reason": ending.reason,
            "exit_code": ending.exit_code,
            "running_time_seconds": self._clock() - self._began,
            **self._facts,
        }

    def _release_signals(self) -> ShutdownHandler | None:
        if threading.current_thread() is not threading.main_thread():
            return None
        shutdown, self._shutdown = self._shutdown, None
        if shutdown is not None:
            shutdown.restore()
        return shutdown


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
