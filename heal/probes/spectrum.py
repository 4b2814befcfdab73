"""Finds oscillation in a series, such as the losses of a run, with its period and a p-value."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

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
