"""Is the optimizer's memory sane? Looks at the state of every parameter."""

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

SQUARES = ("exp_avg_sq", "square_avg", "sum")  # running sums of squared gradients
NEVER_NEGATIVE = (
    *SQUARES,
    "max_exp_avg_sq",
    "exp_inf",
    "row_var",
    "col_var",
    "variance",
    "acc_delta",
    "step_size",
)
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

    update_rms: float = float("nan")
    update_max: float = float("nan")
    nonfinite: int = 0
    negative: int = 0
    missing: int = 0
    unstepped: int = 0
    fewest_steps: float = float("nan")
    most_steps: float = float("nan")
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
    told: list[Tensor] = []
    missing = 0
    keeps_any = False
    for group in optimizer.param_groups:
        keeps = _keeps_state(optimizer, group)
        keeps_any = keeps_any or keeps
        for param in group["params"]:
            state = optimizer.state.get(param, {})
            if any(isinstance(value, Tensor) and value.numel() for value in state.values()):
                told.append(_measure(param, state, group))
            else:
                missing += keeps and param.grad is not None and param.numel() > 0
    if not told:
        problems = ["no state: the optimizer has not stepped, or was reset"] if keeps_any else []
        return OptimizerHealth(missing=missing if problems else 0, problems=problems)
    rows = torch.stack([row.to(told[0].device, non_blocking=True) for row in told]).cpu()
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
    found = []
    if health.nonfinite:
        found.append(f"{health.nonfinite} elements of the state are NaN or Inf")
    if health.negative:
        found.append(f"{health.negative} second moments are below zero")
    if health.missing:
        found.append(f"{health.missing} parameters with a gradient have no state")
    if health.unstepped:
        found.append(f"{health.unstepped} parameters have moments and a step count below 1")
    if health.update_max > LARGE_UPDATE:
        found.append(
            f"expected updates of at most {LARGE_UPDATE:g} learning rates, got one of "
            f"{health.update_max:.3g}"
        )
    if stale:
        found.append(f"{stale} second moments do not know of gradients as large as the present")
    return found
