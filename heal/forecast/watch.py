"""Follows a run and says how it is: healthy, warned of, or failing, with hysteresis.

Evidence is a running sum of the model's log-odds that starts anew at zero (Page's CUSUM): a few
odd steps leave no mark, many of them add up. It may never roll back anything: a warning takes a
snapshot, tightens the clip and has the weights checked more often.
"""

import math
from enum import Enum
from typing import Any

from heal.causes import Cause, Finding, Severity
from heal.config import HealingConfig
from heal.forecast.features import Features
from heal.forecast.score import Model, shipped
from heal.verdict import Record

FIRST_STEP = 20  # levels and noise are guesses before it
CLEAR = 0.5  # share of the limit below which evidence must stay to end a warning
QUIET_STEPS = 50  # for so long


class State(str, Enum):
    """How a run is.

    HEALTHY to WARNING: the evidence exceeds its calibrated limit. WARNING to HEALTHY: it has
    stayed below half of it for fifty steps. Either to FAILURE: a detector found damage, or a step
    was refused; the forecast itself never says so. FAILURE to HEALTHY: fifty steps without.
    """

    HEALTHY = "healthy"
    WARNING = "warning"
    FAILURE = "failure"


class ForecastWatch:
    """Turns records into a state; one of the detectors of :class:`heal.detect.Watch`.

    Args:
        share: of healthy stretches of ``model.stretch_steps`` steps that may have a false warning.
        model: the scorer; the shipped one if None.

    Attributes:
        state_name: how the run is.
        probability: calibrated chance that the loss doubles soon; NaN in the first steps.
        evidence: the running sum that is compared with the limit.
    """

    def __init__(self, share: float = 0.05, model: Model | None = None) -> None:
        self.model = shipped() if model is None else model
        self.limit = self.model.limit(share)
        self.features = Features()
        self.state_name = State.HEALTHY
        self.probability = math.nan
        self.evidence = 0.0
        self.quiet = 0
        self.since = -1

    @classmethod
    def of(cls, config: HealingConfig) -> "ForecastWatch":
        """Return the watch that the settings ask for."""
        return cls(config.forecast_false_alarms)

    def observe(self, record: Record) -> Finding | None:
        """Hear of a step, in order; return a warning when one begins."""
        values = self.features.observe(record)
        if self.features.steps <= FIRST_STEP:
            return None
        logit = self.model.logit(values)
        self.probability = self.model.probability(logit)
        grown = self.evidence + logit - self.model.drift
        self.evidence = min(max(grown, 0.0), self.model.ceiling)
        return self._move(record)

    def note_failure(self, step: int) -> bool:
        """Hear that a detector found damage; return whether that is news."""
        is_news = self.state_name is not State.FAILURE
        if is_news:
            self.state_name, self.since = State.FAILURE, step
        self.quiet = 0
        return is_news

    def _move(self, record: Record) -> Finding | None:
        if record.blocked:
            self.quiet = 0
        elif self.state_name is State.FAILURE:
            self.quiet += 1
        else:
            self.quiet = self.quiet + 1 if self.evidence < CLEAR * self.limit else 0
        if self.state_name is State.HEALTHY:
            if self.evidence <= self.limit:
                return None
            self.state_name, self.since = State.WARNING, record.step
            return self._warning(record)
        if self.quiet >= QUIET_STEPS:
            self.state_name, self.since, self.quiet = State.HEALTHY, record.step, 0
        return None

    def _warning(self, record: Record) -> Finding:
        return Finding(
            cause=Cause.INSTABILITY_AHEAD,
            step=record.step,
            bad_step=record.step,
            severity=Severity.WARN,
            evidence={
                "probability": self.probability,
                "evidence": self.evidence,
                "limit": self.limit,
            },
        )

    def state(self) -> dict[str, Any]:
        """Return all that is remembered, as values that JSON has."""
        return {
            "features": self.features.state(),
            "state": self.state_name.value,
            "evidence": self.evidence,
            "quiet": self.quiet,
            "since": self.since,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Remember what :meth:`state` returned, and nothing else."""
        self.features.load_state(state["features"])
        self.state_name = State(state["state"])
        self.evidence = state["evidence"]
        self.quiet = state["quiet"]
        self.since = state["since"]
        self.probability = math.nan
