"""Finds a learning rate that climbs beyond all before and undoes what was learned."""

import math
from statistics import median
from typing import Any

from heal.causes import Cause, Finding, Severity
from heal.config import HealingConfig
from heal.detectors.robust import Window
from heal.verdict import Record


class LrClimb:
    """Blames the learning rate for a loss that rises while the rate is higher than any it held.

    A schedule may raise the rate as it likes, and a bug in one looks just like it, so that the
    rate alone is no fault. It is one when it has left the highest rate that was ever held for
    ``HOLD`` steps by ``RAISED`` times, and since then half of what was learned is gone and the loss
    does not come down: what does is being learned, say new data of a new phase. Warm-up is a rate
    that was never held; a restart returns to one that was. After ``PATIENCE`` steps a higher rate
    is the usual one.
    """

    HOLD, STEADY = 30, 1.5  # steps in which the rate changed by no more than this factor
    LEFT, RAISED = 2.0, 4.0  # times the highest rate that was held: watched from, blamed from
    LOSSES = 8  # whose median is a level
    UNDONE = 0.5  # share of what was learned
    NOISE = 6.0  # spreads that the level must have risen at least
    PATIENCE = 300

    def __init__(self, config: HealingConfig) -> None:
        del config  # nothing here is worth a knob
        self.lowest = self.highest = 0.0  # of the steps that are steady
        self.steady = 0
        self.usual = 0.0
        self.left_at = -1
        self.losses = Window(2 * self.LOSSES)
        self.initial = math.nan
        self.level = math.nan
        self.spread = 0.0
        self.is_told = False

    def observe(self, record: Record) -> Finding | None:
        """Hear of a step, in order; return what is wrong, if anything."""
        if record.has_finite_loss and not record.blocked:
            self.losses.push(record.loss)
            if self.initial != self.initial and len(self.losses) == self.LOSSES:
                self.initial = self.losses.median
        lr = record.lr
        if not 0.0 < lr < math.inf:
            return None
        if self.usual and lr > self.LEFT * self.usual:
            return self._raised(record, lr)
        if self.left_at >= 0:
            self._settle()
        self._hold(lr)
        return None

    def _settle(self) -> None:
        """Take the rate for a usual one, from now on."""
        self.left_at, self.is_told = -1, False

    def _hold(self, lr: float) -> None:
        """Learn what is usual: what a rise sets out from."""
        if lr < self.lowest:
            self.lowest = lr
        elif lr > self.highest:
            self.highest = lr
        if self.highest > self.STEADY * self.lowest:
            self.lowest, self.highest, self.steady = lr, lr, 0
        self.steady += 1
        if self.steady >= self.HOLD and self.lowest > self.usual:
            self.usual = self.lowest

    def _raised(self, record: Record, lr: float) -> Finding | None:
        if self.left_at < 0:
            self.left_at = record.step
            self.level, self.spread = self.losses.median, self.losses.spread
            self.losses.clear()
        if record.step - self.left_at >= self.PATIENCE:
            self.usual = lr
            self._settle()
            return None
        if self.is_told or lr < self.RAISED * self.usual or len(self.losses) < 2 * self.LOSSES:
            return None
        losses = self.losses.values()
        before, now = median(losses[: self.LOSSES]), median(losses[self.LOSSES :])
        undone = max(self.UNDONE * (self.initial - self.level), self.NOISE * self.spread)
        if not now > self.level + undone or now < before:
            return None
        self.is_told = True
        return Finding(
            cause=Cause.LR_SPIKE,
            step=record.step,
            bad_step=self.left_at,
            severity=Severity.ERROR,
            evidence={
                "lr": lr,
                "usual_lr": self.usual,
                "loss": now,
                "loss_before": self.level,
            },
        )

    def state(self) -> dict[str, Any]:
        """Return all that is remembered, as values that JSON has."""
        return {
            "lowest": self.lowest,
            "highest": self.highest,
            "steady": self.steady,
            "usual": self.usual,
            "left_at": self.left_at,
            "losses": self.losses.values(),
            "initial": None if self.initial != self.initial else self.initial,
            "level": None if self.level != self.level else self.level,
            "spread": self.spread,
            "is_told": self.is_told,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Remember what :meth:`state` returned, and nothing else."""
        self.lowest, self.highest = state["lowest"], state["highest"]
        self.steady, self.usual = state["steady"], state["usual"]
        self.left_at, self.is_told = state["left_at"], state["is_told"]
        self.losses = Window(2 * self.LOSSES, state["losses"])
        self.initial = math.nan if state["initial"] is None else state["initial"]
        self.level = math.nan if state["level"] is None else state["level"]
        self.spread = state["spread"]
