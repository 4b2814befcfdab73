"""Writes that neither an update nor a forward pass explains."""

from typing import Any

from heal.causes import Cause, Finding, Severity
from heal.config import HealingConfig
from heal.detectors.robust import RECENT
from heal.record import NO_FLAG, Flag, Record

WRITTEN_BY = "written_by"
"""The evidence that something other than an update has written."""


class ForeignWrites:
    """Suspects weights or moments that something other than the optimizer has written.

    A flipped bit, wrong code and a meant change (weights clamped after every step, a moving average
    swapped in) look alike, so that the experiment decides. Where such writes are a habit they say
    nothing: one is a suspicion only if none came for ``RECENT`` steps. NaN and Inf in weights or
    moments are not judged here: the flag has the monitor check them at once.

    Running statistics that something other than a forward pass wrote are suspected as well. Only
    evaluation reads them, so that the experiment runs in that mode.

    Args:
        delay: steps after a write until a record has the flag; 1 where other ranks share records.
    """

    def __init__(self, config: HealingConfig, delay: int = 0) -> None:
        self._delay = delay
        self.last = -RECENT
        self.expected = -1

    def observe(self, record: Record) -> Finding | None:
        """Judge a record; see :class:`heal.detectors.watch.Detector`."""
        if record.flags is NO_FLAG:
            return None
        if record.has(Flag.STATISTICS_WRITTEN) and record.step > self.expected:
            evidence: dict[str, object] = {
                WRITTEN_BY: "something other than a forward pass",
                "tensor": "running statistics",
            }
            return Finding(
                cause=Cause.WEIGHT_CORRUPTION,
                step=record.step,
                bad_step=record.step,
                severity=Severity.WARN,
                evidence=evidence,
                wants_proof=True,
                is_of_evaluation=True,
            )
        if not record.has(Flag.FOREIGN_WRITE):
            return None
        written = record.step - self._delay
        since, self.last = written - self.last, written
        if written <= self.expected or since < RECENT:
            return None
        return Finding(
            cause=Cause.WEIGHT_CORRUPTION,
            step=record.step,
            bad_step=written,
            severity=Severity.WARN,
            evidence={WRITTEN_BY: "something other than the optimizer", "measured": True},
            wants_proof=True,
        )

    def expect(self, step: int) -> None:
        """Take a write before ``step`` for meant: a rollback or the user made it."""
        self.expected = max(self.expected, step)

    def state(self) -> dict[str, Any]:
        """Return what is remembered."""
        return {"last": self.last, "expected": self.expected}

    def load_state(self, state: dict[str, Any]) -> None:
        """Remember what :meth:`state` returned."""
        self.last, self.expected = state["last"], state["expected"]
