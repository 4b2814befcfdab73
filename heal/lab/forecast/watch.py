"""Follows a run and says how it is: healthy, warned of, or failing.

The evidence is a short running mean of the model's log-odds. It may never roll back anything: a
warning takes a snapshot, tightens the clip and has the weights checked more often.
"""

import math
from collections.abc import Sequence
from enum import Enum
from typing import Any

from heal.causes import Cause, Finding, Severity
from heal.lab.forecast.features import CHECK_INTERVAL, Features
from heal.lab.forecast.score import DEFAULT_SHARE, QUIET_STEPS, Hysteresis, Model, shipped
from heal.record import HealthRow, Record

FIRST_STEP = 20  # levels and noise are guesses before it
LOSS_DECAY = 1.0 / 16  # weight of a step in the share of steps with a loss
LEAST_SHARE = 0.5  # of that share: with fewer losses there are eight times the false warnings
SILENT = (
    "forecast: expected the loss of every step, got few or none, so that the forecast is silent; "
    "call healer.step(loss)"
)


class State(str, Enum):
    """How a run is.

    HEALTHY to WARNING: the evidence exceeds its calibrated limit. WARNING to HEALTHY: it has
    stayed well below that for fifty steps. Either to FAILURE: something was found that must be
    acted on, a step was skipped, or the run was rolled back; the forecast itself never says so.
    FAILURE to HEALTHY or WARNING: fifty steps without.
    """

    HEALTHY = "healthy"
    WARNING = "warning"
    FAILURE = "failure"


class ForecastWatch:
    """Turns records into a state; one of the detectors of :class:`heal.detectors.watch.Watch`.

    Args:
        share: of healthy stretches of ``model.stretch_steps`` steps that may have a false warning.
        model: the scorer; the shipped one if None.

    Attributes:
        probability: calibrated chance that the loss doubles soon; NaN in the first steps.
        evidence: what is compared with the limit.
        loss_share: running share of the steps with a loss; where it is low the forecast is silent.
        moves: transitions since the last :meth:`take_moves`: step, from, to.
    """

    check_interval = CHECK_INTERVAL  # steps between checks of the weights in its corpus
    silent = SILENT

    def __init__(self, share: float = DEFAULT_SHARE, model: Model | None = None) -> None:
        self.model = shipped() if model is None else model
        self.switch = Hysteresis(self.model.limit(share))
        self.features = Features()
        self.probability = math.nan
        self.evidence = -math.inf
        self.loss_share = 0.0
        self.failure_steps = 0  # left until a failure is over
        self.owes_warning = False  # one began during a failure
        self.moves: list[tuple[int, State, State]] = []
        self._last = State.HEALTHY

    @property
    def condition(self) -> State:
        """How the run is."""
        if self.failure_steps:
            return State.FAILURE
        return State.WARNING if self.switch.is_on else State.HEALTHY

    @property
    def is_silent(self) -> bool:
        """Whether too few losses come for a forecast."""
        return self.features.steps > FIRST_STEP and self.loss_share < LEAST_SHARE

    def observe(self, record: Record) -> Finding | None:
        """Take in a step, in order; return a warning when one begins.

        One that begins during a failure is returned when that is over, if it lasts so long.
        """
        values = self.features.observe(record)
        self.loss_share += LOSS_DECAY * ((record.loss == record.loss) - self.loss_share)
        self.failure_steps = QUIET_STEPS if record.blocked else max(self.failure_steps - 1, 0)
        if self.features.steps > FIRST_STEP:
            self._judge(values)
        self._note(record.step)
        if not self.owes_warning or self.failure_steps:
            return None
        self.owes_warning = False
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

    def _judge(self, values: Sequence[float]) -> None:
        if self.loss_share < LEAST_SHARE:
            self.probability, self.evidence = math.nan, -math.inf
        else:
            logit = self.model.logit(values)
            if self.evidence == -math.inf:
                self.evidence = logit
            self.evidence += (logit - self.evidence) / self.model.memory
            self.probability = self.model.probability(self.evidence)
        begins = self.switch.observe(self.evidence)
        self.owes_warning = begins or (self.owes_warning and self.switch.is_on)

    def observe_health(self, row: HealthRow) -> None:
        """Take in a check of the weights: how large they are all together."""
        self.features.observe_weights(math.hypot(*row.weight_norms))

    def note_failure(self, step: int) -> None:
        """Note that something must be acted on, or that the run is rolled back."""
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
            **self.switch.state(),
            "failure_steps": self.failure_steps,
            "owes_warning": self.owes_warning,
            "told": self.loss_share,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Remember what :meth:`state` returned, and a failure that is not over.

        A rollback undoes steps, not the failure that led to it. No transition is noted: the run
        was in this condition when the state was saved.
        """
        self.features.load_state(state["features"])
        self.evidence = -math.inf if state["evidence"] is None else state["evidence"]
        self.switch.load_state(state)
        self.failure_steps = max(self.failure_steps, state["failure_steps"])
        self.owes_warning, self.loss_share = state["owes_warning"], state["told"]
        self.probability = math.nan
        self._last = self.condition
