"""Every probe as an alarm: a number every ten steps, and the limit above which it is an alarm.

The limits here are those of theory or of the probe's own documentation, or were chosen before any
run; those that are set on healthy runs of other seeds are in :mod:`benchmarks.helps.summary`.
"""

import math
import statistics
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from heal.lab import probes

LOOK_STEPS = 10  # between two looks, as between two checks of weights with the forecast
FIRST_LOOK = 50  # what is early has no past to be compared with
WAVE_STEPS = 128  # losses in which oscillation is looked for
PIECES = 4  # of a batch, for what compares gradients
PRODUCTS = 6  # Hessian times vector, at most, for sharpness
FEWEST_BEFORE, MOST_BEFORE = 3, 10  # looks whose median is the usual noise scale
MOST_SAMPLES = 1e6  # a noise scale beyond which there is no signal


class Watched(NamedTuple):
    """What an alarm may look at."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    train_step: Callable[[Any], Tensor]
    batch: Any
    losses: list[float]  # grows with every step


class Alarm(NamedTuple):
    """``look`` returns a number every ``LOOK_STEPS``; ``follow`` is called after every step."""

    look: Callable[[], float]
    follow: Callable[[], None] = lambda: None


def lyapunov(run: Watched) -> Alarm:
    """The exponent: whether the steps of the weights grow."""
    meter = probes.LyapunovMeter(run.model.parameters())
    return Alarm(meter.exponent, meter.observe)


def oscillation(run: Watched) -> Alarm:
    """Minus log10 of the p-value of a wave in the losses."""

    def look() -> float:
        wave = probes.oscillation(run.losses[-WAVE_STEPS:])
        return math.nan if wave is None else -math.log10(max(wave.p_value, 1e-300))

    return Alarm(look)


def sharpness(run: Watched) -> Alarm:
    """Learning rate times curvature, in units in which gradient descent and heavy ball leave at 2.

    With Adam, which rescales curvature, the number has no such meaning.
    """

    def look() -> float:
        found = probes.sharpness(run.model, run.train_step, run.batch, iterations=PRODUCTS)
        group = run.optimizer.param_groups[0]
        return float(group["lr"]) * found.eigenvalue / (1.0 + group.get("momentum", 0.0))

    return Alarm(look)


def noise_scale(run: Watched) -> Alarm:
    """Log10 of the gradient-noise scale over the median of the looks before."""
    before: list[float] = []

    def look() -> float:
        found = probes.noise_scale(run.model, run.train_step, run.batch, pieces=PIECES).samples
        now = math.log10(min(max(found, 1.0), MOST_SAMPLES)) if not math.isnan(found) else math.nan
        usual = statistics.median(before) if len(before) >= FEWEST_BEFORE else math.nan
        if math.isfinite(now):
            before[:] = [*before, now][-MOST_BEFORE:]
        return now - usual

    return Alarm(look)


def optimizer_health(run: Watched) -> Alarm:
    """How many problems were found; a step count that went back since the last look is one."""
    most = math.nan

    def look() -> float:
        nonlocal most
        health = probes.optimizer_health(run.optimizer)
        went_back = health.most_steps < most
        most = health.most_steps
        return float(len(health.problems) + went_back)

    return Alarm(look)


def importance(run: Watched) -> Alarm:
    """How much importance moved between parameter tensors since the last look: 0 to 1."""
    before: dict[str, float] = {}

    def look() -> float:
        fisher = probes.fisher_diagonal(run.model, run.train_step, run.batch, pieces=PIECES)
        shares = {n: float(s) for n, s in probes.importance(run.model, fisher).items()}
        moved = sum(abs(shares[n] - before[n]) for n in shares) / 2 if before else math.nan
        before.update(shares)
        return moved

    return Alarm(look)


class Kind(NamedTuple):
    """How an alarm is made, and the limit of its own, also in words."""

    make: Callable[[Watched], Alarm]
    limit: float
    words: str


ALARMS: dict[str, Kind] = {
    "Lyapunov exponent": Kind(lyapunov, 0.0, "above 0"),
    "oscillation": Kind(oscillation, 3.0, "p below 0.001"),
    "sharpness": Kind(sharpness, 2.0, "rate times curvature above 2"),
    "noise scale": Kind(noise_scale, 1.0, "ten times its median"),
    "optimizer health": Kind(optimizer_health, 0.0, "not ok, or steps went back"),
    "Fisher importance": Kind(importance, 0.5, "half of it moved"),
}
"""By name."""
