"""Reads a model file of the forecast, and rejects what is none."""

import json
import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from heal.lab.forecast.features import NAMES
from heal.lab.forecast.forecast_watch import FORMAT, SHIPPED, Layer, Model, from_json


class ModelError(ValueError):
    """A model file is not one that this version can use."""


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
    return checked(content)


def checked(content: Mapping[str, Any]) -> Model:
    """Return the model of a file's content.

    Raises:
        ModelError: another format, an unknown feature, or shapes that do not fit each other.
    """
    if content.get("format") != FORMAT:
        raise ModelError(f"model format: expected {FORMAT}, got {content.get('format')!r}")
    try:
        names, table = content["names"], content["calibration"]
        layers = [(layer["weights"], layer["biases"]) for layer in content["layers"]]
        parts = [content["means"], content["scales"], table["levels"], table["chances"]]
        parts += [row for weights, biases in layers for row in (*weights, biases)]
        is_finite = all(math.isfinite(number) for part in parts for number in part)
    except (KeyError, TypeError) as error:
        raise ModelError(f"not a model of heal: {error!r}") from error
    unknown = [name for name in names if name not in NAMES]
    if unknown:
        raise ModelError(f"feature: expected one of {', '.join(NAMES)}, got {unknown[0]!r}")
    if not is_finite:
        raise ModelError("a weight is NaN or Inf")
    _check_shapes(layers, len(names), len(content["means"]), len(content["scales"]))
    _check_table(table["levels"], table["chances"])
    return from_json(content)


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
