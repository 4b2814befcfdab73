"""From records to what a classifier learns: features of every step, labels, and which to use.

A step of a slow fault is positive from ``SEEN_AFTER`` of the way between onset and damage on:
before that little can be seen, and after the damage there is nothing to forecast. Steps of healthy
runs, and those before a fault, are negative.
"""

import math
import multiprocessing
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from heal.lab.forecast.features import CHECK_INTERVAL, NAMES, Features
from heal.lab.forecast.forecast_watch import FIRST_STEP
from heal.record import NO_FLAG, Flag, Record
from tools.forecast.corpus import damaged_at, failed
from tools.forecast.scenarios import SLOW
from tools.forecast.simulate import Streams

SEEN_AFTER = 0.5


@dataclass
class Dataset:
    """Features of every step of every run, and what became of the runs.

    ``damage`` is the step at which the loss of a slow fault had doubled; -1 if it never did, or if
    the fault was of another kind.
    """

    features: NDArray[np.float32]  # [runs, steps, features]
    architecture: NDArray[np.str_]
    kind: NDArray[np.str_]
    onset: NDArray[np.int64]
    damage: NDArray[np.int64]
    healthy: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.kind)

    @property
    def slow(self) -> NDArray[np.bool_]:
        """The runs whose loss doubled by a slow fault."""
        return self.damage >= 0

    def part(self, which: NDArray[np.bool_]) -> "Dataset":
        """Return some of the runs."""
        return Dataset(*(getattr(self, name)[which] for name in self.__dataclass_fields__))

    def joined(self, other: "Dataset") -> "Dataset":
        """Return the runs of both."""
        names = self.__dataclass_fields__
        return Dataset(*(np.concatenate([getattr(self, n), getattr(other, n)]) for n in names))

    def labels(self, run: int) -> NDArray[np.int8]:
        """Return 1, 0, or -1 for steps to leave out, for every step of a run."""
        labels = np.zeros(self.features.shape[1], np.int8)
        labels[:FIRST_STEP] = -1
        if self.onset[run] >= 0:
            onset, damage = int(self.onset[run]), int(self.damage[run])
            labels[onset:] = -1
            if damage >= 0:
                labels[onset + math.ceil(SEEN_AFTER * (damage - onset)) : damage] = 1
        elif not self.healthy[run]:
            labels[:] = -1
        return labels


def build(streams: Streams, processes: int = 1) -> Dataset:
    """Follow every run with :class:`Features`, the very code that runs beside training."""
    rows = list(streams.records)
    if processes == 1:
        features = [features_of(row) for row in rows]
    else:
        context = multiprocessing.get_context("spawn")
        with context.Pool(processes) as pool:
            features = pool.map(features_of, rows, chunksize=64)
    damage = np.array(
        [
            damaged_at(rows[run][:, 0], int(streams.onset[run])) if kind in SLOW else -1
            for run, kind in enumerate(streams.kind)
        ]
    )
    return Dataset(
        np.stack(features),
        np.array(streams.architecture),
        np.array(streams.kind),
        streams.onset,
        damage,
        (streams.onset < 0) & ~failed(streams),
    )


def features_of(records: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return float32 [steps, features] of one run's records; their columns are those of
    :data:`tools.forecast.simulate.COLUMNS`.
    """
    followed = Features()
    out = np.empty((len(records), len(NAMES)), np.float32)
    for step, row in enumerate(records.tolist()):
        loss, norm, clipped_norm, lr, clipped, blocked, weight_norm = row
        flags = Flag.CLIPPED if clipped > 0 else NO_FLAG
        out[step] = followed.observe(
            Record(step, flags, blocked > 0, norm, clipped_norm, loss=loss, lr=lr)
        )
        if step % CHECK_INTERVAL == 0:
            followed.observe_weights(weight_norm)
    return out
