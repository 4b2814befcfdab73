"""Preference training that goes nowhere or the wrong way. Reads the trainer's log; alerts only."""

import math
from collections.abc import Mapping
from typing import Any, ClassVar

from heal.causes import Cause, Finding, Severity
from heal.config import HealingConfig
from heal.detectors.robust import BLOCK, FAR, MOST, SAME, SPREADS, STANDARD_ERRORS, Window

ACCURACY, MARGIN = "rewards/accuracies", "rewards/margins"


class ChancePlateau:
    """Reports once that a preference loss stays at chance, and that nothing else improves either.

    Every run starts there, so that the loss alone proves nothing: half of ``plateau_steps`` must
    have gone by, and accuracy or margins must say the same. Near chance the loss falls by half of
    what the margin gains, so that a margin within twice ``SAME`` is the same evidence.
    """

    def __init__(self, config: HealingConfig) -> None:
        self.steps = config.plateau_steps // 2
        self.chance = config.chance_loss
        self.lines: list[tuple[int, float, float, float]] = []  # step, loss, accuracy, margin
        self.began: int | None = None
        self.was_reported = False

    def observe(self, step: int, logs: Mapping[str, Any]) -> Finding | None:
        if not self.steps or not self.chance or not {ACCURACY, MARGIN} & set(logs):
            return None
        if "loss" not in logs or logs.get("learning_rate") == 0.0:
            return None
        self.began = step if self.began is None else self.began
        accuracy, margin = logs.get(ACCURACY, math.nan), logs.get(MARGIN, math.nan)
        self.lines.append((step, float(logs["loss"]), float(accuracy), float(margin)))
        while self.lines and self.lines[0][0] <= step - self.steps:
            self.lines.pop(0)
        if step - self.began < self.steps or len(self.lines) < BLOCK:
            return None
        return self._judged(step)

    def _judged(self, step: int) -> Finding | None:
        count = len(self.lines)
        _, loss, accuracy, margin = (
            sum(column) / count for column in zip(*self.lines, strict=True)
        )
        noise = STANDARD_ERRORS * 0.5 / math.sqrt(count)  # as if a line were one toss of a coin
        is_flat = (
            abs(loss - self.chance) < SAME
            and not abs(accuracy - 0.5) > noise
            and not abs(margin) > 2 * SAME
        )
        if not is_flat:
            self.was_reported = False
            return None
        if self.was_reported:
            return None
        self.was_reported = True
        return _warning(
            Cause.PLATEAU,
            step,
            loss=loss,
            accuracy=accuracy,
            margin=margin,
            at_chance=True,
            advice="check that chosen and rejected are not mixed up; a higher LR may help",
        )

    def state(self) -> dict[str, Any]:
        return {
            "lines": [list(line) for line in self.lines],
            "began": self.began,
            "told": self.was_reported,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        self.lines = [tuple(line) for line in state["lines"]]
        self.began, self.was_reported = state["began"], state["told"]


class PreferenceInversion:
    """Reports once that rejected answers win: labels the wrong way round, or a wrong sign."""

    KEYS = ("log_odds_chosen", MARGIN)  # ORPO; DPO, KTO, CPO

    def __init__(self, config: HealingConfig) -> None:
        self.values = Window(BLOCK)
        self.was_reported = False

    def observe(self, step: int, logs: Mapping[str, Any]) -> Finding | None:
        key = next((k for k in self.KEYS if k in logs), None)
        if key is None:
            return None
        self.values.push(float(logs[key]))
        if len(self.values) < BLOCK:
            return None
        error = self.values.spread / math.sqrt(BLOCK)
        if not self.values.median < -STANDARD_ERRORS * error or self.values.quantile(MOST) > 0:
            self.was_reported = False
            return None
        if self.was_reported:
            return None
        self.was_reported = True
        return _warning(
            Cause.PREFERENCE_INVERSION,
            step,
            key=key,
            median=self.values.median,
            advice="see whether chosen and rejected are exchanged in the data",
        )

    def state(self) -> dict[str, Any]:
        return {"values": self.values.values(), "told": self.was_reported}

    def load_state(self, state: dict[str, Any]) -> None:
        self.values = Window(BLOCK, state["values"])
        self.was_reported = state["told"]


def _warning(cause: Cause, step: int, **evidence: Any) -> Finding:
    return Finding(cause=cause, step=step, bad_step=step, severity=Severity.WARN, evidence=evidence)


class LikelihoodCollapse:
    """Reports once that the likelihood of chosen answers is far below its best.

    A preference loss may fall while both answers become unlikely, as long as the rejected one
    falls faster. Some of that is usual; ``FAR`` times the best negative likelihood, over many lines
    of the log and beyond their noise, is not. It is reported again after half of that was regained.
    """

    # Each with the sign that makes it worse when it grows.
    KEYS: ClassVar[Mapping[str, float]] = {"nll_loss": 1.0, "logps/chosen": -1.0}

    def __init__(self, config: HealingConfig) -> None:
        self.recent = {key: Window(BLOCK) for key in self.KEYS}
        self.best: dict[str, float] = {}
        self.was_reported = False

    def observe(self, step: int, logs: Mapping[str, Any]) -> Finding | None:
        worst: Finding | None = None
        for key, sign in self.KEYS.items():
            if key in logs:
                worst = self._observe(step, key, sign * float(logs[key])) or worst
        return worst

    def _observe(self, step: int, key: str, value: float) -> Finding | None:
        recent = self.recent[key]
        recent.push(value)
        if len(recent) < BLOCK:
            return None
        median = recent.median
        best = self.best[key] = min(self.best.get(key, median), median)
        limit = max(FAR * best, best + SPREADS * recent.spread)
        if not median > limit or best <= 0.0:
            self.was_reported = self.was_reported and median > limit / 2
            return None
        if self.was_reported:
            return None
        self.was_reported = True
        return Finding(
            cause=Cause.LIKELIHOOD_COLLAPSE,
            step=step,
            bad_step=step,
            severity=Severity.WARN,
            evidence={
                "key": key,
                "median": self.KEYS[key] * median,
                "best": self.KEYS[key] * best,
                "advice": "lower the LR or beta, or give the likelihood of chosen a weight",
            },
        )

    def state(self) -> dict[str, Any]:
        recent = {key: window.values() for key, window in self.recent.items()}
        return {"recent": recent, "best": dict(self.best), "told": self.was_reported}

    def load_state(self, state: dict[str, Any]) -> None:
        self.recent = {key: Window(BLOCK, state["recent"][key]) for key in self.KEYS}
        self.best, self.was_reported = dict(state["best"]), state["told"]
