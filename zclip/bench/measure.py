"""Honest timing on a machine that is not alone: interleaved, medians, load recorded."""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

SPREAD_OF_NOISE = 0.5
"""Quartile distance over median beyond which a timing is called noise, not a result."""

FEWEST_ROUNDS, MOST_ROUNDS = 3, 10_000


@dataclass(frozen=True)
class Timing:
    """How long one contender took, over all rounds."""

    median_seconds: float
    spread: float
    """Distance between the quartiles, as a fraction of the median."""
    rounds: int
    host_seconds: float | None = None
    """Until the call returned, the median; on the CPU that is the same and left out."""

    @property
    def is_noise(self) -> bool:
        """Whether the rounds disagree too much to be believed."""
        return self.spread > SPREAD_OF_NOISE


Clock = Callable[[Callable[[], object]], tuple[float, float | None]]
"""Runs something; returns its seconds, and those of the host alone where these differ."""


def cpu_clock(run: Callable[[], object]) -> tuple[float, float | None]:
    """Time a call that is over when it returns."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start, None


def cuda_clock(run: Callable[[], object]) -> tuple[float, float | None]:
    """Time a call between two events of the stream; locks no clocks and asks for no rights."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    start = time.perf_counter()
    run()
    host = time.perf_counter() - start
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3, host


def interleaved(
    contenders: Mapping[str, Callable[[], object]],
    rounds: int,
    seconds: float,
    clock: Clock = cpu_clock,
    between: Callable[[int], None] | None = None,
    least_seconds: float = 0.0,
) -> dict[str, Timing]:
    """Time every contender once per round, in turns, so that a busy moment hits all alike.

    A pair measured one after the other can differ tenfold on a busy machine and mean nothing.
    Ends after so many rounds or seconds, whichever comes first.

    Args:
        contenders: by name.
        rounds: so many.
        seconds: at most so many, but never fewer than three rounds.
        clock: how to time a call.
        between: called before every round, untimed, with its number.
        least_seconds: go on beyond the rounds until so many have passed; calls of microseconds
            want more rounds than calls of seconds, and can afford them.
    """
    for run in contenders.values():
        run()
    samples: dict[str, list[tuple[float, float | None]]] = {name: [] for name in contenders}
    start = time.perf_counter()
    for turn in range(MOST_ROUNDS):
        passed = time.perf_counter() - start
        if turn >= FEWEST_ROUNDS and passed > seconds:
            break
        if turn >= rounds and passed > least_seconds:
            break
        if between is not None:
            between(turn)
        names = list(contenders)
        for name in names if turn % 2 == 0 else reversed(names):
            samples[name].append(clock(contenders[name]))
    return {name: _timing(values) for name, values in samples.items()}


def _timing(values: list[tuple[float, float | None]]) -> Timing:
    took = [seconds for seconds, _ in values]
    hosts = [host for _, host in values if host is not None]
    median = statistics.median(took)
    low, _, high = statistics.quantiles(took, n=4)
    host = statistics.median(hosts) if hosts else None
    return Timing(median, (high - low) / median, len(took), host)
