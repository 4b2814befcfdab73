"""Finds oscillation in a series, such as the losses of a run, with its period and a p-value."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

FEWEST = 16
MOST_TERMS = 64  # of Fisher's sum; later ones are below rounding where the test matters


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
    power into one frequency. A line is taken out first. Losses are not white: a series whose
    neighbours are alike is whitened by its own lag-1 correlation, with the median instead of the
    mean so that the oscillation itself does not pass for colour.

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
    frequencies = torch.arange(1, last + 1, dtype=torch.float64) / count
    white = power / _colour(x, frequencies)
    share, at_tensor = (white / white.sum()).max(0)
    best = int(at_tensor)
    return Oscillation(
        period=1.0 / _refined(transform, best + 1, count),
        amplitude=2.0 * float(power[best].sqrt()) / count,
        share=float(share),
        p_value=fisher_g(float(share), last),
    )


def fisher_g(share: float, frequencies: int) -> float:
    """Return the chance that white noise has one of so many frequencies with this share or more."""
    if share * frequencies <= 1.0:
        return 1.0
    total = 0.0
    for j in range(1, min(frequencies, int(1.0 / share), MOST_TERMS) + 1):
        log_term = math.lgamma(frequencies + 1) - math.lgamma(j + 1)
        log_term -= math.lgamma(frequencies - j + 1)
        rest = 1.0 - j * share
        if rest <= 0.0:
            break
        term = math.exp(log_term + (frequencies - 1) * math.log(rest))
        total += term if j % 2 else -term
    return min(max(total, 0.0), 1.0)


def _colour(x: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
    """Return the spectrum, up to a factor, of noise whose neighbours are as alike as these.

    The correlation is the median over lags of ``r(2) / r(1)`` and ``r(1)``, so that a sine, whose
    own correlation is high, has less of a say; never negative, or a zigzag would be noise.
    """
    power = float(x.square().sum())
    first = float((x[1:] * x[:-1]).sum()) / power
    second = float((x[2:] * x[:-2]).sum()) / power
    ratio = second / first if abs(first) > 1e-9 else 0.0
    phi = min(max(min(first, ratio), 0.0), 0.95)
    return 1.0 / (1.0 + phi * phi - 2.0 * phi * torch.cos(2.0 * math.pi * frequencies))


def _refined(transform: torch.Tensor, peak: int, count: int) -> float:
    """Return the frequency between bins: Jacobsen's estimate from the peak and its neighbours."""
    if not 1 <= peak < len(transform) - 1:
        return peak / count
    before, at, after = (complex(transform[peak + k]) for k in (-1, 0, 1))
    divisor = 2.0 * at - before - after
    shift = ((before - after) / divisor).real if abs(divisor) > 0.0 else 0.0
    return (peak + min(max(shift, -0.5), 0.5)) / count
