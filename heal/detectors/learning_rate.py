"""Finds learning rates that no schedule explains."""

import math
from typing import Any

from heal.causes import Cause, Finding, Severity
from heal.config import HealingConfig
from heal.detectors.robust import BLOCK, FAR, SAME
from heal.record import Record


class LrChange:
    """Reports a learning rate that nothing known explains.

    Where the schedule is known, a rate that is not the scheduled one is a fact: it is reported
    whatever its factor, and acted upon above ``lr_spike_factor`` times the schedule, because its
    update was damage. Where no schedule is known a leap from one step to the next is reported, and
    a rate of zero or less; what it does to the weights is for the experiment to say.

    Attributes:
        held: the highest rate that the run has held for ``BLOCK`` steps; 0 if it never did. A rate
            above it that no schedule explains is a suspect when damage is found.
    """

    def __init__(self, config: HealingConfig) -> None:
        self.factor = config.lr_spike_factor
        self.last = math.nan
        self.same = 0
        self.held = 0.0
        self.is_off = False
        self.has_schedule = False

    def observe(self, record: Record) -> Finding | None:
        lr, scheduled = record.lr, record.scheduled_lr
        if not math.isfinite(lr):
            return None
        last, self.last = self.last, lr
        self.same = self.same + 1 if abs(lr - last) <= SAME * abs(last) else 0
        self.has_schedule = math.isfinite(scheduled)
        if self.has_schedule:
            self.held = 0.0
            return self._beside_schedule(record, lr, scheduled)
        if self.same >= BLOCK:
            self.held = max(self.held, lr)
        if last != last:
            return None
        has_leapt = last > 0.0 and not last / FAR <= lr <= last * FAR
        was_off, self.is_off = self.is_off, lr <= 0.0
        # The first rate of a warm-up may be zero; the second is not.
        if has_leapt or (self.is_off and not was_off):
            return self._found(record, lr, last, Severity.WARN, is_fact=False)
        return None

    def _beside_schedule(self, record: Record, lr: float, scheduled: float) -> Finding | None:
        was_off, self.is_off = self.is_off, abs(lr - scheduled) > SAME * abs(scheduled)
        if not self.is_off:
            return None
        if scheduled > 0.0 and lr > self.factor * scheduled:
            return self._found(record, lr, scheduled, Severity.ERROR, is_fact=True)
        if was_off:
            return None
        return self._found(record, lr, scheduled, Severity.WARN, is_fact=True)

    def _found(
        self, record: Record, lr: float, usual: float, severity: Severity, is_fact: bool
    ) -> Finding:
        evidence: dict[str, object] = {"lr": lr, "usual_lr": usual, "measured": is_fact}
        if lr <= 0.0:
            evidence["advice"] = "nothing is learned with this learning rate"
        return Finding(
            cause=Cause.LR_SPIKE,
            step=record.step,
            bad_step=record.step,
            severity=severity,
            evidence=evidence,
        )

    def start_over(self) -> None:
        """Take the rate that comes next as the run's own."""
        self.last, self.same, self.held, self.is_off = math.nan, 0, 0.0, False

    def state(self) -> dict[str, Any]:
        last = None if self.last != self.last else self.last
        return {"last": last, "same": self.same, "held": self.held, "is_off": self.is_off}

    def load_state(self, state: dict[str, Any]) -> None:
        if "held" not in state:
            return  # of version 0.1: learned again
        self.last = math.nan if state["last"] is None else state["last"]
        self.same, self.held, self.is_off = state["same"], state["held"], state["is_off"]
