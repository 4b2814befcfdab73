"""Chosen answers that become unlikely: ORPO and CPO log their loss, KTO and DPO their logps."""

from collections.abc import Mapping
from typing import Any, ClassVar

from heal.causes import Cause, Finding, Severity
from heal.config import HealingConfig
from heal.detectors.robust import BLOCK, FAR, SPREADS, Window


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
