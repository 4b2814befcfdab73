"""How the process itself ends: what nobody caught, and with which exit code.

Python tells of the end in three ways that have to be put together: an uncaught exception is in
``sys``, a SystemExit is nowhere, and a frame that has ended still knows at which instruction.
"""

import dis
import sys
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

from heal.actions import CannotHeal

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
