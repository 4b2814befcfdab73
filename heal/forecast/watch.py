"""Follows a run and says how it is: healthy, warned of, or failing.

The evidence is a short running mean of the model's log-odds. It may never roll back anything: a
warning takes a snapshot, tightens the clip and has the weights checked more often.
"""

import math
from enum import Enum
from typing import Any

from heal.causes import Cause, Finding, Severity
from heal.config import HealingConfig
from heal.forecast.features import Features
from heal.forecast.hysteresis import QUIET_STEPS, Hysteresis
from heal.forecast.score import Model, shipped
from heal.verdict import HealthRow, Record

FIRST_STEP = 20  # levels and noise are guesses before it


class State(str, Enum):
    """How a run is.

    HEALTHY to WARNING: the evidence exceeds its calibrated limit. WARNING to HEALTHY: it has
    stayed well below that for fifty steps. Either to FAILURE: a detector found damage, or a step
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
        probability: calibrated chance that the loss doubles soon; NaN in the first steps.
        evidence: what is compared with the limit.
        moves: transitions since the last :meth:`take_moves`: step, from, to.
    """

    def __init__(self, share: float = 0.05, model: Model | None = None) -> None:
        self.model = shipped() if model is None else model
        self.switch = Hysteresis(self.model.limit(share))
        self.features = Features()
        self.probability = math.nan
        self.evidence = -math.inf
        self.failure_steps = 0  # left until a failure is over
        self.moves: list[tuple[int, State, State]] = []
        self._last = State.HEALTHY

    @classmethod
    def of(cls, config: HealingConfig) -> "ForecastWatch":
        """Return the watch that the settings ask for."""
        return cls(config.forecast_false_alarms)

    @property
    def condition(self) -> State:
        """How the run is."""
        if self.failure_steps:
            return State.FAILURE
        return State.WARNING if self.switch.is_on else State.HEALTHY

    def observe(self, record: Record) -> Finding | None:
        """Hear of a step, in order; return a warning when one begins."""
        values = self.features.observe(record)
        self.failure_steps = QUIET_STEPS if record.blocked else max(self.failure_steps - 1, 0)
        begins = False
        if self.features.steps > FIRST_STEP:
            logit = self.model.logit(values)
            self.probability = self.model.probability(logit)
            if self.evidence == -math.inf:
                self.evidence = logit
            self.evidence += (logit - self.evidence) / self.model.memory
            begins = self.switch.observe(self.evidence)
        self._note(record.step)
        if not begins or self.failure_steps:
            return None
        return Finding(
            cause=Cause.INSTABILITY_AHEAD,
            step=record.step,
            bad_step=record.step,
            severity=Severity.WARN,
            evidence={
                "probability": self.probability,
                "evidence": self.evidence,
                "limit": self.switch.limit,
            },
        )

    def observe_health(self, row: HealthRow) -> None:
        """Hear of a check of the weights: how large they are all together."""
        self.features.hear_weights(math.hypot(*row.weight_norms))

    def note_failure(self, step: int) -> None:
        """Hear that a detector found damage."""
        self.failure_steps = QUIET_STEPS
        self._note(step)

    def take_moves(self) -> list[tuple[int, State, State]]:
        """Return the transitions since the last call, for the journal."""
        moves, self.moves = self.moves, []
        return moves

    def _note(self, step: int) -> None:
        now = self.condition
        if now is not self._last:
            self.moves.append((step, self._last, now))
            self._last = now

    def state(self) -> dict[str, Any]:
        """Return all that is remembered, as values that JSON has."""
        return {
            "features": self.features.state(),
            "evidence": None if self.evidence == -math.inf else self.evidence,
            "is_on": self.switch.is_on,
            "quiet": self.switch.quiet,
            "failure_steps": self.failure_steps,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Remember what :meth:`state` returned, and nothing else."""
        self.features.load_state(state["features"])
        self.evidence = -math.inf if state["evidence"] is None else state["evidence"]
        self.switch.is_on = state["is_on"]
        self.switch.quiet = state["quiet"]
        self.failure_steps = state["failure_steps"]
        self.probability = math.nan
