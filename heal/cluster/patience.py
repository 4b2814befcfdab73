"""Calls that may never return, made by a thread that nobody has to wait for."""

import queue
import threading
from collections.abc import Callable
from typing import Any


class Patience:
    """Asks somebody who may have died, such as a store, and gives up after a while.

    Args:
        seconds: to wait for an answer.

    Attributes:
        silent: whether the last call has not come back; until it does, no other is made.
    """

    def __init__(self, seconds: float) -> None:
        self.silent = False
        self._seconds = seconds
        self._calls: queue.SimpleQueue[Callable[[], Any] | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def ask(self, call: Callable[[], Any], otherwise: Any = None) -> Any:
        """Return the answer; ``otherwise`` if there is none in time, or the call failed."""
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._serve, args=(self._calls,), name="heal-store", daemon=True
            )
            self._thread.start()
        try:
            if self.silent:
                self._answers.get_nowait()  # the answer of long ago, if it has come by now
            self._calls.put(call)
            self.silent = True
            answer = self._answers.get(timeout=self._seconds)
            self.silent = False
        except queue.Empty:
            return otherwise
        return otherwise if isinstance(answer, _Failed) else answer

    def close(self) -> None:
        """End the thread, once the call that it makes has come back."""
        if self._thread is not None:
            self._calls.put(None)
            self._thread, self._calls = None, queue.SimpleQueue()

    def _serve(self, calls: "queue.SimpleQueue[Callable[[], Any] | None]") -> None:
        while (call := calls.get()) is not None:
            try:
                self._answers.put(call())
            except Exception:  # a store whose host is gone raises many kinds
                self._answers.put(_Failed())


class _Failed:
    """Stands for an answer that was an exception."""
