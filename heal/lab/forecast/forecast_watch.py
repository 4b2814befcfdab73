"""Follows a run and says how it is: healthy, warned of, or failing.

A small network of plain floats, read from JSON, turns features into log-odds; the evidence is a
short running mean of these. It may never roll back anything: a warning takes a snapshot, tightens
the clip and has the weights checked more often.
"""

import json
import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache, cached_property
from operator import mul
from pathlib import Path
from typing import Any

from heal.causes import Cause, Finding, Severity
from heal.lab.forecast.features import CHECK_INTERVAL, NAMES, Features
from heal.record import HealthRow, Record

FORMAT = 2
"""Of the file; ``tools/forecast`` rejects another one instead of guessing."""

SHIPPED = Path(__file__).with_name("model.json")
LARGEST_LOGIT = 30.0


def plain_sumprod(first: Sequence[float], second: Sequence[float]) -> float:
    """Return the sum of products, as ``math.sumprod`` of Python 3.12 does in half the time."""
    return sum(map(mul, first, second), 0.0)


SUMPROD: Callable[[Sequence[float], Sequence[float]], float] = getattr(
    math, "sumprod", plain_sumprod
)

Layer = tuple[tuple[tuple[float, ...], ...], tuple[float, ...]]
"""Rows of weights, and a bias for each."""


@dataclass(frozen=True)
class Model:
    """Standardise, then layers of weights with tanh between them: log-odds.

    Evidence is their mean over about ``memory`` steps. ``levels`` and ``chances`` are a table from
    evidence to probability. ``limits`` has, by share of healthy stretches of ``stretch_steps``
    steps that may raise a false alarm, the evidence from which one is raised.
    """

    names: tuple[str, ...]
    means: tuple[float, ...]
    scales: tuple[float, ...]  # reciprocal standard deviations
    layers: tuple[Layer, ...]
    levels: tuple[float, ...]  # of evidence, rising
    chances: tuple[float, ...]  # at each of them, never falling
    memory: float
    limits: dict[float, float]
    stretch_steps: int
    card: dict[str, Any]

    @cached_property
    def indices(self) -> tuple[int, ...]:
        """Where its features are among all."""
        return tuple(map(NAMES.index, self.names))

    @cached_property
    def folded(self) -> tuple[Layer, ...]:
        """The layers, with the standardisation in the first: that is a fifth less work per step."""
        weights, biases = self.layers[0]
        rows = tuple(tuple(map(mul, row, self.scales)) for row in weights)
        shifts = (sum(map(mul, row, self.means)) for row in rows)
        first = rows, tuple(bias - shift for bias, shift in zip(biases, shifts, strict=True))
        return (first, *self.layers[1:])

    def logit(self, features: Sequence[float]) -> float:
        """Return the log-odds of failure soon, not calibrated."""
        values = [features[i] for i in self.indices]
        for depth, (rows, biases) in enumerate(self.folded):
            values = list(map(math.tanh, values)) if depth else values
            values = [SUMPROD(row, values) + bias for row, bias in zip(rows, biases)]  # noqa: B905
        return min(max(values[0], -LARGEST_LOGIT), LARGEST_LOGIT)

    def probability(self, evidence: float) -> float:
        """Return the calibrated chance that the loss doubles within the horizon of the card."""
        levels, chances = self.levels, self.chances
        above = bisect_right(levels, evidence)
        if above == 0:
            return chances[0]
        if above == len(levels):
            return chances[-1]
        low, high = levels[above - 1], levels[above]
        share = (evidence - low) / (high - low)
        return chances[above - 1] + share * (chances[above] - chances[above - 1])

    def limit(self, share: float) -> float:
        """Return the evidence for an alarm if this share of healthy stretches may have a false one.

        Of the shares that the model was calibrated for, the largest that is not above it is taken.

        Raises:
            ValueError: all of them are above it.
        """
        usable = [known for known in self.limits if known <= share * (1.0 + 1e-9)]
        if not usable:
            known = ", ".join(f"{known:g}" for known in self.limits) or "none"
            raise ValueError(
                f"share: expected one for which the model has a limit ({known}), got {share:g}"
            )
        return self.limits[max(usable)]


def from_json(content: Mapping[str, Any]) -> Model:
    """Return the model of a file's content, as ``tools/forecast`` has checked and written it."""
    layers = [(layer["weights"], layer["biases"]) for layer in content["layers"]]
    return Model(
        names=tuple(content["names"]),
        means=tuple(content["means"]),
        scales=tuple(content["scales"]),
        layers=tuple((tuple(map(tuple, rows)), tuple(biases)) for rows, biases in layers),
        levels=tuple(content["calibration"]["levels"]),
        chances=tuple(content["calibration"]["chances"]),
        memory=float(content["memory"]),
        limits={float(share): limit for share, limit in content["limits"].items()},
        stretch_steps=content["stretch_steps"],
        card=content["card"],
    )


@cache
def shipped() -> Model:
    """Return the model that comes with the package, read once."""
    return from_json(json.loads(SHIPPED.read_text(encoding="utf-8")))


DEFAULT_SHARE = 0.02
"""One false warning in 10,000 steps is a share of 0.05 of stretches of 500, on runs like those of
the calibration; this leaves room for runs that are unlike them."""

CLEAR_MARGIN = 2.0  # log-odds below the limit that evidence must stay to end a warning
QUIET_STEPS = 50  # for so long


class Hysteresis:
    """A switch that goes on above ``limit`` and off after a quiet while well below it.

    Attributes:
        is_on: whether there is a warning.
    """

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self.is_on = False
        self.quiet = 0

    def observe(self, evidence: float) -> bool:
        """Take in a step; return whether a warning begins with it."""
        if not self.is_on:
            self.is_on = evidence > self.limit
            self.quiet = 0
            return self.is_on
        self.quiet = self.quiet + 1 if evidence < self.limit - CLEAR_MARGIN else 0
        if self.quiet >= QUIET_STEPS:
            self.is_on = False
        return False

    def state(self) -> dict[str, Any]:
        """Return all that is remembered, as values that JSON has."""
        return {"is_on": self.is_on, "quiet": self.quiet}

    def load_state(self, state: dict[str, Any]) -> None:
        """Remember what :meth:`state` returned."""
        self.is_on, self.quiet = state["is_on"], state["quiet"]


FIRST_STEP = 20  # levels and noise are guesses before it
LOSS_DECAY = 1.0 / 16  # weight of a step in the share of steps with a loss
LEAST_SHARE = 0.5  # of that share: with fewer losses there are eight times the false warnings


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
    """Turns records into a state by a model, the shipped one if None; one of the detectors.

    Attributes:
        probability: calibrated chance that the loss doubles soon; NaN in the first steps.
        evidence: what is compared with the limit.
        loss_share: running share of the steps with a loss; where it is low the forecast is silent.
        moves: transitions since the last :meth:`take_moves`: step, from, to.
    """

    check_interval = CHECK_INTERVAL  # steps between checks of the weights in its corpus
    silent = (
        "forecast: expected the loss of every step, got few or none, so that the forecast is "
        "silent; call healer.step(loss)"
    )

    def __init__(self, model: Model | None = None) -> None:
        self.model = shipped() if model is None else model
        self.switch = Hysteresis(self.model.limit(DEFAULT_SHARE))
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
