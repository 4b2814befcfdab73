"""Judges forecasts on runs, and on architectures, that the model has never seen."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from heal.forecast import conformal
from heal.forecast.dataset import Dataset
from heal.forecast.judge import Judgement, evidence, judge
from heal.forecast.score import Model
from heal.forecast.train import fit, steps_within

TRAINED_SHARE = 0.6  # of the runs that a fold may learn from; the others set its limit
SHARE = 0.02  # of healthy stretches that may have a false warning: the default of HealingConfig
BINS = 10


@dataclass
class Fold:
    """One part of a cross-validation: what was held out, and how its runs were judged."""

    held_out: str
    judgement: Judgement


def cross_validate(
    dataset: Dataset, kind: str, by: str, seed: int = 0, folds: int = 0, share: float = SHARE
) -> list[Fold]:
    """Train without a part of the runs, set the limit without it, and judge it.

    Args:
        dataset: all runs.
        kind: "logistic" or "network".
        by: "architecture" holds out all runs of some; "run" holds out a part of all.
        seed: of the split and the training.
        folds: how many; 0 for one per architecture, or five of runs.
        share: of healthy stretches that may have a false warning, by the limit of the fold.

    Raises:
        ValueError: ``by`` is neither.
    """
    part, told_by = parts(dataset, by, folds, seed)
    told = []
    for number in np.unique(part):
        told += one_fold(dataset, kind, part == number, told_by, seed, share)
    return sorted(told, key=lambda fold: fold.held_out)


def parts(
    dataset: Dataset, by: str, folds: int, seed: int
) -> tuple[NDArray[np.int64], NDArray[np.str_]]:
    """Return the number of the fold of each run, and the name under which it is told."""
    if by == "architecture":
        names = np.unique(dataset.architecture)
        number = np.arange(len(names)) % (folds or len(names))
        return number[np.searchsorted(names, dataset.architecture)], dataset.architecture
    if by == "run":
        part = np.random.default_rng(seed).integers(0, folds or 5, len(dataset))
        return part, np.array([f"fold {n}" for n in part])
    raise ValueError(f"by is {by!r}; wanted 'architecture' or 'run'")


def one_fold(
    dataset: Dataset,
    kind: str,
    held_out: NDArray[np.bool_],
    told_by: NDArray[np.str_],
    seed: int,
    share: float = SHARE,
) -> list[Fold]:
    """Train and set the limit on the other runs, then judge those that are held out."""
    chosen = np.random.default_rng(seed).random(len(dataset)) < TRAINED_SHARE
    model = fit(dataset.part(~held_out & chosen), kind, seed)
    level = conformal.limit(highest(model, dataset.part(~held_out & ~chosen)), share)
    told = []
    for name in np.unique(told_by[held_out]):
        runs = dataset.part(held_out & (told_by == name))
        told.append(Fold(str(name), judge(runs, evidence(model, runs.features), level)))
    return told


def together(folds: list[Fold]) -> Judgement:
    """Return the judgement of all folds as one."""
    total = Judgement()
    for fold in folds:
        total.add(fold.judgement)
    return total


def highest(model: Model, dataset: Dataset) -> list[float]:
    """Return the highest evidence of each healthy run."""
    healthy = dataset.part(dataset.healthy)
    return [float(value) for value in evidence(model, healthy.features).max(1)]


def coverage(model: Model, dataset: Dataset, splits: int = 20, seed: int = 0) -> dict[float, float]:
    """Return, by share, which part of healthy runs stays below the limit: wanted 1 - share.

    Half of the healthy runs set the limits, the others test them; the mean over random splits.
    The model must not have been trained on any of them.
    """
    scores = np.array(highest(model, dataset))
    random = np.random.default_rng(seed)
    shares = conformal.affordable(len(scores) // 2)
    found: dict[float, list[float]] = {share: [] for share in shares}
    for _ in range(splits):
        order = random.permutation(len(scores))
        setting, testing = np.split(scores[order], [len(scores) // 2])
        for share in shares:
            level = conformal.limit(setting.tolist(), share)
            found[share].append(1.0 - conformal.exceeding(testing.tolist(), level))
    return {share: float(np.mean(values)) for share, values in found.items()}


def reliability(model: Model, dataset: Dataset) -> dict[str, Any]:
    """Return how far the calibrated probabilities are from what happened.

    ``error`` is the expected calibration error over ten bins of equal width, ``brier`` the mean
    squared error, ``base`` the share of steps that were followed by damage within the horizon.
    """
    scores, soon = steps_within(model, dataset)
    chance = 1.0 / (1.0 + np.exp(-(model.slope * scores + model.offset)))
    bins = np.minimum((chance * BINS).astype(int), BINS - 1)
    rows = []
    for number in range(BINS):
        inside = bins == number
        if inside.any():
            rows.append(
                (float(chance[inside].mean()), float(soon[inside].mean()), int(inside.sum()))
            )
    error = sum(n * abs(said - was) for said, was, n in rows) / len(scores)
    brier = float(np.mean((chance - soon) ** 2))
    return {"error": error, "brier": brier, "base": float(soon.mean()), "bins": rows}


def summary(told: Judgement) -> dict[str, Any]:
    """Return a judgement as plain numbers."""
    return {
        "detection": told.detection,
        "failures": sum(len(hits) for hits in told.in_time.values()),
        "median_lead": told.median_lead,
        "false_per_10k": told.false_per_10k,
        "healthy_steps": told.healthy_steps,
        "by_kind": {
            kind: {
                "detection": float(np.mean(hits)),
                "failures": len(hits),
                "lead_p10_p50_p90": _quantiles(told.lead.get(kind, [])),
            }
            for kind, hits in sorted(told.in_time.items())
        },
        "false_share_by_kind": {
            kind: float(np.mean(hits)) for kind, hits in sorted(told.false_by_kind.items())
        },
        "instant_warned_before": float(np.mean(told.instant)) if told.instant else float("nan"),
        "instant_failures": len(told.instant),
    }


def _quantiles(values: list[int]) -> list[float]:
    if not values:
        return []
    found: NDArray[np.float64] = np.quantile(values, [0.1, 0.5, 0.9])
    return [float(value) for value in found]
