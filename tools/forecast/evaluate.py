"""Judges forecasts on runs, and on architectures, that the model has never seen."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from heal.lab.forecast.forecast_watch import DEFAULT_SHARE, Model
from tools.forecast.calibration import Reliability, reliability
from tools.forecast.dataset import Dataset
from tools.forecast.judge import Judgement, evidence, judge
from tools.forecast.train import calibrate, fit

TRAINED_SHARE = 0.6  # of the runs that a fold may learn from; the others calibrate its model


@dataclass
class Fold:
    """One part of a cross-validation: what was held out, and how its runs were judged.

    Attributes:
        held_out: the name of what was held out.
        by_share: by share of false alarms that the limit was set for.
        below: by share, how many healthy runs stayed below its limit, of ``healthy``.
        reliability: what was said of steps, and what came.
    """

    held_out: str
    by_share: dict[float, Judgement]
    reliability: Reliability
    below: dict[float, int] = field(default_factory=dict)
    healthy: int = 0


def cross_validate(
    dataset: Dataset, kind: str, by: str, seed: int = 0, folds: int = 0
) -> list[Fold]:
    """Train without a part of the runs, calibrate without it, and judge it.

    Args:
        dataset: all runs.
        kind: "logistic" or "network".
        by: "architecture" holds out all runs of some; "run" holds out a part of all.
        seed: of the split and the training.
        folds: how many; 0 for one per architecture, or five of runs.

    Raises:
        ValueError: ``by`` is neither.
    """
    part, told_by = parts(dataset, by, folds, seed)
    told = []
    for number in np.unique(part):
        told += one_fold(dataset, kind, part == number, told_by, seed)
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
) -> list[Fold]:
    """Train and calibrate on the other runs, then judge those that are held out."""
    chosen = np.random.default_rng(seed).random(len(dataset)) < TRAINED_SHARE
    model = fit(dataset.part(~held_out & chosen), kind, seed)
    model = calibrate(model, dataset.part(~held_out & ~chosen))
    return judged(model, dataset.part(held_out), told_by[held_out])


def judged(model: Model, runs: Dataset, told_by: NDArray[np.str_]) -> list[Fold]:
    """Judge a calibrated model on runs that are not those it was made from, by name."""
    told = []
    for name in np.unique(told_by):
        some = runs.part(told_by == name)
        scores = evidence(model, some.features)
        highest = scores[some.healthy].max(1)
        told.append(
            Fold(
                str(name),
                {share: judge(some, scores, limit) for share, limit in model.limits.items()},
                reliability(model, scores, some),
                {s: int((highest <= limit).sum()) for s, limit in model.limits.items()},
                int(some.healthy.sum()),
            )
        )
    return told


def together(folds: list[Fold], share: float = DEFAULT_SHARE) -> Judgement:
    """Return the judgement of all folds as one, with the limits for a share."""
    total = Judgement()
    for fold in folds:
        total.add(fold.by_share[share])
    return total
