"""What all detectors share: a window over the last values, and the thresholds of this package.

Median and quartiles, not mean and variance: one spike must not widen the limits for the next.
Every threshold that more than one detector needs stands here once, with its reason;
``tests/heal/detectors/test_constants.py`` counts them and pins each.
"""

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable

QUARTILES_OF_NORMAL = 1.349
"""Distance of the quartiles of normal noise, in standard deviations. A fact, not a choice."""

LARGEST = 1e100
"""No loss or norm of float32 comes near; below it differences and ratios stay finite."""

RECENT = 64
"""Values that say what is usual now. Their median has an error of 0.16 standard deviations. Losses
of a young run fall fast: there half of the steps so far, and ``FEWEST`` at least."""

BLOCK = 32
"""Values whose median counts as a level that was reached, and not as luck: 0.22 deviations."""

FIRST = 3
"""Values from which a first level is known: the fewest whose median survives one bad one."""

FEWEST = 8
"""Values from which an upper range is known, and steps in a row that are no coincidence."""

MOST = 0.9
"""The share that counts as nearly all: of values in the usual range, of tensors, of groups."""

SAME = 0.01
"""Levels that differ by less than this share are the same: no noise is assumed to be smaller."""

NEGLIGIBLE = 1e-3
"""A share that counts as nothing: of what was learned, of moments, of rewards."""

FAR = 3.0
"""A level this many times another one has left it: no noise of a level comes near."""

SPREADS = 2.0
"""Spreads of single values by which the median of a block must leave its best: 9 of its own."""

STANDARD_ERRORS = 4.0
"""A difference of medians or means beyond this is no chance: 1 in 30,000 for normal noise."""


class Window:
    """The last ``size`` finite values, in order of arrival.

    They are put in order of magnitude when that is first needed, and kept so from then on: many
    windows are filled, read once and emptied.
    """

    def __init__(self, size: int, values: Iterable[float] = ()) -> None:
        self.size = size
        finite = [value for value in values if -LARGEST < value < LARGEST]
        self._arrived = deque(finite[-size:])
        self._sorted: list[float] | None = None

    def __len__(self) -> int:
        return len(self._arrived)

    def resize(self, size: int) -> None:
        """Hold so many values from the next one on."""
        self.size = size

    def push(self, value: float) -> None:
        """Add a value, drop the oldest; NaN, Inf and the like are ignored."""
        if not -LARGEST < value < LARGEST:
            return
        arrived, ordered = self._arrived, self._sorted
        while len(arrived) >= self.size:
            oldest = arrived.popleft()
            if ordered is not None:
                del ordered[bisect_left(ordered, oldest)]
        if ordered is not None:
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
    def oldest(self) -> float:
        """The value that the next one takes the place of once the window is full."""
        return self._arrived[0]

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


class UpperRange:
    """The upper range of a stream, and how many values in a row lie far above it.

    The range is a quantile below the top: streams that are zero most of the time have no useful
    median. Values far above enter the window once they have lasted for ``patience``: a new level
    is learned, not fought.

    Args:
        limit: times the range, above which a value is far.
        patience: values in a row after which they count as a new level.
        floor: a value below it is never far.

    Attributes:
        streak: values in a row that are far above; 0 if the last one was not.
        usual: the upper range before the last value.
    """

    def __init__(self, limit: float, patience: int, floor: float = 0.0) -> None:
        self.limit, self.patience, self.floor = limit, patience, floor
        self.values = Window(RECENT)
        self.streak = 0
        self.usual = 0.0

    def push(self, value: float) -> int:
        """Add a value and return the streak."""
        self.usual = self.level()
        bound = max(self.limit * self.usual, self.floor)
        is_far = 0.0 < bound < value and len(self.values) >= FEWEST
        self.streak = self.streak + 1 if is_far else 0
        if not is_far or self.streak > self.patience:
            self.values.push(value)
        return self.streak

    def level(self) -> float:
        """Return the upper range; 0 while it is not known."""
        return self.values.quantile(MOST) if len(self.values) >= FEWEST else 0.0

    def clear(self) -> None:
        """Forget all values."""
        self.values.clear()
        self.streak = 0

    def load(self, values: Iterable[float], streak: int) -> None:
        """Return to what was saved."""
        self.values, self.streak = Window(RECENT, values), streak
