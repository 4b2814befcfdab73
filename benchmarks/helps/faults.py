"""What is done to the trainings: faults that grow, faults of one instant, and none.

A fault acts once per attempted step, whoever calls the step's function how often: what a probe or
an anchor computes within an attempt sees the fault and does not repeat it.
"""

import math
import random
import statistics
from collections.abc import Sequence

import torch

from benchmarks.failures.families import Training
from heal.testing import Fault

ONSET, LAST = 120, 220  # the fault is repaired at LAST: what was not undone can still be learned

HEALTHY = "healthy"
SLOW = ("growing_lr", "oscillating_lr", "creeping_noise", "drift")
INSTANT: dict[str, Fault] = {
    "nan_batch": Fault("nan_gradient", at=ONSET),
    "corrupt_weight": Fault("corrupt_weight", at=ONSET, size=1e4),
    "reset_optimizer": Fault("reset_optimizer", at=ONSET),
}

GROWTH = 1.3  # of a fault's speed: what the learning rate grows by, each attempt
DRIFT = 0.35  # of a fault's speed: what weights grow by in the end, each attempt
DRIFT_RAMP_STEPS = 100
NOISE = 0.003  # spreads of a tensor that noise on its weights begins with, each attempt
MOST_SWING = 6.0  # of the log of the learning rate
LEVEL_STEPS, MEDIAN_STEPS = 32, 9  # losses that make the level, and that must exceed it


def is_possible(family: str, fault: str) -> bool:
    """Return whether there is anything to strike: plain gradient descent has no state to lose."""
    return (family, fault) != ("MLP", "reset_optimizer")


class SlowFault:
    """A setting or a weight that goes bad, a little more with every attempt from ``ONSET`` on.

    Args:
        kind: one of ``SLOW``; any other name does nothing.
        training: what is broken.
        seed: of its speed, its period and its noise.
    """

    def __init__(self, kind: str, training: Training, seed: int) -> None:
        numbers = random.Random(f"{kind} {seed}")
        self._kind, self._training = kind, training
        self._speed = numbers.uniform(0.06, 0.10)  # per step
        self._period = numbers.uniform(8.0, 30.0)
        self._generator = torch.Generator().manual_seed(seed)
        self._base = list(training.scheduler.base_lrs)
        self._attempt = -1

    def begin(self, attempt: int) -> None:
        """Do what is due at a new attempt; a second call with the same does nothing."""
        if attempt == self._attempt:
            return
        self._attempt = attempt
        since = attempt - ONSET if ONSET <= attempt < LAST else 0
        self._training.scheduler.base_lrs = [lr * self._lr_factor(since) for lr in self._base]
        if since and self._kind in ("drift", "creeping_noise"):
            self._touch_weights(since)

    @torch.no_grad()
    def _touch_weights(self, since: int) -> None:
        rate = DRIFT * self._speed * min(since / DRIFT_RAMP_STEPS, 1.0)
        size = NOISE * ((1.0 + self._speed) ** since - 1.0)
        for param in self._training.model.parameters():
            if self._kind == "drift":
                param.mul_(1.0 + rate)
            elif param.numel() > 1:
                noise = torch.randn(param.shape, generator=self._generator)
                param.add_(noise * param.std() * size)

    def _lr_factor(self, since: int) -> float:
        if self._kind == "growing_lr":
            return float((1.0 + GROWTH * self._speed) ** since)
        if self._kind == "oscillating_lr":
            swing = self._speed * since * math.sin(2.0 * math.pi * since / self._period)
            return math.exp(max(-MOST_SWING, min(MOST_SWING, swing)))
        return 1.0


def doubled_at(losses: Sequence[float]) -> int | None:
    """Return the first attempt, from the fault on, at which the median of nine losses has doubled.

    Args:
        losses: by attempt; one that is not finite counts as above everything.
    """
    level = statistics.median(losses[ONSET - LEVEL_STEPS : ONSET])
    for at in range(ONSET, len(losses)):
        recent = losses[max(0, at + 1 - MEDIAN_STEPS) : at + 1]
        if statistics.median(x if math.isfinite(x) else math.inf for x in recent) > 2.0 * level:
            return at
    return None
