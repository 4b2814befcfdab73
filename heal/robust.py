"""A window over the last values with its median and spread, cheap enough for every step.

Median and quartiles, not mean and variance: one spike must not widen the limits for the next.
"""

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable

QUARTILES_OF_NORMAL = 1.349
"""Distance of the quartiles of normal noise, in standard deviations."""

LARGEST = 1e100
"""No loss or norm of float32 comes near; below it differences and ratios stay finite."""


class Window:
    """The last ``size`` finite values, kept in order of arrival and in order of magnitude."""

    def __init__(self, size: int, values: Iterable[float] = ()) -> None:
        self.size = size
        self._arrived: deque[float] = deque()
        self._sorted: list[float] = []
        for value in values:
            self.push(value)

    def __len__(self) -> int:
        return len(self._arrived)

    def push(self, value: float) -> None:
        """Add a value, let go of the oldest; NaN, Inf and the like are not taken."""
        if not -LARGEST < value < LARGEST:
            return
        arrived, ordered = self._arrived, self._sorted
        if len(arrived) == self.size:
            del ordered[bisect_left(ordered, arrived.popleft())]
        arrived.append(value)
        insort(ordered, value)

    def quantile(self, share: float) -> float:
        """Return the value that ``share`` of the others lie below; NaN if there is none."""
        ordered = self._sorted
        if not ordered:
            return math.nan
        place = int(share * len(ordered))
        return ordered[place] if place < len(ordered) else ordered[-1]

    @property
    def median(self) -> float:
        return self.quantile(0.5)

    @property
    def spread(self) -> float:
        """The standard deviation that normal noise with these quartiles would have."""
        return (self.quantile(0.75) - self.quantile(0.25)) / QUARTILES_OF_NORMAL

    def values(self) -> list[float]:
        """Return the values, oldest first."""
        return list(self._arrived)

    def clear(self) -> None:
        """Forget all values."""
        self._arrived.clear()
        self._sorted.clear()
