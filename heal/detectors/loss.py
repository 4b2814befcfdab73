"""Suspects a change of the loss: a leap above its recent level, or a climb above its best one."""

import math
import sys
from collections import deque
from dataclasses import replace
from typing import Any

from heal.causes import AT_ONCE, Cause, Finding, Severity
from heal.config import HealingConfig
from heal.detectors.robust import BLOCK, FEWEST, FIRST, LARGEST, NEGLIGIBLE, RECENT, SAME, Window
from heal.record import Record


class LossChange:
    """Suspects that the loss has left its level, by two cumulative sums (Page 1954, CUSUM).

    A loss is measured in units of the noise: the robust standard deviation of the recent losses.
    One sum adds up what lies above the recent median, the other what lies above the best level of
    the run, each less some slack; a sum that reaches its limit is a suspicion. So one enormous
    loss, a few large ones or many slightly raised ones all lead there. A suspicion is no verdict:
    the counterfactual experiment (:mod:`heal.experiment`) distinguishes damage from other data.

    On stationary normal noise fewer than one run of 10,000 steps in a hundred is suspected; a loss
    that wanders by itself (critics, RL) is suspected each time it has wandered by some noise.

    Attributes:
        latest: the last losses, those that are not learned as part of the level included.
        is_suspected: whether the level was called into question since it was last taken as usual.
    """

    SLACK = 3.0
    """Noise above the recent level that one loss may have. More counts towards a leap, and is not
    learned as part of the level."""

    CLIMB_SLACK = 1.0
    """The same above the best level. The best of many medians is lower than the true level by up to
    0.6 of the noise, and a plateau must not seem a climb."""

    LIMIT = 4.0
    """A sum that is a suspicion, for each unit of ``loss_spike_factor``: with its default of 5 one
    loss 23 times the noise above, or ten of 5."""

    def __init__(self, config: HealingConfig) -> None:
        self.limit = self.LIMIT * config.loss_spike_factor
        self.latest: deque[float] = deque(maxlen=FIRST)
        self.losses = Window(RECENT)
        self.block = Window(BLOCK)
        self.best = math.inf
        self.best_noise = 0.0
        self.best_step = 0
        self.leap = self.climb = 0.0
        self.leap_step = -1
        self.first: list[float] = []
        self.ratio = 1.0
        self.is_suspected = False
        # A run begins with one: there is nothing else to compare the first steps with.
        self.fewest = 1

    def observe(self, record: Record) -> Finding | None:
        loss = record.loss
        if not record.has_finite_loss or loss == 0.0:
            return None  # zero: RL without advantages; says nothing of the level or noise to come
        self.latest.append(loss)
        if abs(loss) > LARGEST:
            return None
        if len(self.first) < FIRST:
            self.first.append(loss)
        level, noise = self.level()
        if level != level:
            self._absorb(record)
            return None
        self.ratio = self._ratio(loss, level, noise)
        z = (loss - level) / noise
        was_usual = self.leap == 0.0
        if was_usual:
            self.leap_step = record.step
        self.leap = max(0.0, self.leap + min(z, self.limit + self.SLACK) - self.SLACK)
        self._climb(loss, noise)
        if z <= self.SLACK:
            self._absorb(record)
        if self.leap >= self.limit:
            # The loss of a step is that of the weights before it.
            since = max(self.leap_step - 1, 0)
            self.leap = self.climb = 0.0
            found = self._found(Cause.LOSS_SPIKE, record, since, level, noise)
            return replace(found, evidence={**found.evidence, AT_ONCE: was_usual})
        if self.climb >= self.limit:
            self.climb = 0.0
            return self._found(Cause.DIVERGENCE, record, self.best_step, self.best, noise)
        return None

    def level(self) -> tuple[float, float]:
        """Return the recent level and its noise; NaN while there are too few losses."""
        count = len(self.losses)
        if count < self.fewest:
            return math.nan, math.nan
        level, spread = self.losses.median_and_spread()
        # A few losses say little about the noise: the fewer there are, the more is allowed for.
        # After one, a loss more than eight times as high is a suspicion; after three, four times.
        least = SAME * max(1.0, BLOCK / count) * abs(level)
        learned = NEGLIGIBLE * (min(self.first) - level)  # the others may have exploded
        return level, max(spread, least, learned, sys.float_info.min)

    @property
    def knows_noise(self) -> bool:
        """Whether there are losses enough to measure the noise."""
        return len(self.losses) >= BLOCK

    def ratio_of(self, loss: float) -> float:
        """Return a loss over its level; that of the last one where the level is not known."""
        return self._ratio(loss, *self.level())

    def _ratio(self, loss: float, level: float, noise: float) -> float:
        ratio = 1.0 + (loss - level) / max(abs(level), noise)
        return ratio if math.isfinite(ratio) else self.ratio

    def rebase(self) -> None:
        """Take what comes from now on as the level: the data has changed, the weights are sound."""
        self.losses.clear()
        self.block.clear()
        self.best, self.best_noise = math.inf, 0.0
        self.leap = self.climb = 0.0
        self.is_suspected = False
        self.fewest = FIRST

    def _climb(self, loss: float, noise: float) -> None:
        if math.isinf(self.best):
            return
        z = (loss - self.best) / max(noise, self.best_noise)
        self.climb = max(0.0, self.climb + min(z, self.SLACK) - self.CLIMB_SLACK)

    def _absorb(self, record: Record) -> None:
        self.losses.resize(min(RECENT, max(FEWEST, record.step // 2)))
        self.losses.push(record.loss)
        self.block.push(record.loss)
        if len(self.block) < BLOCK:
            return
        level, spread = self.block.median, self.block.spread
        self.block.clear()
        if level < self.best:
            self.best, self.best_noise, self.best_step = level, spread, record.step
            self.climb = 0.0

    def _found(
        self, cause: Cause, record: Record, since: int, level: float, noise: float
    ) -> Finding:
        self.is_suspected = True
        return Finding(
            cause=cause,
            step=record.step,
            bad_step=since,
            severity=Severity.WARN,
            evidence={"loss": record.loss, "usual_loss": level, "noise": noise},
            wants_proof=True,
        )

    def state(self) -> dict[str, Any]:
        names = ("best_noise", "best_step", "leap", "climb", "leap_step", "ratio", "fewest")
        return {
            "first": list(self.first),
            "latest": list(self.latest),
            "losses": self.losses.values(),
            "block": self.block.values(),
            "best": None if math.isinf(self.best) else self.best,
            "is_suspected": self.is_suspected,
            **{name: getattr(self, name) for name in names},
        }

    def load_state(self, state: dict[str, Any]) -> None:
        if "climb" not in state:
            return  # of version 0.1: learned again
        self.losses = Window(RECENT, state["losses"])
        self.block = Window(BLOCK, state["block"])
        self.is_suspected = state.get("is_suspected", False)
        self.fewest = state.get("fewest", FIRST)
        self.best = math.inf if state["best"] is None else state["best"]
        self.first = list(state["first"])
        self.latest = deque(state.get("latest", ()), maxlen=FIRST)
        for name in ("best_noise", "best_step", "leap", "climb", "leap_step", "ratio"):
            setattr(self, name, state[name])
