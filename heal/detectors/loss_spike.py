"""Finds losses that leapt and stay; losses that pass by themselves are only told."""

import math
from statistics import median
from typing import Any

from heal.causes import Cause, Finding, Severity
from heal.config import HealingConfig
from heal.detectors.robust import LARGEST, Window
from heal.detectors.updates import Updates
from heal.verdict import Record


class LossSpike:
    """Finds losses far above their usual level that stay there.

    A lone spike is a warning: a bad batch is not a bad model. It is damage only if every one of
    ``loss_spike_patience`` losses in a row is a spike, is worse than any level the run ever had,
    that of its start included, and does not come down by itself. Four times the patience is
    given to losses that very hard data could explain: a confident model with new labels does
    worse than an untrained one, but learns. What looks like other data is not damage at all, see
    :class:`heal.detectors.updates.Updates`; it is told once more, and the weights are looked at. So
    losses near zero, whose ratio to their median means nothing, raise no alarm. RL losses may be
    exactly 0 for a long time; these zeros are not counted, so that the first number is not a
    spike. Before there is a window, a loss of a thousand times its first level is damage if the
    gradients grew as well.
    """

    LOSSES, FEWEST = 64, 32
    BLOCK, UPPER = 32, 0.9  # a level is what one loss in ten of a block exceeds
    SPREADS = 8.0  # of noise that count as one "time" of the factor where the level is near zero
    DOWNWARD = 100.0  # times the factor: losses fall by themselves, but not by that much at once
    BEYOND = 1.5  # times the height of the worst level seen: the start of a run is noisy
    HOPELESS = 20.0  # times that height: no data is so hard
    SLOW = 4  # times the patience for what is less
    RECOVERED, RECOVERING = 0.7, 0.9  # share of the leap left when it comes down by itself
    QUIET_STEPS = 100  # between two warnings
    FIRST, EARLY_FACTOR, EARLY_NORM = 4, 1000.0, 100.0

    def __init__(self, config: HealingConfig) -> None:
        self.factor = config.loss_spike_factor
        self.patience = config.loss_spike_patience
        self.losses = Window(self.LOSSES)
        self.block = Window(self.BLOCK)
        self.ceiling = -math.inf
        self.first_losses: list[float] = []
        self.first_norms: list[float] = []
        self.streak = 0
        self.first_step = -1
        self.leap: list[float] = []
        self.leap_norms: list[float] = []
        self.was_harmed = False
        self.updates = Updates()
        self.warned_step = self.asked_step = -self.QUIET_STEPS
        self.ratio = 1.0

    def observe(self, record: Record) -> Finding | None:
        loss = record.loss
        if not record.has_finite_loss or abs(loss) > LARGEST:
            return None
        usual, spread = self._usual()
        if spread <= 0.0:
            self._absorb(loss)
            self.updates.note(record)
            return self._observe_early(record)
        scale = max(abs(usual), self.SPREADS * spread)
        self.ratio = 1.0 + (loss - usual) / scale
        is_spike = self.ratio > self.factor or self.ratio < -self.DOWNWARD * self.factor
        if not is_spike:
            self.streak = 0
            if self.leap:
                self._forget_leap()
            self._absorb(loss)
            self.updates.note(record)
            return None
        known = max(self.ceiling - usual, self.SPREADS * spread)
        is_worst = self.ratio < 0.0 or loss - usual > self.BEYOND * known
        is_hopeless = self.ratio < 0.0 or loss - usual > self.HOPELESS * known
        if not is_worst:
            self._forget_leap()
            self._absorb(loss)
        else:
            if not self.leap:
                self.first_step = record.step
                self.was_harmed = self.updates.may_have_harmed()
            self.leap.append(loss)
            self.leap_norms.append(record.norm)
            if len(self.leap) > self.SLOW * self.patience:
                self._absorb(self.leap.pop(0))
                del self.leap_norms[0]
        self.streak = self.streak + 1 if is_worst else 0
        is_due = is_worst and self.streak % self.patience == 0
        is_other_data = is_due and self._is_other_data(usual)
        is_told_now = is_other_data and record.step - self.asked_step >= self.QUIET_STEPS
        is_due = is_due and (is_hopeless or self.streak >= self.SLOW * self.patience)
        is_damage = is_due and not is_other_data and not self._comes_down(usual, is_hopeless)
        is_quiet = record.step - self.warned_step < self.QUIET_STEPS
        if is_quiet and not (is_damage or is_told_now):
            return None
        self.warned_step = record.step
        evidence: dict[str, object] = {"loss": loss, "usual_loss": usual, "ratio": self.ratio}
        if is_told_now:
            self.asked_step = record.step
            evidence["looks_like_other_data"] = True
        return Finding(
            cause=Cause.LOSS_SPIKE,
            step=record.step,
            # The loss of a step is that of the weights before it.
            bad_step=max(self.first_step - 1, 0),
            severity=Severity.ERROR if is_damage else Severity.WARN,
            evidence=evidence,
            streak=max(self.streak, 1),
        )

    def ratio_of(self, loss: float) -> float:
        """Return a loss over its usual level; that of the last one where it cannot be told."""
        usual, scale = self.level()
        ratio = 1.0 + (loss - usual) / scale
        return ratio if math.isfinite(ratio) else self.ratio

    def level(self) -> tuple[float, float]:
        """Return the usual loss, and what counts as once more of it; NaN while it is not known."""
        usual, spread = self._usual()
        if spread <= 0.0:
            return math.nan, math.nan
        return usual, max(abs(usual), self.SPREADS * spread)

    def _usual(self) -> tuple[float, float]:
        """Return the usual loss and its spread; the latter is 0 while there are too few."""
        usual, spread = self.losses.median_and_spread()
        if len(self.losses) < self.FEWEST:
            return usual, 0.0
        # One that has no noise at all is measured by itself.
        return usual, spread if spread > 0.0 else abs(usual) / self.SPREADS

    def _forget_leap(self) -> None:
        self.leap.clear()
        self.leap_norms.clear()

    def _is_other_data(self, usual: float) -> bool:
        return not self.was_harmed and self.updates.is_other_data(usual, self.leap, self.leap_norms)

    def _comes_down(self, usual: float, is_hopeless: bool) -> bool:
        first, last = self.leap[: self.patience], self.leap[-self.patience :]
        if is_hopeless:
            return abs(last[-1] - usual) < self.RECOVERED * abs(first[0] - usual)
        return median(last) - usual < self.RECOVERING * (median(first) - usual)

    def _observe_early(self, record: Record) -> Finding | None:
        if len(self.first_losses) < self.FIRST:
            self.first_losses.append(record.loss)
            self.first_norms.append(record.norm)
            return None
        level = max(abs(loss) for loss in self.first_losses)
        norm = max(self.first_norms)
        if not abs(record.loss) > self.EARLY_FACTOR * level > 0.0:
            self.streak = 0
            return None
        self.streak += 1
        if not record.norm > self.EARLY_NORM * norm > 0.0 or self.streak % self.patience:
            return None
        self.ratio = abs(record.loss) / level
        return Finding(
            cause=Cause.LOSS_SPIKE,
            step=record.step,
            bad_step=max(record.step - len(self.losses), 0),
            severity=Severity.ERROR,
            evidence={"loss": record.loss, "usual_loss": level, "ratio": self.ratio},
            streak=self.streak,
        )

    def _absorb(self, loss: float) -> None:
        if loss == 0.0:
            return  # says nothing of the level or the noise to come
        self.losses.push(loss)
        self.block.push(loss)
        if len(self.block) == self.BLOCK:
            self.ceiling = max(self.ceiling, self.block.quantile(self.UPPER))
            self.block.clear()

    def state(self) -> dict[str, Any]:
        names = ("streak", "first_step", "warned_step", "ratio")
        return {
            "losses": self.losses.values(),
            "block": self.block.values(),
            "leap": list(self.leap),
            "leap_norms": [n if math.isfinite(n) else 0.0 for n in self.leap_norms],
            "was_harmed": self.was_harmed,
            "asked_step": self.asked_step,
            "updates": self.updates.state(),
            "ceiling": None if math.isinf(self.ceiling) else self.ceiling,
            "first_losses": list(self.first_losses),
            "first_norms": [n if math.isfinite(n) else 0.0 for n in self.first_norms],
            **{name: getattr(self, name) for name in names},
        }

    def load_state(self, state: dict[str, Any]) -> None:
        self.losses = Window(self.LOSSES, state["losses"])
        self.block = Window(self.BLOCK, state["block"])
        self.leap = list(state["leap"])
        self.leap_norms = list(state.get("leap_norms", [0.0] * len(self.leap)))
        self.was_harmed = state.get("was_harmed", False)
        self.asked_step = state.get("asked_step", state["warned_step"])
        self.updates = Updates()
        if "updates" in state:
            self.updates.load_state(state["updates"])
        self.ceiling = -math.inf if state["ceiling"] is None else state["ceiling"]
        self.first_losses = list(state["first_losses"])
        self.first_norms = list(state["first_norms"])
        for name in ("streak", "first_step", "warned_step", "ratio"):
            setattr(self, name, state[name])
