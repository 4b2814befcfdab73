"""How a run ends: whatever the way, a postmortem is left behind."""

import atexit
import dis
import multiprocessing
import os
import signal
import sys
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import util
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

from heal.actions import HealingError as CannotHeal
from heal.cluster.shutdown import ShutdownHandler
from heal.exit_codes import ExitCode
from heal.journal import Journal
from heal.postmortem import ExitReason

if TYPE_CHECKING:
    from heal.healer import Healer


# How the process itself ends: what nobody caught, and with which exit code.
#
# Python tells of the end in three ways that have to be put together: an uncaught exception is in
# ``sys``, a SystemExit is nowhere, and a frame that has ended still knows at which instruction.


OF_A_CHILD = ("multiprocessing/process.py", "run")  # its caller ends with SystemExit in any case


def end_with_own_code() -> None:
    """Have an uncaught CannotHeal end the process with its own exit code, not with 1.

    Whoever printed the traceback before still does. At a prompt nothing ends.
    """
    previous = sys.excepthook
    if getattr(previous, "ends_with_own_code", False):
        return

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not isinstance(error, CannotHeal) or is_interactive():
            previous(kind, error, trace)
            return
        try:
            previous(kind, error, trace)
        except Exception as failed:  # a hook that fails must not cost the exit code
            sys.__excepthook__(type(failed), failed, failed.__traceback__)
        raise SystemExit(error.exit_code)

    hook.ends_with_own_code = True  # type: ignore[attr-defined]
    sys.excepthook = hook


def tell_of_thread(tell: Callable[[BaseException], None]) -> None:
    """Have an exception told that ends the present thread, which is not the main one."""
    previous, ours = threading.excepthook, threading.current_thread()

    def hook(args: Any) -> None:
        if args.thread is ours and args.exc_value is not None:
            tell(args.exc_value)
        previous(args)

    threading.excepthook = hook


def uncaught() -> BaseException | None:
    """Return the exception that ends the process, if one does; never a SystemExit."""
    if is_interactive():
        return None  # an error at a prompt ended nothing
    error: BaseException | None = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    return error


def is_interactive() -> bool:
    """Return whether somebody types at a prompt."""
    return hasattr(sys, "ps1") or bool(sys.flags.interactive)


class MainProgram:
    """The outermost frame of the main thread, as it was when this was made."""

    def __init__(self) -> None:
        frames = sys._current_frames()
        frame = frames.get(threading.main_thread().ident or 0)
        while frame is not None and frame.f_back is not None and not _runs_a_child(frame):
            frame = frame.f_back
        self._frame: FrameType | None = frame

    def returned(self) -> bool | None:
        """Return whether it came to its end; False if it was left by SystemExit, say.

        None if that cannot be said: it is still going, or there is a prompt.
        """
        if self._frame is None or is_interactive():
            return None
        code, at = self._frame.f_code.co_code, self._frame.f_lasti
        if self._is_going() or not 0 <= at < len(code):
            return None
        return dis.opname[code[at]].startswith("RETURN")

    def _is_going(self) -> bool:
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        while frame is not None and frame is not self._frame:
            frame = frame.f_back
        return frame is not None


def _runs_a_child(frame: FrameType) -> bool:
    path, name = OF_A_CHILD
    return frame.f_code.co_name == name and frame.f_code.co_filename.endswith(path)


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

    Attributes:
        is_watching: whether signals and threads are seen to, which happens at the first step.
    """

    def __init__(self, healer: "Healer", journal: Journal, clock: Callable[[], float]) -> None:
        self.is_watching = False
        self._healer = weakref.ref(healer)
        self._journal = journal
        self._clock = clock
        self._began = clock()
        self._closed = self._is_written = False
        self._is_entered = False
        self._told = 0  # a signal that somebody else sees to
        self._unanswered = 0  # a signal after which no step has stopped the run yet
        self._shutdown: ShutdownHandler | None = None
        self._facts: dict[str, Any] = {}  # of a healer that is gone
        self._process = os.getpid()
        self._program = MainProgram()
        atexit.register(self.at_exit)
        if multiprocessing.parent_process() is not None:  # a child that was forked has no atexit
            util.Finalize(None, self.at_exit, exitpriority=0)

    def watch(self) -> None:
        """See to signals, or to this thread if it is not the main one; called at the first step."""
        self.is_watching = True
        if self._closed:
            return
        if threading.current_thread() is threading.main_thread():
            self._install()
        else:
            tell_of_thread(self.close)

    def catch_signals(self) -> None:
        """Stop all ranks after a step when one is told to; see :class:`ShutdownHandler`."""
        self._closed = self._is_written = False
        self._is_entered, self._unanswered = True, 0
        self._install()

    def request_stop(self) -> None:
        """Hear of a signal. A loop that is under way stops after a step, which saves more.

        Elsewhere, as in an evaluation, no step may come: the postmortem is written at once, and the
        signal takes its course. A handler that was there before knows better: it has its turn; and
        so has another healer that is training, which hears of the same signal.
        """
        healer, shutdown = self._healer(), self._shutdown
        if self._is_entered and healer is not None:
            self._ask(healer)
        elif shutdown is None or shutdown.is_handled_by_others:
            self._told = self._told or (0 if shutdown is None else shutdown.signal)
        elif healer is not None and self.is_training:
            self._ask(healer)
        elif any(other.is_training for other in _OPEN):
            self._told = self._told or shutdown.signal
            shutdown.stand_back()
        else:
            number = shutdown.signal
            self._finish(Ending(None, ExitReason.SIGTERM, SIGNAL_BASE + number))
            os.kill(os.getpid(), number)

    @property
    def is_training(self) -> bool:
        """Whether signals come here, to a run that will take a step and stop after it."""
        healer = self._healer()
        is_heard = self._shutdown is not None and not self._closed
        if healer is None or not is_heard or os.getpid() != self._process:
            return False
        return self._is_entered or healer.is_in_loop

    def close(self, error: BaseException | None = None) -> None:
        """Write the postmortem, once, and give the signals back; then no deadline runs any more."""
        if isinstance(error, CannotHeal):
            end_with_own_code()
        is_told = error is None and self._unanswered
        self._finish(Ending(None, ExitReason.SIGTERM, None) if is_told else Ending.by(error))

    def late_stop(self) -> CannotHeal | None:
        """Return the stop that a signal asked for after the last step; None if none did."""
        if not self._unanswered:
            return None
        name = signal.Signals(self._unanswered).name
        return CannotHeal(f"told to stop by {name} after the last step", ExitCode.PREEMPTED)

    def draft(self, halt: CannotHeal) -> None:
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
            healer.hear_the_rest(hurries=True)
        self._facts = _facts_of(healer)
        if not healer.left_loop_early:
            self._finish(Ending.by(None))
            return
        self._journal.draft_postmortem(**self._page(EXITED))
        shutdown = self._release_signals()  # no step is to come that could stop the run
        if shutdown is not None:
            shutdown.finish()

    def _ask(self, healer: "Healer") -> None:
        self._unanswered = 0 if self._shutdown is None else self._shutdown.signal
        healer.request_stop()

    def _install(self) -> None:
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
            _OPEN.add(self)

    def _ending(self) -> Ending:
        error, healer = uncaught(), self._healer()
        if error is not None:
            return Ending.by(error)
        if self._told or self._unanswered:
            return Ending(None, ExitReason.SIGTERM, None)
        in_order = self._program.returned()
        if in_order is None:
            in_order = healer is not None and not healer.left_loop_early
        return Ending.by(None) if in_order else EXITED

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
            sudden = isinstance(error, Exception) and not isinstance(error, CannotHeal)
            healer.hear_the_rest(hurries=sudden)
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
        self._is_entered = False
        if threading.current_thread() is not threading.main_thread():
            return None
        shutdown, self._shutdown = self._shutdown, None
        _OPEN.discard(self)
        if shutdown is not None:
            shutdown.restore()
        return shutdown


_OPEN: "weakref.WeakSet[Exits]" = weakref.WeakSet()
"""Those that hear of signals: several, if a loop was left to itself and another one began."""


def _exit_code(error: BaseException | None) -> int:
    if error is None:
        return int(ExitCode.OK)
    if isinstance(error, CannotHeal):
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
