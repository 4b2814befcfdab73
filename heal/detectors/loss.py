"""Suspects a change of the loss: a leap above its recent level, or a climb above its best one."""

import math
from statistics import median
from typing import Any

from heal.causes import Cause, Finding, Severity
from heal.config import HealingConfig
from heal.detectors.robust import LARGEST, Window
from heal.verdict import Record


class LossChange:
    """Suspects that the loss has left its level, by two cumulative sums (Page 1954, CUSUM).

    A loss is measured in units of the noise: the robust standard deviation of the recent losses.
    One sum adds up what lies above the recent median, the other what lies above the best level of
    the run, each less some slack; a sum that reaches its limit is a suspicion. So one enormous
    loss, a few large ones or many slightly raised ones all lead there. A suspicion is no verdict:
    the counterfactual experiment (:mod:`heal.experiment`) tells damage from other data.

    On stationary normal noise fewer than one run of 10,000 steps in a hundred is suspected; a loss
    that wanders by itself (critics, RL) is suspected each time it has wandered by some noise.
    """

    LOSSES = 64  # recent losses: their median is the level, their spread the noise
    BLOCK = 32  # losses whose median counts as a level that the run has reached
    SLACK, LEAP = 3.0, 20.0  # noise that is forgiven each step, and the sum that is a leap
    CLIMB_SLACK, CLIMB, CLIMB_MOST = 1.0, 25.0, 5.0  # the same above the best level; most per step
    LEAST_NOISE = 0.01  # of the level
    NO_HARM = 1e-3  # of what was learned: to lose less than that is none
    FIRST = 3  # losses that say where the run began

    def __init__(self, config: HealingConfig) -> None:
        del config  # nothing here is worth a knob
        self.losses = Window(self.LOSSES)
        self.block = Window(self.BLOCK)
        self.best = math.inf
        self.best_noise = 0.0
        self.best_step = 0
        self.leap = self.climb = 0.0
        self.leap_step = -1
        self.first: list[float] = []
        self.ratio = 1.0

    def observe(self, record: Record) -> Finding | None:
        loss = record.loss
        if not record.has_finite_loss or abs(loss) > LARGEST:
            return None
        if loss == 0.0:
            return None  # RL without advantages: says nothing of the level or the noise to come
        if len(self.first) < self.FIRST:
            self.first.append(loss)
        level, noise = self.level()
        if level != level:
            self._absorb(record)
            return None
        self.ratio = self.ratio_of(loss)
        z = (loss - level) / noise
        if self.leap == 0.0:
            self.leap_step = record.step
        self.leap = max(0.0, self.leap + min(z, self.LEAP + self.SLACK) - self.SLACK)
        self._climb(loss, noise)
        if z <= self.SLACK:
            self._absorb(record)
        if self.leap >= self.LEAP:
            # The loss of a step is that of the weights before it.
            since = max(self.leap_step - 1, 0)
            self.leap = self.climb = 0.0
            return self._found(Cause.LOSS_SPIKE, record, since, level, noise)
        if self.climb >= self.CLIMB:
            self.climb = 0.0
            return self._found(Cause.DIVERGENCE, record, self.best_step, self.best, noise)
        return None

    def level(self) -> tuple[float, float]:
        """Return the recent level and its noise; NaN while there are fewer than three losses."""
        count = len(self.losses)
        if count < self.FIRST:
            return math.nan, math.nan
        level, spread = self.losses.median_and_spread()
        # Three losses say little about the noise: the fewer there are, the more is allowed for.
        least = max(self.LEAST_NOISE, 0.3 / count) * abs(level)
        learned = self.NO_HARM * (median(self.first) - level)
        return level, max(spread, least, learned, 1e-300)

    def ratio_of(self, loss: float) -> float:
        """Return a loss over its level; that of the last one where the level is not known."""
        level, noise = self.level()
        ratio = 1.0 + (loss - level) / max(abs(level), 8.0 * noise)
        return ratio if math.isfinite(ratio) else self.ratio

    def rebase(self) -> None:
        """Take what comes from now on as the level: the data has changed, the weights are sound."""
        self.losses.clear()
        self.block.clear()
        self.best, self.best_noise = math.inf, 0.0
        self.leap = self.climb = 0.0

    def _climb(self, loss: float, noise: float) -> None:
        if math.isinf(self.best):
            return
        z = (loss - self.best) / max(noise, self.best_noise)
        self.climb = max(0.0, self.climb + min(z, self.CLIMB_MOST) - self.CLIMB_SLACK)

    def _absorb(self, record: Record) -> None:
        self.losses.push(record.loss)
        self.block.push(record.loss)
        if len(self.block) < self.BLOCK:
            return
        level, spread = self.block.median, self.block.spread
        self.block.clear()
        if level < self.best:
            self.best, self.best_noise, self.best_step = level, spread, record.step
            self.climb = 0.0

    def _found(
        self, cause: Cause, record: Record, since: int, level: float, noise: float
    ) -> Finding:
        return Finding(
            cause=cause,
            step=record.step,
            bad_step=since,
            severity=Severity.WARN,
            evidence={"loss": record.loss, "usual_loss": level, "noise": noise},
            wants_proof=True,
        )

    def state(self) -> dict[str, Any]:
        names = ("best_noise", "best_step", "leap", "climb", "leap_step", "ratio")
        return {
            "first": list(self.first),
            "losses": self.losses.values(),
            "block": self.block.values(),
            "best": None if math.isinf(self.best) else self.best,
            **{name: getattr(self, name) for name in names},
        }

    def load_state(self, state: dict[str, Any]) -> None:
        if "climb" not in state:
            return  # of version 0.1: learned anew
        self.losses = Window(self.LOSSES, state["losses"])
        self.block = Window(self.BLOCK, state["block"])
        self.best = math.inf if state["best"] is None else state["best"]
        self.first = list(state["first"])
        for name in ("best_noise", "best_step", "leap", "climb", "leap_step", "ratio"):
            setattr(self, name, state[name])
