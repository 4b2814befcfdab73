"""What the last updates were like: whether one of them can have done harm."""

import math
from collections import deque
from statistics import median
from typing import Any

from heal.detectors.robust import Window
from heal.verdict import Record


class Updates:
    """Tells a leap of the loss that an update has caused from one that other data has.

    Harm that a step does has a sign before it, a gradient or a rate out of the ordinary that was
    applied, or it grows from step to step. Other data is there at once, after updates like all
    others, and from the same step on gradients are larger too. (So it is with weights that
    something else has written. A check of the weights finds that.)
    """

    NORMS = 64
    LAST, RATES = 3, 16  # steps that are looked back, for norms and for rates
    UPPER, LARGE = 0.9, 5.0  # a norm so many times above what one in ten exceeds has a part in it
    RAISED = 4.0  # times the lowest of the last rates
    AT_ONCE = 0.5  # share of the leap that is there with its first loss
    LARGER = 1.5  # times the usual norm

    def __init__(self) -> None:
        self.norms = Window(self.NORMS)
        self.last: deque[float] = deque(maxlen=self.LAST)
        self.rates: deque[float] = deque(maxlen=self.RATES)

    def note(self, record: Record) -> None:
        """Hear of a step whose loss is as usual."""
        if record.blocked:
            return
        norm = record.clipped_norm
        if norm != norm:
            norm = record.norm
        self.norms.push(norm)
        self.last.append(norm)
        if record.lr > 0.0:
            self.rates.append(record.lr)

    def may_have_harmed(self) -> bool:
        """Return whether one of the last updates was out of the ordinary."""
        limit = self.LARGE * self.norms.quantile(self.UPPER)
        if any(not norm <= limit for norm in self.last):
            return True
        return bool(self.rates) and max(self.rates) > self.RAISED * min(self.rates)

    def is_other_data(self, usual: float, losses: list[float], norms: list[float]) -> bool:
        """Return whether a leap, after which ``losses`` and ``norms`` came, looks like that."""
        level = median(losses[1:]) if len(losses) > 1 else losses[0]
        is_at_once = losses[0] - usual >= self.AT_ONCE * (level - usual)
        return is_at_once and median(norms) > self.LARGER * self.norms.median

    def state(self) -> dict[str, Any]:
        """Return all that is remembered, as values that JSON has."""
        last = [norm if math.isfinite(norm) else None for norm in self.last]
        return {"norms": self.norms.values(), "last": last, "rates": list(self.rates)}

    def load_state(self, state: dict[str, Any]) -> None:
        """Remember what :meth:`state` returned."""
        self.norms = Window(self.NORMS, state["norms"])
        last = (math.inf if norm is None else norm for norm in state["last"])
        self.last, self.rates = deque(last, self.LAST), deque(state["rates"], self.RATES)
