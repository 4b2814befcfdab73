"""Intervals for numbers that come from clusters: runs of one architecture resemble each other."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

DRAWS = 4000
LOW, HIGH = 0.025, 0.975  # of the draws: an interval of 95 %


def ratio_interval(
    numerators: Sequence[float], denominators: Sequence[float], seed: int = 0
) -> tuple[float, float]:
    """Return the bootstrap interval of a ratio of sums, whole clusters being drawn.

    Args:
        numerators: of each cluster, such as the failures that were warned of.
        denominators: of each cluster, such as all its failures; some may be 0.
        seed: of the draws.

    Raises:
        ValueError: the two differ in length, or all denominators are 0.
    """
    if len(numerators) != len(denominators):
        raise ValueError(f"{len(numerators)} numerators, {len(denominators)} denominators")
    above, below = np.asarray(numerators, np.float64), np.asarray(denominators, np.float64)
    if not below.sum() > 0:
        raise ValueError("all denominators are 0; wanted at least one case")
    sums = np.stack([above, below], 1)[drawn(len(below), seed)].sum(1)
    sums = sums[sums[:, 1] > 0]
    low, high = np.quantile(sums[:, 0] / sums[:, 1], [LOW, HIGH])
    return float(low), float(high)


def drawn(clusters: int, seed: int = 0) -> NDArray[np.int64]:
    """Return int64 [DRAWS, clusters]: which clusters each draw has, some several times."""
    return np.random.default_rng(seed).integers(0, clusters, (DRAWS, clusters))
