"""Faults that creep: each strikes at many attempts in a row, a little harder every time.

The corpus of ``tools/forecast`` has the same ones, written for many runs at once; a test holds
the two to each other. ``since`` is the number of attempts since the first strike.
"""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from heal.testing.chaos import Chaos
    from heal.testing.faults import Fault


LARGEST_FACTOR = 1e4  # growth stops somewhere; by then every run has diverged
DRIFT_RAMP = 100  # attempts in which a drift grows to its full rate
PERIOD = 20.0  # attempts of one swing of an oscillation
LARGEST_SWING = 9.0  # nats

GROWTH, NOISE_GROWTH, SWING, DRIFT = 0.03, 0.04, 0.02, 0.01  # what ``size`` is by default


def grown(since: float, rate: float) -> float:
    """Return the factor of what grows by ``rate`` at every attempt."""
    return min(math.pow(1.0 + rate, since), LARGEST_FACTOR)


def noise_level(since: float, rate: float) -> float:
    """Return the norm of noise, in norms of the gradient."""
    return min(0.5 * (math.pow(1.0 + rate, since) - 1.0), LARGEST_FACTOR)


def swing(since: float, depth: float, period: float = PERIOD) -> float:
    """Return the log of the factor on a rate that swings ever more widely."""
    wave = depth * since * math.sin(2.0 * math.pi * since / period)
    return min(max(wave, -LARGEST_SWING), LARGEST_SWING)


def drift(since: float, rate: float) -> float:
    """Return the factor on all weights at one attempt."""
    return 1.0 + rate * min(since / DRIFT_RAMP, 1.0)


def grow_lr(chaos: "Chaos", fault: "Fault") -> None:
    """Multiply the rate. A schedule that sets it anew every step takes that back."""
    since, rate = chaos.since(fault), _size(fault, GROWTH)
    _scale_lr(chaos, grown(since, rate) / grown(max(since - 1, 0), rate))


def oscillate_lr(chaos: "Chaos", fault: "Fault") -> None:
    """Let the rate swing, ever more widely, around what it was."""
    since, depth = chaos.since(fault), _size(fault, SWING)
    _scale_lr(chaos, math.exp(swing(since, depth) - swing(max(since - 1, 0), depth)))


def creep_scale(chaos: "Chaos", fault: "Fault") -> Callable[[Tensor], Tensor]:
    """Multiply the gradient, not the loss."""
    factor = grown(chaos.since(fault), _size(fault, GROWTH))
    return lambda loss: loss * factor - (loss * (factor - 1.0)).detach()


def creep_noise(chaos: "Chaos", fault: "Fault") -> None:
    """Add noise to the gradient of every tensor, in norms of that gradient."""
    level = noise_level(chaos.since(fault), _size(fault, NOISE_GROWTH))
    generator = chaos.generator()
    if not level:
        return
    for param in chaos.healer.model.parameters():
        if param.requires_grad:
            _disturb_once(param, level, generator)


def _disturb_once(param: Tensor, level: float, generator: torch.Generator) -> None:
    """Have noise added when the next gradient of this tensor is there."""

    @torch.no_grad()
    def disturb(param: Tensor) -> None:
        handle.remove()
        if param.grad is not None:
            noise = torch.randn(param.shape, generator=generator).to(param.grad)
            param.grad += noise * (level * param.grad.norm() / noise.norm().clamp(min=1e-30))

    handle = param.register_post_accumulate_grad_hook(disturb)


@torch.no_grad()
def creep_drift(chaos: "Chaos", fault: "Fault") -> None:
    """Multiply all weights, a little more every time."""
    factor = drift(chaos.since(fault), _size(fault, DRIFT))
    for param in chaos.healer.model.parameters():
        if param.requires_grad:
            param.mul_(factor)


def _scale_lr(chaos: "Chaos", factor: float) -> None:
    for optimizer in chaos.healer.optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * factor


def _size(fault: "Fault", default: float) -> float:
    return default if fault.size is None else fault.size
