"""Honest timing on a machine that is not alone: interleaved, medians, load recorded."""

import os
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

SPREAD_OF_NOISE = 0.5
"""Quartile distance over median beyond which a timing is called noise, not a result."""


@dataclass(frozen=True)
class Timing:
    """How long one contender took, over all rounds."""

    median_seconds: float
    spread: float
    """Distance between the quartiles, as a fraction of the median."""
    rounds: int

    @property
    def is_noise(self) -> bool:
        """Whether the rounds disagree too much to be believed."""
        return self.spread > SPREAD_OF_NOISE


FEWEST_ROUNDS = 3


def interleaved(
    contenders: Mapping[str, Callable[[], object]], rounds: int, seconds: float
) -> dict[str, Timing]:
    """Time every contender once per round, in turns, so that a busy moment hits all alike.

    A pair measured one after the other can differ tenfold on a busy machine and mean nothing.
    Ends after so many rounds or seconds, whichever comes first.
    """
    for run in contenders.values():
        run()
    samples: dict[str, list[float]] = {name: [] for name in contenders}
    end = time.perf_counter() + seconds
    for turn in range(rounds):
        if turn >= FEWEST_ROUNDS and time.perf_counter() > end:
            break
        names = list(contenders)
        for name in names if turn % 2 == 0 else reversed(names):
            start = time.perf_counter()
            contenders[name]()
            samples[name].append(time.perf_counter() - start)
    return {name: _timing(values) for name, values in samples.items()}


def _timing(values: list[float]) -> Timing:
    median = statistics.median(values)
    low, _, high = statistics.quantiles(values, n=4)
    return Timing(median, (high - low) / median, len(values))


def load_average() -> float:
    """Return how many processes wanted a core over the last minute; 0 where nobody counts."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0


def is_busy(load: float) -> bool:
    """Return whether more wanted to run than this benchmark itself and the machine has cores."""
    return load > (os.cpu_count() or 1) + 1
