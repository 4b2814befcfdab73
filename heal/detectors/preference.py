"""Preference training that goes nowhere, or the wrong way. Fed from the trainer's log; alerts."""

import math
from collections.abc import Mapping
from typing import Any

from heal.causes import Cause, Finding, Severity
from heal.config import HealingConfig
from heal.detectors.robust import Window

ACCURACY, MARGIN = "rewards/accuracies", "rewards/margins"


class ChancePlateau:
    """Tells once that a preference loss stays at chance, and that nothing else improves either.

    Every run starts there, so that the loss alone proves nothing: half of ``plateau_steps`` must
    have gone by, and accuracy or margins must say the same.
    """

    LINES = 20  # of the log, at least this many within the steps that are judged
    LOSS_MARGIN = 0.01  # of chance: a run that learns leaves it
    STANDARD_ERRORS = 3.0  # within which an accuracy is still that of a coin
    ODDS_MARGIN = 0.02  # rewards further apart than this on average are learned, not noise

    def __init__(self, config: HealingConfig) -> None:
        self.steps = config.plateau_steps // 2
        self.chance = config.chance_loss
        self.lines: list[tuple[int, float, float, float]] = []  # step, loss, accuracy, margin
        self.began: int | None = None
        self.told = False

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
        if step - self.began < self.steps or len(self.lines) < self.LINES:
            return None
        return self._judged(step)

    def _judged(self, step: int) -> Finding | None:
        count = len(self.lines)
        loss, accuracy, margin = (sum(line[i] for line in self.lines) / count for i in (1, 2, 3))
        noise = self.STANDARD_ERRORS * 0.5 / math.sqrt(count)  # as if a line were one toss
        is_flat = (
            abs(loss - self.chance) < self.LOSS_MARGIN
            and not abs(accuracy - 0.5) > noise
            and not abs(margin) > self.ODDS_MARGIN
        )
        if not is_flat:
            self.told = False
            return None
        if self.told:
            return None
        self.told = True
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
            "told": self.told,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        self.lines = [tuple(line) for line in state["lines"]]
        self.began, self.told = state["began"], state["told"]


class PreferenceInversion:
    """Tells once that the rejected answers win: labels the wrong way round, or a wrong sign."""

    KEYS = ("log_odds_chosen", MARGIN)  # ORPO; DPO, KTO, CPO
    LINES = 20
    STANDARD_ERRORS = 4.0

    def __init__(self, config: HealingConfig) -> None:
        self.values = Window(self.LINES)
        self.told = False

    def observe(self, step: int, logs: Mapping[str, Any]) -> Finding | None:
        key = next((k for k in self.KEYS if k in logs), None)
        if key is None:
            return None
        self.values.push(float(logs[key]))
        if len(self.values) < self.LINES:
            return None
        error = self.values.spread / math.sqrt(self.LINES)
        if not self.values.median < -self.STANDARD_ERRORS * error or self.values.quantile(0.9) > 0:
            self.told = False
            return None
        if self.told:
            return None
        self.told = True
        return _warning(
            Cause.PREFERENCE_INVERSION,
            step,
            key=key,
            median=self.values.median,
            advice="see whether chosen and rejected are exchanged in the data",
        )

    def state(self) -> dict[str, Any]:
        return {"values": self.values.values(), "told": self.told}

    def load_state(self, state: dict[str, Any]) -> None:
        self.values = Window(self.LINES, state["values"])
        self.told = state["told"]


def _warning(cause: Cause, step: int, **evidence: Any) -> Finding:
    return Finding(cause=cause, step=step, bad_step=step, severity=Severity.WARN, evidence=evidence)
