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
    """The last ``size`` finite values, in order of arrival.

    They are put in order of magnitude when somebody first asks for that, and kept so from then on:
    many windows are filled, read once and emptied.
    """

    def __init__(self, size: int, values: Iterable[float] = ()) -> None:
        self.size = size
        self._arrived: deque[float] = deque(maxlen=size)
        self._sorted: list[float] | None = None
        for value in values:
            self.push(value)

    def __len__(self) -> int:
        return len(self._arrived)

    def push(self, value: float) -> None:
        """Add a value, let go of the oldest; NaN, Inf and the like are not taken."""
        if not -LARGEST < value < LARGEST:
            return
        arrived, ordered = self._arrived, self._sorted
        if ordered is not None:
            if len(arrived) == self.size:
                del ordered[bisect_left(ordered, arrived[0])]
            insort(ordered, value)
        arrived.append(value)

    def quantile(self, share: float) -> float:
        """Return the value that ``share`` of the others lie below; NaN if there is none."""
        ordered = self._sorted
        if ordered is None:
            ordered = self._sorted = sorted(self._arrived)
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

    def median_and_spread(self) -> tuple[float, float]:
        """Return both at once, which is cheaper."""
        ordered = self._sorted
        if not ordered:  # none, or not in order yet
            return self.median, self.spread
        count = len(ordered)
        quartiles = ordered[int(0.75 * count)] - ordered[int(0.25 * count)]
        return ordered[int(0.5 * count)], quartiles / QUARTILES_OF_NORMAL

    def values(self) -> list[float]:
        """Return the values, oldest first."""
        return list(self._arrived)

    def clear(self) -> None:
        """Forget all values."""
        self._arrived.clear()
        self._sorted = None
