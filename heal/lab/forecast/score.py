"""Scores features without any dependency: a small network of plain floats, read from JSON."""

import json
import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from operator import mul
from pathlib import Path
from typing import Any

from heal.lab.forecast.features import NAMES

FORMAT = 2
"""Of the file: a reader rejects another one instead of guessing."""

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


class ModelError(ValueError):
    """A model file is not one that this version can use."""


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
            ModelError: all of them are above it.
        """
        usable = [known for known in self.limits if known <= share * (1.0 + 1e-9)]
        if not usable:
            told = ", ".join(f"{known:g}" for known in self.limits) or "none"
            raise ModelError(f"no limit for a false-alarm share of {share:g}; the model has {told}")
        return self.limits[max(usable)]


def from_json(content: Mapping[str, Any]) -> Model:
    """Return the model of a file's content, as ``tools/forecast`` writes it.

    Raises:
        ModelError: another format, an unknown feature, or shapes that do not fit each other.
    """
    if content.get("format") != FORMAT:
        raise ModelError(f"model format: expected {FORMAT}, got {content.get('format')!r}")
    try:
        names = tuple(str(name) for name in content["names"])
        unknown = [name for name in names if name not in NAMES]
        if unknown:
            raise ModelError(f"feature: expected one of {', '.join(NAMES)}, got {unknown[0]!r}")
        model: dict[str, Any] = {
            "names": names,
            "means": _numbers(content["means"]),
            "scales": _numbers(content["scales"]),
            "layers": tuple(
                (tuple(map(_numbers, layer["weights"])), _numbers(layer["biases"]))
                for layer in content["layers"]
            ),
            "levels": _numbers(content["calibration"]["levels"]),
            "chances": _numbers(content["calibration"]["chances"]),
            "memory": _numbers([content["memory"]])[0],
            "limits": {float(share): float(limit) for share, limit in content["limits"].items()},
            "stretch_steps": int(content["stretch_steps"]),
            "card": dict(content["card"]),
        }
    except (KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"not a model of heal: {error!r}") from error
    _check_shapes(model["layers"], len(names), len(model["means"]), len(model["scales"]))
    _check_table(model["levels"], model["chances"])
    return Model(**model)


def read(path: str | Path = SHIPPED) -> Model:
    """Read a model file; the shipped one by default.

    Raises:
        ModelError: it is not a model.
        OSError: it cannot be read.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{path}: not JSON: {error}") from None
    if not isinstance(content, dict):
        raise ModelError(f"{path}: expected a JSON object, got {type(content).__name__}")
    return from_json(content)


@cache
def shipped() -> Model:
    """Return the model that comes with the package, read once."""
    return read()


def _check_shapes(layers: Sequence[Layer], features: int, means: int, scales: int) -> None:
    width = features
    for depth, (weights, biases) in enumerate(layers):
        if len(biases) != len(weights) or any(len(row) != width for row in weights):
            widths = sorted({len(row) for row in weights})
            raise ModelError(
                f"layer {depth}: expected rows of {width} weights and as many biases as rows, got "
                f"{len(weights)} rows of {widths} weights and {len(biases)} biases"
            )
        width = len(weights)
    if width != 1 or not layers or means != features or scales != features:
        raise ModelError(
            f"expected one mean and one scale per feature ({features}) and layers that end in one "
            f"number, got {means} means, {scales} scales and {len(layers)} layers that end in "
            f"{width}"
        )


def _check_table(levels: Sequence[float], chances: Sequence[float]) -> None:
    rises = all(low < high for low, high in pairwise(levels))
    never_falls = all(low <= high for low, high in pairwise(chances))
    if not levels or len(levels) != len(chances) or not rises or not never_falls:
        raise ModelError(
            "calibration: expected levels that rise, and a chance for each, never less, got "
            f"{str(levels)[:100]} and {str(chances)[:100]}"
        )
    if not 0.0 <= chances[0] <= chances[-1] <= 1.0:
        raise ModelError(
            f"calibration: expected chances from 0 to 1, got {chances[0]:g} to {chances[-1]:g}"
        )


def _numbers(values: Sequence[Any]) -> tuple[float, ...]:
    numbers = tuple(float(value) for value in values)
    if not all(math.isfinite(number) for number in numbers):
        raise ModelError("a weight is NaN or Inf")
    return numbers


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
