"""Trains the forecast: logistic regression and a small network, on steps of runs.

Needs scikit-learn (``pip install zclip-heal[forecast]``). What comes out is a JSON file of numbers.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from heal.lab.forecast.features import NAMES
from heal.lab.forecast.forecast_watch import Model
from tools.forecast import conformal
from tools.forecast.calibration import HORIZON, steps_within, table
from tools.forecast.dataset import Dataset
from tools.forecast.judge import evidence

KINDS = ("logistic", "network")
LEFT_OUT = ("throughput", "lr_override")
"""Features in no model: the corpus has neither seconds nor schedules that a rate could leave."""

HIDDEN = (12, 6)  # more learn the architectures by heart, and warn in vain on others
MEMORY = 4.0  # steps of evidence
POSITIVES, NEGATIVES = 40_000, 60_000  # steps that are learned from
HARDEST = 3  # steps of each healthy run that the first model found worst
PASSES, FEW_PASSES = 20, 5  # over those steps; of the round that looks for the hardest ones
RATE = 3e-3  # of the first pass; it falls to nothing as a cosine does
DECAY = 1.0  # of the weights, per batch
EXCHANGED = 0.1  # of all numbers are another step's, in every pass anew: no feature is relied upon


def fit(dataset: Dataset, kind: str = "network", seed: int = 0) -> Model:
    """Train on these runs; the model is not calibrated and has no limits yet.

    Two rounds: a false alarm is the worst step of a run, and those are rare. The second round
    learns from the steps of healthy runs that the first would have warned of.
    """
    random = np.random.default_rng(seed)
    labels = np.stack([dataset.labels(run) for run in range(len(dataset))])
    columns = [NAMES.index(name) for name in NAMES if name not in LEFT_OUT]
    positive = _some(np.argwhere(labels == 1), POSITIVES, random)
    negative = _some(np.argwhere(labels == 0), NEGATIVES, random)
    first = _fit_steps(dataset, columns, positive, negative, kind, seed, FEW_PASSES)
    hard = np.where(labels == 0, evidence(first, dataset.features), -np.inf)
    worst = np.argsort(hard, axis=1)[:, -HARDEST:]
    runs = np.repeat(np.arange(len(dataset)), HARDEST)
    mined = np.stack([runs, worst.ravel()], 1)
    mined = mined[np.isfinite(hard[mined[:, 0], mined[:, 1]])]
    negative = np.concatenate([negative, mined])
    return _fit_steps(dataset, columns, positive, negative, kind, seed, PASSES)


def calibrate(model: Model, dataset: Dataset, card: dict[str, Any] | None = None) -> Model:
    """Return the model with limits and a probability, from runs that it was not trained on.

    It has limits only for those shares that so many healthy runs can promise.
    """
    scores = evidence(model, dataset.features)
    highest = scores[dataset.healthy].max(1).tolist()
    shares = conformal.affordable(len(highest))
    levels, chances = table(*steps_within(scores, dataset))
    return replace(
        model,
        limits={share: conformal.limit(highest, share) for share in shares},
        levels=levels,
        chances=chances,
        stretch_steps=int(dataset.features.shape[1]),
        card={**model.card, **(card or {}), "calibration_runs": len(highest)},
    )


def _some(steps: NDArray[np.int64], count: int, random: np.random.Generator) -> NDArray[np.int64]:
    return steps[random.permutation(len(steps))[:count]]


def _fit_steps(
    dataset: Dataset,
    columns: Sequence[int],
    positive: NDArray[np.int64],
    negative: NDArray[np.int64],
    kind: str,
    seed: int,
    passes: int,
) -> Model:
    chosen = np.concatenate([positive, negative])
    x = dataset.features[chosen[:, 0], chosen[:, 1]][:, list(columns)].astype(np.float64)
    y = np.r_[np.ones(len(positive)), np.zeros(len(negative))]
    mean, deviation = x.mean(0), x.std(0)
    scale = 1.0 / np.maximum(deviation, 1e-3)
    x = (x - mean) * scale
    layers = _layers(x, y, kind, seed, passes)
    return Model(
        names=tuple(NAMES[i] for i in columns),
        means=tuple(mean.tolist()),
        scales=tuple(scale.tolist()),
        layers=tuple(
            (tuple(tuple(row) for row in weights.T.tolist()), tuple(biases.tolist()))
            for weights, biases in layers
        ),
        levels=(0.0,),
        chances=(0.5,),
        memory=MEMORY,
        limits={},
        stretch_steps=int(dataset.features.shape[1]),
        card={"kind": kind, "horizon": HORIZON, "training_runs": len(dataset), "seed": seed},
    )


def _layers(
    x: NDArray[np.float64], y: NDArray[np.float64], kind: str, seed: int, passes: int
) -> list[tuple[NDArray[np.float64], NDArray[np.float64]]]:
    """Weights [inputs, outputs] and biases of each layer."""
    import warnings

    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression
    from sklearn.neural_network import MLPClassifier

    if kind == "logistic":
        line = LogisticRegression(C=0.1, max_iter=500).fit(x, y)
        return [(line.coef_.T, line.intercept_)]
    if kind != "network":
        raise ValueError(f"{kind!r} is no model; wanted one of {', '.join(KINDS)}")
    random = np.random.default_rng(seed)
    network = MLPClassifier(
        HIDDEN,
        activation="tanh",
        alpha=DECAY,
        batch_size=min(512, len(x)),
        max_iter=1,
        random_state=seed,
        warm_start=True,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # one epoch a pass is meant
        for done in range(passes):
            rate = 0.5 * RATE * (1.0 + math.cos(math.pi * done / passes))
            network.set_params(learning_rate_init=rate)
            network.fit(_exchanged(x, random), y)
    return list(zip(network.coefs_, network.intercepts_, strict=True))


def _exchanged(x: NDArray[np.float64], random: np.random.Generator) -> NDArray[np.float64]:
    """Return the rows with some numbers taken from other rows, column by column."""
    other = x[random.permutation(len(x))]
    return np.where(random.random(x.shape) < EXCHANGED, other, x)
