"""Intervals of 95 %: of a share, of a rate, and of the mean of paired differences."""

import math
import random
from collections.abc import Hashable, Mapping, Sequence

Interval = tuple[float, float, float]  # estimate, low, high

Z = 1.959963985  # of the normal distribution, for 95 %
TAIL = 0.025
ROUNDS = 4000  # of the bootstrap


def share(hits: int, trials: int) -> Interval | None:
    """Return Wilson's interval of a share; None of nothing."""
    if not trials:
        return None
    found = hits / trials
    middle = (found + Z * Z / (2 * trials)) / (1 + Z * Z / trials)
    spread = math.sqrt(found * (1 - found) / trials + (Z / (2 * trials)) ** 2)
    half = Z * spread / (1 + Z * Z / trials)
    return found, max(0.0, middle - half), min(1.0, middle + half)


def rate(events: int, exposure: float) -> Interval:
    """Return the exact interval of a Poisson rate."""
    from scipy.stats import chi2  # comes with scikit-learn, which has the digits

    low = float(chi2.ppf(TAIL, 2 * events)) / 2 if events else 0.0
    high = float(chi2.ppf(1 - TAIL, 2 * events + 2)) / 2
    return events / exposure, low / exposure, high / exposure


def clustered_mean(values: Mapping[Hashable, Sequence[float]]) -> Interval | None:
    """Return a mean with a bootstrap over whole clusters: what shares a seed is not independent.

    Args:
        values: by cluster; each has at least one.
    """
    if not values:
        return None
    sums = [(sum(group), len(group)) for group in values.values()]
    numbers = random.Random(0)
    means = []
    for _ in range(ROUNDS):
        drawn = numbers.choices(sums, k=len(sums))
        means.append(sum(s for s, _ in drawn) / sum(n for _, n in drawn))
    means.sort()
    low, high = (means[round(q * (ROUNDS - 1))] for q in (TAIL, 1 - TAIL))
    return sum(s for s, _ in sums) / sum(n for _, n in sums), low, high
