"""Verdicts of steps that a CUDA graph replays: kept on the device, read by the number of the step.

A replay runs no Python that could mail a verdict. The graph itself writes each verdict into a
ring of rows on the device and counts; the host copies the ring when it wants to know.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from zclip.layout import NUM_VERDICT
from zclip.mailbox import metrics_of, pinned_like, record_event


def is_capturing() -> bool:
    """Whether work on the current stream is captured in a CUDA or HIP graph, and not run."""
    return torch.backends.cuda.is_built() and torch.cuda.is_current_stream_capturing()


class _Copy(NamedTuple):
    rows: Tensor
    posted: Tensor
    landed: torch.Event | None


class VerdictRing:
    """Does for replayed steps what :class:`zclip.Mailbox` does for others.

    Nothing waits for the device: :meth:`poll` reads the copy that the poll before it asked for, and
    asks for the next. So verdicts are late by one poll, on every rank alike.

    Args:
        device: where the steps run. The ring is made at once: memory that a graph makes for itself
            would be made again by every replay.
        room: how many verdicts may be written between two polls before the oldest are lost.
        width: how many numbers a verdict has.

    Attributes:
        dropped: verdicts that were written over before they were polled.
    """

    def __init__(self, device: torch.device, room: int = 256, width: int = NUM_VERDICT) -> None:
        if room < 1:
            raise ValueError(f"room: expected 1 or more, got {room}")
        self.room = room
        self.dropped = 0
        self._rows = torch.zeros(room, width, device=device)
        self._count = torch.zeros((), dtype=torch.int64, device=device)
        self._seen = 0  # verdicts that poll() has returned or found lost
        self._asked: _Copy | None = None
        self._latest: list[float] | None = None

    def post(self, step: int, verdict: Tensor) -> None:
        """Write the verdict into the next row, on the device; ``step`` is counted there as well."""
        place = self._count.remainder(self.room).reshape(1)
        self._rows.index_copy_(0, place, verdict.reshape(1, -1))
        self._count += 1

    def poll(self) -> list[tuple[int, list[float]]]:
        """Return ``(step, verdict)`` for every step up to the last poll, oldest first."""
        asked, self._asked = self._asked, self._copy()
        if asked is None:
            return []
        if asked.landed is not None:
            asked.landed.synchronize()
        count, rows = int(asked.posted), asked.rows.tolist()
        first = max(self._seen, count - self.room)
        self.dropped += first - self._seen
        self._seen = count
        arrived = [(step, rows[step % self.room]) for step in range(first, count)]
        if arrived:
            self._latest = arrived[-1][1]
        return arrived

    def metrics(self) -> dict[str, float]:
        """Return the numbers to log, one poll late; nothing before the first has arrived."""
        self.poll()
        return {} if self._latest is None else metrics_of(self._latest)

    def clear(self) -> None:
        """Forget what was written: after a rollback it speaks of no step. Steps count on."""
        self._asked = self._latest = None
        self._rows.zero_()
        self._count.zero_()
        self._seen = 0

    def _copy(self) -> _Copy:
        """Ask for the ring as it is behind the work already enqueued."""
        rows, count = pinned_like(self._rows), pinned_like(self._count)
        rows.copy_(self._rows, non_blocking=True)
        count.copy_(self._count, non_blocking=True)
        device = self._rows.device
        return _Copy(rows, count, None if device.type == "cpu" else record_event(device))

    def __getstate__(self) -> dict[str, object]:
        """A copy starts empty: events and pinned memory belong to this process."""
        empty = {"_rows": torch.zeros_like(self._rows), "_count": torch.zeros_like(self._count)}
        return {**self.__dict__, **empty, "_seen": 0, "_asked": None, "_latest": None}
