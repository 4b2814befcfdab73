"""What happens to the runs of the corpus, step by step: schedules, noise and faults.

A scenario is a few arrays of [runs, steps] that :mod:`tools.forecast.simulate` follows. Slow faults
begin at ``onset`` and grow by a few percent a step; instant ones strike at ``onset``.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

HEALTHY = ("plain", "warmup", "cosine", "restarts", "steps_down", "curriculum", "second_phase")
SLOW = ("growing_lr", "creeping_noise", "creeping_scale", "oscillation", "drift")
INSTANT = ("nan_batch", "corrupt_weights")

DRIFT_RAMP = 100  # steps in which a drift grows to its full rate
MAX_LR_FACTOR = 1e4  # a growing rate stops somewhere; by then every run has diverged


@dataclass
class Scenario:
    """One array row per run.

    ``kinds`` names what was done; ``onset`` is the step of the fault, -1 in a healthy run.
    """

    kinds: list[str]
    onset: NDArray[np.int64]
    lr: Array  # factor on the run's base learning rate
    noise: Array  # norm of noise added to the gradient, in norms of the gradient
    scale: Array  # factor on the gradient
    drift: Array  # factor on all weights after the step
    shift: Array  # share of the second task
    nan_at: NDArray[np.int64]
    corrupt_at: NDArray[np.int64]


def plan(kinds: list[str], steps: int, random: np.random.Generator) -> Scenario:
    """Return arrays for runs of these kinds, each with a schedule and sizes of its own.

    Raises:
        ValueError: a kind is unknown.
    """
    known = HEALTHY + SLOW + INSTANT
    for kind in kinds:
        if kind not in known:
            raise ValueError(f"expected one of {', '.join(known)}, got {kind!r}")
    runs = len(kinds)
    ones = np.ones((runs, steps))
    none = np.full(runs, -1)
    made = Scenario(
        kinds=kinds,
        onset=none.copy(),
        lr=ones.copy(),
        noise=0.0 * ones,
        scale=ones.copy(),
        drift=ones.copy(),
        shift=0.0 * ones,
        nan_at=none.copy(),
        corrupt_at=none.copy(),
    )
    for run, kind in enumerate(kinds):
        is_fault = kind in SLOW or kind in INSTANT
        schedule = str(random.choice(HEALTHY[:5])) if is_fault else kind
        made.lr[run] = _schedule(schedule, steps, random)
        if kind == "curriculum":
            _shift(made, run, steps, random)
        if is_fault:
            _break(made, run, kind, steps, random)
    return made


def _schedule(kind: str, steps: int, random: np.random.Generator) -> Array:
    t = np.arange(steps)
    if kind == "warmup":
        length = int(random.integers(20, 200))
        start = 10.0 ** random.uniform(-3, -0.5)
        return np.asarray(np.minimum(1.0, start + (1 - start) * t / length))
    if kind == "cosine":
        total = steps * random.uniform(1.0, 2.0)
        warm = np.minimum(1.0, (t + 1) / random.integers(1, 60))
        return np.asarray(warm * (0.5 + 0.5 * np.cos(np.pi * t / total)))
    if kind == "restarts":
        period = int(random.integers(60, 250))
        return np.asarray(0.02 + 0.49 * (1 + np.cos(np.pi * (t % period) / period)))
    if kind == "steps_down":
        every = int(random.integers(100, 300))
        return np.asarray(random.choice([0.1, 0.3, 0.5]) ** (t // every))
    if kind == "second_phase":
        at = int(random.integers(100, steps - 50))
        low = 10.0 ** random.uniform(-1.5, -0.2)
        return np.asarray(np.where(t < at, low, 1.0))
    return np.ones(steps)


def _shift(made: Scenario, run: int, steps: int, random: np.random.Generator) -> None:
    """Move to the second task, at once or over a while, wholly or in part."""
    at = int(random.integers(80, steps - 50))
    length = int(random.choice([1, 1, 50, 200]))
    share = random.uniform(0.05, 0.5)
    made.shift[run] = share * np.clip((np.arange(steps) - at) / length, 0.0, 1.0)


def _break(made: Scenario, run: int, kind: str, steps: int, random: np.random.Generator) -> None:
    onset = int(random.integers(100, steps // 2))
    made.onset[run] = onset
    since = np.maximum(np.arange(steps) - onset, 0)
    if kind == "growing_lr":
        rate = 10.0 ** random.uniform(-2.1, -1.2)
        made.lr[run] *= np.minimum((1.0 + rate) ** since, MAX_LR_FACTOR)
    elif kind == "creeping_noise":
        rate = 10.0 ** random.uniform(-1.7, -1.1)
        grown = 0.5 * ((1.0 + rate) ** since - 1.0)
        made.noise[run] = np.minimum(grown, MAX_LR_FACTOR)
    elif kind == "creeping_scale":
        rate = 10.0 ** random.uniform(-1.9, -1.1)
        made.scale[run] = np.minimum((1.0 + rate) ** since, MAX_LR_FACTOR)
    elif kind == "oscillation":
        period = random.uniform(6.0, 40.0)
        depth = since * random.uniform(0.01, 0.04)  # in nats of the learning rate
        swing = depth * np.sin(2 * np.pi * since / period)
        made.lr[run] *= np.exp(np.clip(swing, -9.0, 9.0))
    elif kind == "drift":
        rate = 10.0 ** random.uniform(-2.2, -1.4) * np.minimum(since / DRIFT_RAMP, 1.0)
        made.drift[run] = 1.0 + rate
    elif kind == "nan_batch":
        made.nan_at[run] = onset
    else:
        made.corrupt_at[run] = onset
