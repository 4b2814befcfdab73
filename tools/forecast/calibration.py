"""From evidence to a probability that holds: a monotone table, and how far it is off.

The event is that the loss doubles within the next ``HORIZON`` steps, as
:func:`tools.forecast.corpus.damaged_at` has it. Steps of a slow fault whose loss never doubles
count as steps without the event, up to ``HORIZON`` steps before the end of the run, from where on
nobody knows. Left out are steps after the damage, and those after an instant fault.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from heal.lab.forecast.forecast_watch import FIRST_STEP, Model
from tools.forecast.dataset import Dataset
from tools.forecast.intervals import HIGH, LOW, drawn
from tools.forecast.scenarios import SLOW

HORIZON = 50  # steps ahead that the probability speaks of
KNOTS = 24  # of the table: each has as many events as every other
EDGES = np.array([0.01, 0.02, 0.05, *np.arange(1, 10) / 10])  # between bins of probability
ATTENTION = int(np.searchsorted(EDGES, 0.1, "right"))  # the first bin of those from 0.1 on


def steps_within(
    evidence_of: NDArray[np.float32], dataset: Dataset
) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
    """Return the evidence of every step that counts, and whether the event came."""
    every, soon = [], []
    for run in range(len(dataset)):
        onset, damage = int(dataset.onset[run]), int(dataset.damage[run])
        if onset < 0 and not dataset.healthy[run]:
            continue
        end = evidence_of.shape[1]
        if damage >= 0:
            end = damage
        elif dataset.kind[run] in SLOW:
            end -= HORIZON
        elif onset >= 0:
            end = onset
        steps = np.arange(FIRST_STEP, end)
        every.append(evidence_of[run, FIRST_STEP:end])
        soon.append((steps >= damage - HORIZON) & (damage >= 0))
    return np.concatenate(every), np.concatenate(soon)


def table(
    evidence_of: NDArray[np.float32], soon: NDArray[np.bool_]
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return levels of evidence, and the chance at each: isotonic regression over bins.

    Bins hold as many events as each other, so that the table is fine where events are.
    """
    from sklearn.isotonic import IsotonicRegression

    order = np.argsort(evidence_of, kind="stable")
    level, came = evidence_of[order].astype(np.float64), soon[order]
    happened = np.cumsum(came)
    cuts = np.searchsorted(happened, np.linspace(0, happened[-1], KNOTS + 1)[1:-1], "right")
    parts = [p for p in np.split(np.arange(len(level)), np.unique(cuts)) if len(p)]
    means = np.array([level[p].mean() for p in parts])
    rates = np.array([came[p].mean() for p in parts])
    sizes = np.array([len(p) for p in parts])
    means, first = np.unique(means, return_index=True)
    chances = IsotonicRegression().fit_transform(means, rates[first], sample_weight=sizes[first])
    return tuple(means.tolist()), tuple(np.clip(chances, 0.0, 1.0).tolist())


def chances(model: Model, evidence_of: NDArray[np.float32]) -> NDArray[np.float64]:
    """As :meth:`Model.probability`, for arrays."""
    return np.asarray(np.interp(evidence_of.astype(np.float64), model.levels, model.chances))


@dataclass
class Reliability:
    """Sums over steps, by bin of what was said: float64 [bins, (said, was, steps)], and errors."""

    bins: NDArray[np.float64]
    squared_error: float

    @property
    def row(self) -> NDArray[np.float64]:
        """All sums as one vector."""
        return np.append(self.bins.ravel(), self.squared_error)


def reliability(model: Model, evidence_of: NDArray[np.float32], dataset: Dataset) -> Reliability:
    """Compare what is said of every step with what came."""
    level, soon = steps_within(evidence_of, dataset)
    said = chances(model, level)
    number = np.searchsorted(EDGES, said, "right")
    sums = [np.bincount(number, weights, len(EDGES) + 1) for weights in (said, soon, None)]
    return Reliability(np.stack(sums, 1).astype(np.float64), float(np.sum((said - soon) ** 2)))


def told(clusters: Sequence[Reliability]) -> dict[str, Any]:
    """Return the table and its errors as plain numbers, with intervals over clusters.

    ``error`` is the mean distance of said and was over all bins, weighted by steps; ``error_above``
    that over the bins above 0.1; ``skill`` one minus the squared error over that of saying the base
    rate to every step.
    """
    rows = np.stack([one.row for one in clusters])
    total = rows.sum(0)
    draws = np.stack([rows[chosen].sum(0) for chosen in drawn(len(rows))])
    found = {
        name: [measure(total), *_interval([measure(draw) for draw in draws])]
        for name, measure in MEASURES.items()
    }
    bins = [
        [said / steps, was / steps, int(steps)]
        for said, was, steps in total[:-1].reshape(-1, 3)
        if steps
    ]
    return {**found, "bins": bins, "horizon": HORIZON}


def _error(sums: NDArray[np.float64], first: int = 0) -> float:
    bins = sums[:-1].reshape(-1, 3)[first:]
    return float(np.abs(bins[:, 0] - bins[:, 1]).sum() / max(bins[:, 2].sum(), 1.0))


def _skill(sums: NDArray[np.float64]) -> float:
    bins = sums[:-1].reshape(-1, 3)
    steps, base = bins[:, 2].sum(), _base(sums)
    usual = steps * base * (1.0 - base)
    return float(1.0 - sums[-1] / usual) if usual > 0 else float("nan")


def _base(sums: NDArray[np.float64]) -> float:
    bins = sums[:-1].reshape(-1, 3)
    return float(bins[:, 1].sum() / max(bins[:, 2].sum(), 1.0))


MEASURES = {
    "error": _error,
    "error_above": lambda sums: _error(sums, first=ATTENTION),
    "skill": _skill,
    "base": _base,
}


def _interval(values: Sequence[float]) -> list[float]:
    low, high = np.nanquantile(values, [LOW, HIGH])
    return [float(low), float(high)]
