"""Is the optimizer's memory sane? Looks at the moments of every parameter."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

FIRST = ("exp_avg", "momentum_buffer")
SECOND = ("exp_avg_sq", "square_avg", "max_exp_avg_sq", "sum")
LARGE_UPDATE = 10.0  # Adam's update is below 1 where gradients are alike, and seldom above 10
STALE = 1e4  # squared gradients so far above their mean were not known to it


@dataclass(frozen=True, slots=True)
class OptimizerHealth:
    """What was found; ``problems`` is empty if nothing is wrong.

    ``update_rms`` and ``update_max`` are of first moment over root of second, bias taken out, in
    units of the learning rate; NaN for optimizers without both. ``missing`` counts parameters with
    a gradient and no state.
    """

    update_rms: float = float("nan")
    update_max: float = float("nan")
    nonfinite: int = 0
    negative: int = 0
    missing: int = 0
    fewest_steps: float = float("nan")
    most_steps: float = float("nan")
    problems: list[str] = field(default_factory=list)

    @property
    def is_ok(self) -> bool:
        return not self.problems


@torch.no_grad()
def optimizer_health(optimizer: Optimizer) -> OptimizerHealth:
    """Measure the state of an optimizer of torch, wrapped or not; waits for the device once.

    Finds moments that hold NaN or Inf, second moments below zero, parameters whose state is gone,
    step counts that differ, updates of more than ten learning rates, and second moments far below
    the present gradient (a reset, or a corrupted memory).
    """
    told: list[Tensor] = []
    counts: list[float] = []
    missing = 0
    for group in optimizer.param_groups:
        for param in group["params"]:
            state = optimizer.state.get(param, {})
            if not state:
                missing += param.grad is not None and bool(optimizer.state)
                continue
            if "step" in state:
                counts.append(float(state["step"]))
            told.append(_measure(param, state, group))
    if not told:
        problems = ["no state: the optimizer has not stepped, or was reset"]
        return OptimizerHealth(missing=missing, problems=problems)
    rows = torch.stack([row.to(told[0].device, non_blocking=True) for row in told]).cpu()
    squares, elements, largest, nonfinite, negative, stale = rows.unbind(1)
    has_update = bool(elements.sum() > 0)
    health = OptimizerHealth(
        update_rms=float((squares.sum() / elements.sum()).sqrt()) if has_update else float("nan"),
        update_max=float(largest.max()) if has_update else float("nan"),
        nonfinite=int(nonfinite.sum()),
        negative=int(negative.sum()),
        missing=int(missing),
        fewest_steps=min(counts, default=float("nan")),
        most_steps=max(counts, default=float("nan")),
    )
    health.problems.extend(_problems(health, int(stale.sum())))
    return health


def _measure(param: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
    """Sum of squares and number of updates, the largest, and counts of what is wrong."""
    first = next((state[n] for n in FIRST if isinstance(state.get(n), Tensor)), None)
    second = next((state[n] for n in SECOND if isinstance(state.get(n), Tensor)), None)
    kept = [t for t in (first, second) if t is not None]
    zero = torch.zeros((), dtype=torch.float64, device=param.device)
    nonfinite = sum(((~t.isfinite()).sum().double() for t in kept), zero)
    negative = zero if second is None else (second < 0).sum().double()
    stale = zero
    if second is not None and param.grad is not None:
        stale = (param.grad.square() > STALE * second.clamp(min=1e-30)).sum().double()
        stale = torch.where(stale > param.numel() / 2, stale, zero)  # a few are only rare rows
    if first is None or second is None or "betas" not in group:
        return torch.stack([zero, zero, zero, nonfinite, negative, stale])
    steps = torch.as_tensor(state["step"], dtype=torch.float64, device=param.device)
    beta1, beta2 = (
        torch.as_tensor(b, dtype=torch.float64, device=param.device) for b in group["betas"]
    )
    mean = first.double() / (1 - beta1**steps)
    root = (second.double() / (1 - beta2**steps)).clamp(min=0).sqrt()
    update = (mean / (root + group.get("eps", 1e-8))).nan_to_num(0.0, 0.0, 0.0)
    count = torch.full_like(zero, update.numel())
    return torch.stack(
        [update.square().sum(), count, update.abs().max(), nonfinite, negative, stale]
    )


def _problems(health: OptimizerHealth, stale: int) -> list[str]:
    found = []
    if health.nonfinite:
        found.append(f"{health.nonfinite} elements of the moments are NaN or Inf")
    if health.negative:
        found.append(f"{health.negative} second moments are below zero")
    if health.missing:
        found.append(f"{health.missing} parameters with a gradient have no state")
    if health.most_steps > health.fewest_steps:
        found.append(f"step counts differ: {health.fewest_steps:g} to {health.most_steps:g}")
    if health.update_max > LARGE_UPDATE:
        found.append(f"an update of {health.update_max:.3g} learning rates; wanted at most 10")
    if stale:
        found.append(f"{stale} second moments do not know of gradients as large as the present")
    return found
