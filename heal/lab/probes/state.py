"""What a series, the weights and the optimizer say of a run: waves, growth, and sane memory."""

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from heal.lab.weight_anchor import SQUARES

FEWEST = 16
FEWEST_PERIODS = 3  # a wave that was seen less often cannot be distinguished from a trend
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
        """Return whether chance is an unlikely explanation."""
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


def _background(power: Tensor, frequencies: Tensor) -> Tensor:
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


def _refined(transform: Tensor, peak: int, count: int) -> float:
    """Return the frequency between bins: Jacobsen's estimate from the peak and its neighbours."""
    if not 1 <= peak < len(transform) - 1:
        return peak / count
    before, at, after = (complex(transform[peak + k]) for k in (-1, 0, 1))
    divisor = 2.0 * at - before - after
    shift = ((before - after) / divisor).real if abs(divisor) > 0.0 else 0.0
    return (peak + min(max(shift, -0.5), 0.5)) / count


SAMPLE = 4096  # weights that are followed; enough for a norm to within two percent
FEWEST_VELOCITIES = 3  # lengths of steps whose growth can be measured


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
            step: its number. One that is not above the last shows a rollback, whose leap is
                no step: the meter starts over.
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

        Least squares over the window, so that one odd step does not decide. A skipped step moved
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


NEVER_NEGATIVE = {
    *SQUARES,
    *("max_exp_avg_sq", "exp_inf", "row_var", "col_var", "variance", "acc_delta", "step_size"),
}
"""State of optimizers that is never below zero."""

LARGE_UPDATE = 10.0  # Adam's update is below 1 where gradients are alike, and seldom above 10
STALE = 1e4  # squared gradients so far above their mean were not known to it


@dataclass(frozen=True, slots=True)
class OptimizerHealth:
    """What was found; ``problems`` is empty if nothing is wrong.

    ``update_rms`` and ``update_max`` are of first moment over root of second, bias taken out, in
    units of the learning rate; NaN for optimizers without both. ``missing`` counts parameters with
    a gradient and no state, ``unstepped`` those with moments and a step count below 1. Step counts
    that differ are no problem: a layer that was unfrozen late has fewer.
    """

    update_rms: float = math.nan
    update_max: float = math.nan
    nonfinite: int = 0
    negative: int = 0
    missing: int = 0
    unstepped: int = 0
    fewest_steps: float = math.nan
    most_steps: float = math.nan
    problems: list[str] = field(default_factory=list)

    @property
    def is_ok(self) -> bool:
        return not self.problems


@torch.no_grad()
def optimizer_health(optimizer: Optimizer) -> OptimizerHealth:
    """Measure the state of an optimizer of torch, wrapped or not; waits for the device once.

    Finds state that holds NaN or Inf, whatever it is called; second moments below zero; parameters
    whose state is gone; moments whose step count was lost; updates of more than ten learning
    rates; and second moments far below the present gradient (a reset, or a corrupted memory). An
    optimizer that keeps no state, as SGD without momentum, has nothing to lose.
    """
    measured: list[Tensor] = []
    missing = 0
    keeps_any = False
    for group in optimizer.param_groups:
        keeps = _keeps_state(optimizer, group)
        keeps_any = keeps_any or keeps
        for param in group["params"]:
            state = optimizer.state.get(param, {})
            if any(isinstance(value, Tensor) and value.numel() for value in state.values()):
                measured.append(_measure(param, state, group))
            else:
                missing += keeps and param.grad is not None and param.numel() > 0
    if not measured:
        problems = ["no state: the optimizer has not stepped, or was reset"] if keeps_any else []
        return OptimizerHealth(missing=missing if problems else 0, problems=problems)
    rows = torch.stack([row.to(measured[0].device, non_blocking=True) for row in measured]).cpu()
    squares, elements, largest, nonfinite, negative, stale, steps = rows.unbind(1)
    has_update = bool(elements.sum() > 0)
    counts = [count for count in steps.tolist() if not math.isnan(count)]
    health = OptimizerHealth(
        update_rms=float((squares.sum() / elements.sum()).sqrt()) if has_update else math.nan,
        update_max=float(largest.max()) if has_update else math.nan,
        nonfinite=int(nonfinite.sum()),
        negative=int(negative.sum()),
        missing=int(missing),
        unstepped=sum(count < 1.0 for count in counts),
        fewest_steps=min(counts, default=math.nan),
        most_steps=max(counts, default=math.nan),
    )
    health.problems.extend(_problems(health, int(stale.sum())))
    return health


def _keeps_state(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    inner = getattr(optimizer, "inner", optimizer)
    return not (isinstance(inner, SGD) and not group.get("momentum"))


def _measure(param: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
    """Sum of squares and number of updates, the largest, counts of what is wrong, and the step.

    All of it on the device of the parameter, the step too: where it lives there, reading it would
    be a wait for each parameter.
    """
    zero = torch.zeros((), dtype=torch.float64, device=param.device)
    kept = {k: v for k, v in state.items() if isinstance(v, Tensor) and v.is_floating_point()}
    nonfinite, negative = zero, zero
    for name, value in kept.items():
        nonfinite = nonfinite + _beside((~value.isfinite()).sum(), zero)
        if name in NEVER_NEGATIVE:
            negative = negative + _beside((value < 0).sum(), zero)
    steps = _beside(torch.as_tensor(state.get("step", math.nan)), zero).reshape(())
    second = next((kept[name] for name in SQUARES if name in kept), None)
    first = kept.get("exp_avg")
    stale = _stale(param, second, zero)
    update = [zero, zero, zero]
    if first is not None and second is not None and first.numel() and "betas" in group:
        divisor = kept.get("max_exp_avg_sq", second)
        update = _update(first, divisor, steps, group)
    return torch.stack([*update, nonfinite, negative, stale, steps])


def _stale(param: Tensor, second: Tensor | None, zero: Tensor) -> Tensor:
    """Count squared gradients far above their running mean, if they are the most of a tensor."""
    if second is None or param.grad is None or param.grad.layout is not torch.strided:
        return zero  # a sparse gradient is silent on all rows but its own
    if second.shape != param.grad.shape:
        return zero
    count = (param.grad.square() > STALE * second.clamp(min=1e-30)).sum().double()
    return torch.where(count > param.numel() / 2, count, zero)  # a few are only rare rows


def _update(first: Tensor, second: Tensor, steps: Tensor, group: dict[str, Any]) -> list[Tensor]:
    """Return sum of squares, number and largest of Adam's updates, in learning rates."""
    beta1, beta2 = (_beside(torch.as_tensor(beta), steps) for beta in group["betas"])
    mean = first.double() / (1 - beta1**steps)
    root = (second.double() / (1 - beta2**steps)).clamp(min=0).sqrt()
    update = (mean / (root + group.get("eps", 1e-8))).nan_to_num(0.0, 0.0, 0.0)
    return [update.square().sum(), torch.full_like(steps, update.numel()), update.abs().max()]


def _beside(value: Tensor, other: Tensor) -> Tensor:
    """Return a number in the precision and on the device of another, without a wait."""
    return value.to(other.device, other.dtype, non_blocking=True)


def _problems(health: OptimizerHealth, stale: int) -> list[str]:
    checks = (
        (health.nonfinite, f"{health.nonfinite} elements of the state are NaN or Inf"),
        (health.negative, f"{health.negative} second moments are below zero"),
        (health.missing, f"{health.missing} parameters with a gradient have no state"),
        (
            health.unstepped,
            f"{health.unstepped} parameters have moments and a step count below 1",
        ),
        (
            health.update_max > LARGE_UPDATE,
            f"expected updates of at most {LARGE_UPDATE:g} learning rates, got one of "
            f"{health.update_max:.3g}",
        ),
        (stale, f"{stale} second moments do not know of gradients as large as the present"),
    )
    return [text for is_wrong, text in checks if is_wrong]
