"""Carries verdicts from the device to the host without making the device wait."""

from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from zclip.layout import CLIPPED_NORM, CLIPS, NORM, NUM_VERDICT, SKIPS, THRESHOLD, Z

METRICS: Mapping[str, int] = {
    "zclip/raw_grad_norm": NORM,
    "zclip/clipped_grad_norm": CLIPPED_NORM,
    "zclip/z_score": Z,
    "zclip/threshold": THRESHOLD,
    "zclip/total_clips": CLIPS,
    "zclip/total_skips": SKIPS,
}
"""What :meth:`Mailbox.metrics` reports, and where in the verdict it stands."""


class _Letter(NamedTuple):
    step: int
    slot: Tensor | list[float]
    landed: torch.Event | None


class Mailbox:
    """A ring of pinned buffers: ``post`` enqueues a copy, ``poll`` reads it ``lag`` posts later.

    A late record is safe, because the device has already skipped a bad step. ``poll`` waits on the
    event of an old copy, which has long landed. It never asks whether a newer one happens to be
    there: ranks would poll a step at different times and act apart.

    Args:
        lag: how many posts later a verdict may be read; 0 waits for the one just posted.
        width: how many numbers a verdict has.
        room: how many verdicts older than ``lag`` may wait to be polled.

    Attributes:
        dropped: verdicts that were overwritten because they were not polled in time.
    """

    def __init__(self, lag: int = 2, width: int = NUM_VERDICT, room: int = 1) -> None:
        if lag < 0:
            raise ValueError(f"lag: expected 0 or more, got {lag}")
        self.lag = lag
        self.width = width
        self.room = room
        self.dropped = 0
        self._latest: list[float] | None = None
        self._sent: deque[_Letter] = deque()
        self._free: list[Tensor] = []

    def post(self, step: int, verdict: Tensor) -> None:
        """Send the verdict of a step; the copy runs behind the work already enqueued."""
        device = verdict.device
        on_host = device.type == "cpu"
        self._make_room()
        slot = self._free.pop() if self._free else self._new_slot(pinned=not on_host)
        slot.copy_(verdict, non_blocking=True)
        self._sent.append(_Letter(step, slot, None if on_host else record_event(device)))

    def post_row(self, step: int, row: list[float]) -> None:
        """Send numbers that the host has already; they are read as late as all others."""
        if len(self._sent) >= self.lag + self.room:
            self._make_room()
        self._sent.append(_Letter(step, row, None))

    def poll(self, lag: int | None = None) -> list[tuple[int, list[float]]]:
        """Return ``(step, verdict)`` for every verdict that is ``lag`` posts old, oldest first.

        Args:
            lag: of this poll, if not that of the mailbox; 0 waits for the newest ones.
        """
        arrived = []
        while len(self._sent) > (self.lag if lag is None else lag):
            letter = self._sent.popleft()
            if letter.landed is not None:
                letter.landed.synchronize()
            if isinstance(letter.slot, list):
                self._latest = letter.slot
            else:
                self._latest = letter.slot.tolist()
                self._free.append(letter.slot)
            arrived.append((letter.step, self._latest))
        return arrived

    def peek(self) -> tuple[int, list[float]] | None:
        """Return the newest verdict that :meth:`poll` would, and leave it there.

        None if there is none, or if it is not a row of the host's own.
        """
        place = len(self._sent) - self.lag - 1
        letter = self._sent[place] if place >= 0 else None
        if letter is None or not isinstance(letter.slot, list):
            return None
        return letter.step, letter.slot

    def metrics(self) -> dict[str, float]:
        """Return the numbers to log, ``lag`` posts late; nothing before the first has arrived."""
        self.poll()
        return {} if self._latest is None else metrics_of(self._latest)

    def clear(self) -> None:
        """Forget what is under way and what arrived: after a rollback it speaks of no step.

        The buffers under way are let go, not reused: the device may still write to them.
        """
        self._sent.clear()
        self._latest = None

    def _make_room(self) -> None:
        if len(self._sent) >= self.lag + self.room:
            slot = self._sent.popleft().slot
            if not isinstance(slot, list):
                self._free.append(slot)
            self.dropped += 1

    def _new_slot(self, pinned: bool) -> Tensor:
        return torch.empty(self.width, dtype=torch.float32, pin_memory=pinned)

    def __getstate__(self) -> dict[str, object]:
        """A copy starts empty: events and pinned memory belong to this process."""
        return {**self.__dict__, "_sent": deque(), "_free": [], "_latest": None}


def metrics_of(verdict: list[float]) -> dict[str, float]:
    """Return what of a verdict is worth logging."""
    return {name: verdict[i] for name, i in METRICS.items()}


def pinned_like(tensor: Tensor) -> Tensor:
    """Return host memory that a copy from the device of ``tensor`` need not wait for."""
    pinned = tensor.device.type != "cpu"
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)


def record_event(device: torch.device) -> torch.Event:
    """Record an event behind a copy: on the stream of the device that it runs on.

    Without a stream an event goes to the current device, which need not be that one.
    """
    event = torch.Event(device)
    event.record(torch.accelerator.current_stream(device))
    return event
