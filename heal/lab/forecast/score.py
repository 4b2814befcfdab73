"""Scores features without any dependency: a small network of plain floats, read from JSON."""

import json
import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from operator import mul
from pathlib import Path
from typing import Any

from heal.lab.forecast.features import NAMES

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


@dataclass(frozen=True, slots=True)
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
    indices: tuple[int, ...] = field(init=False, repr=False, compare=False)
    folded: tuple[Layer, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Fold the standardisation into the first layer: a fifth of the work of every step."""
        object.__setattr__(self, "indices", tuple(map(NAMES.index, self.names)))
        weights, biases = self.layers[0]
        rows = tuple(tuple(map(mul, row, self.scales)) for row in weights)
        shifts = (sum(map(mul, row, self.means)) for row in rows)
        first = rows, tuple(bias - shift for bias, shift in zip(biases, shifts, strict=True))
        object.__setattr__(self, "folded", (first, *self.layers[1:]))

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
