"""Finds oscillation in a series, such as the losses of a run, with its period and a p-value."""

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from heal.data.split import num_samples
from heal.lab.probes.undisturbed import freeze_batch_statistics, pieces_of, undisturbed
from heal.micro_batch import TrainStep

FEWEST = 16
FEWEST_PERIODS = 3  # a wave that was seen less often cannot be told from a trend
DECAYS = (0.0, 0.5, 0.8, 0.9, 0.95, 0.98, 0.995)  # from one value to the next; 0 is white noise
ROUNDS = 30  # of the fit; later ones change p-values by less than the noise does


@dataclass(frozen=True, slots=True)
class Oscillation:
    """The strongest oscillation of a series.

    ``share`` is its part of the power that is left after trend and colour are taken out;
    ``p_value`` the chance of such a part without any oscillation; ``amplitude`` is in the units of
    the series.
    """

    period: float
    amplitude: float
    share: float
    p_value: float

    def is_significant(self, level: float = 1e-3) -> bool:
        """Tell whether chance is an unlikely explanation."""
        return self.p_value < level


def oscillation(values: Sequence[float]) -> Oscillation | None:
    """Return the strongest oscillation; None if there are fewer than 16 finite values in a row.

    Fisher's exact test (1929) on the periodogram: white noise puts no more than so much of its
    power into one frequency. Losses are not white: they fall, step and wander. The spectrum of all
    that falls off towards fast waves, so a curve that does is fitted to the periodogram and divided
    out; what stands out of it is a wave. Waves of fewer than three periods are not looked for, and
    a power that only rises towards them belongs to the trend: its p-value is 1.

    Args:
        values: the newest last; what comes before the last NaN or Inf is not used.
    """
    series = list(values)
    for at in range(len(series) - 1, -1, -1):
        if not math.isfinite(series[at]):
            series = series[at + 1 :]
            break
    count = len(series)
    if count < FEWEST:
        return None
    x = torch.tensor(series, dtype=torch.float64)
    t = torch.arange(count, dtype=torch.float64) - (count - 1) / 2
    x = x - x.mean()
    x = x - t * (x * t).sum() / t.square().sum()
    transform = torch.fft.rfft(x)
    last = (count - 1) // 2  # the highest frequency has half the degrees of freedom: left out
    power = transform.abs().square()[1 : last + 1]
    if float(power.sum()) <= 0.0:
        return None
    white = power / _background(power, torch.arange(1, last + 1, dtype=torch.float64) / count)
    slow = FEWEST_PERIODS - 1
    share, at_tensor = (white[slow:] / white[slow:].sum()).max(0)
    best = int(at_tensor) + slow
    is_peak = bool(power[best] > power[best - 1])
    return Oscillation(
        period=1.0 / _refined(transform, best + 1, count),
        amplitude=2.0 * float(power[best].sqrt()) / count,
        share=float(share),
        p_value=fisher_g(float(share), last - slow) if is_peak else 1.0,
    )


def fisher_g(share: float, frequencies: int) -> float:
    """Return the chance that white noise has one of so many frequencies with this share or more.

    Where that chance is large the terms of Fisher's sum cancel to nothing but rounding, and its
    limit for independent frequencies is taken.
    """
    if share * frequencies <= 1.0:
        return 1.0
    total = 0.0
    for j in range(1, min(frequencies, int(1.0 / share)) + 1):
        rest = 1.0 - j * share
        if rest <= 0.0:
            break
        log_term = math.lgamma(frequencies + 1) - math.lgamma(j + 1)
        log_term += (frequencies - 1) * math.log(rest) - math.lgamma(frequencies - j + 1)
        if j == 1 and log_term > 0.0:
            return -math.expm1(-math.exp(log_term))
        total += math.exp(log_term) if j % 2 else -math.exp(log_term)
    return min(max(total, 0.0), 1.0)


def _background(power: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
    """Return the spectrum of all that is no wave, fitted to the power.

    A sum of white noise, of decays (an exponential curve and lag-1 noise have the same spectrum),
    of a step or walk, and of a bend. Weights are positive, so that it only falls and no peak fits
    in; they are found by multiplicative updates of Whittle's likelihood (arXiv:1010.1763), in
    which a power of many times the background counts little.
    """
    steepness = 4.0 * torch.sin(math.pi * frequencies).square()
    shapes = [1.0 / ((1.0 - d) ** 2 + d * steepness) for d in DECAYS]
    shape = torch.stack([*shapes, 1.0 / steepness, 1.0 / steepness.square()])
    shape = shape / shape.mean(1, keepdim=True)
    weights = torch.full((len(shape),), float(power.mean()) / len(shape), dtype=torch.float64)
    for _ in range(ROUNDS):
        sums = weights @ shape
        weights = weights * (shape @ (power / sums.square())) / (shape @ (1.0 / sums))
    return weights @ shape


def _refined(transform: torch.Tensor, peak: int, count: int) -> float:
    """Return the frequency between bins: Jacobsen's estimate from the peak and its neighbours."""
    if not 1 <= peak < len(transform) - 1:
        return peak / count
    before, at, after = (complex(transform[peak + k]) for k in (-1, 0, 1))
    divisor = 2.0 * at - before - after
    shift = ((before - after) / divisor).real if abs(divisor) > 0.0 else 0.0
    return (peak + min(max(shift, -0.5), 0.5)) / count


# Finite-time Lyapunov exponent of training, from the velocity of the weights.


SAMPLE = 4096  # weights that are followed; enough for a norm to within two percent
FEWEST_VELOCITIES = 3  # lengths of steps whose growth can be told


class LyapunovMeter:
    """Follows a fixed sample of weights and measures how fast their steps grow or shrink.

    For a deterministic, smooth training the steps of the weights obey the linearised dynamics, so
    that the mean growth of their length is the largest exponent: below 0 it converges, above 0 it
    diverges. For gradient descent on a quadratic it is ``log(max(abs(1 - lr * curvature)))`` of the
    directions that are alive. Noise in the gradients keeps the steps at a constant length, and the
    exponent near 0: a value above 0 means something, one near 0 does not.

    Args:
        parameters: what is trained.
        window: steps over which growth is averaged.
        seed: of the choice of weights; the run's generators are not touched.

    Example:
        >>> meter = LyapunovMeter(model.parameters())
        >>> meter.observe(healer.last_step)  # after each step, or every tenth: nothing waits
        >>> meter.exponent()  # waits for the device
    """

    def __init__(self, parameters: Iterable[Tensor], window: int = 30, seed: int = 0) -> None:
        if window < 2:
            raise ValueError(f"window: expected at least 2 steps, got {window}")
        params = [p for p in parameters if p.requires_grad and p.numel()]
        if not params:
            raise ValueError("there are no trainable parameters to follow")
        total = sum(p.numel() for p in params)
        generator = torch.Generator().manual_seed(seed)
        self._followed = []
        for param in params:
            count = max(1, min(param.numel(), SAMPLE * param.numel() // total + 1))
            chosen = torch.randperm(param.numel(), generator=generator)[:count].sort().values
            self._followed.append((param, chosen.to(param.device)))
        self._before: list[Tensor] | None = None
        self._lengths: deque[Tensor] = deque(maxlen=window + 1)
        self._step = -1

    def restart(self) -> None:
        """Forget all steps: the weights were set, not trained, to where they are."""
        self._before = None
        self._lengths.clear()

    @torch.no_grad()
    def observe(self, step: int | None = None) -> None:
        """Measure the step since the last call; the length stays on the device.

        Args:
            step: its number. One that is not above the last tells of a rollback, whose leap is
                no step: the meter starts anew.
        """
        if step is not None:
            if step <= self._step:
                self.restart()
            self._step = step
        now = [p.detach().reshape(-1)[chosen].double() for p, chosen in self._followed]
        if self._before is not None:
            moves = [a - b for a, b in zip(now, self._before, strict=True)]
            first = moves[0].device
            squares = [m.square().sum().to(first, non_blocking=True) for m in moves]
            self._lengths.append(torch.stack(squares).sum().sqrt())
        self._before = now

    def exponent(self) -> float:
        """Return the mean log-growth of the steps, per observation; NaN before there are three.

        Least squares over the window, so that one odd step does not decide. A refused step moved
        nothing and is left out; so is all that came before the last burst to Inf or NaN.
        """
        if not self._lengths:
            return math.nan
        lengths = torch.stack(list(self._lengths)).cpu()
        burst = (~lengths.isfinite()).nonzero()
        if len(burst):
            lengths = lengths[int(burst[-1]) + 1 :]
        logs = lengths[lengths > 0].log()
        if len(logs) < FEWEST_VELOCITIES:
            return math.nan
        steps = torch.arange(len(logs), dtype=torch.float64)
        steps = steps - steps.mean()
        return float((steps * (logs - logs.mean())).sum() / steps.square().sum())


# The gradient-noise scale: the batch size from which a larger batch brings little.


@dataclass(frozen=True, slots=True)
class NoiseScale:
    """Estimates without bias of the two parts of a gradient (McCandlish et al., arXiv:1812.06162).

    ``signal`` is the squared length of the true gradient, ``noise`` the trace of the covariance of
    one sample's. The estimate of a small signal may come out negative: then there is none to see.
    """

    signal: float
    noise: float

    @property
    def samples(self) -> float:
        """Noise over signal, in samples; infinite where there is no signal to be seen."""
        return self.noise / self.signal if self.signal > 0.0 else math.inf


def noise_scale(
    model: Module, train_step: TrainStep, batch: Any, pieces: int | None = None
) -> NoiseScale:
    """Compare the gradients of the pieces of a batch with that of the whole.

    Batch norms use their running statistics, so that a piece is to be compared with the whole.

    Args:
        model: what is trained.
        train_step: takes a batch, returns its mean loss over samples.
        batch: at least two samples.
        pieces: into how many the batch is cut; one per sample if None.

    Raises:
        ValueError: there is only one piece, or the batch does not divide.
    """
    with undisturbed(model) as params:
        freeze_batch_statistics(model)
        parts = pieces_of(batch, pieces)
        count, samples = len(parts), num_samples(batch)
        if count < 2:
            raise ValueError(
                f"batch: expected at least 2 pieces to measure noise with, got {count}"
            )
        total: list[torch.Tensor] | None = None
        squares = 0.0
        for part in parts:
            grads = torch.autograd.grad(
                train_step(part), [p for _, p in params], allow_unused=True, materialize_grads=True
            )
            squares += float(torch.stack([g.double().square().sum() for g in grads]).sum())
            wide = [g.double() for g in grads]
            total = wide if total is None else [a + b for a, b in zip(total, wide, strict=True)]
        assert total is not None
        small = squares / count  # mean squared length of a piece's gradient
        large = float(torch.stack([(t / count).square().sum() for t in total]).sum())
        size = samples / count
        return NoiseScale(
            signal=(samples * large - size * small) / (samples - size),
            noise=(small - large) / (1.0 / size - 1.0 / samples),
        )
