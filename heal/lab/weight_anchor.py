"""Holds the weights near where they are, for some steps: elastic weight consolidation.

The pull is a gradient like any other: it is added before clipping, which bounds it, and no loss
and no batch is needed for it. Nothing here waits for the device.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from heal.buffers import local_part
from heal.ranks import Ranks
from heal.training_state import optimized

if TYPE_CHECKING:
    from heal.guarded_step import WatchedOptimizer

SQUARES = ("exp_avg_sq", "square_avg", "sum")
"""What optimizers call their running mean, or sum, of squared gradients."""

SMALLEST = torch.finfo(torch.float64).tiny  # instead of a count of zero, to divide by

Held = list[tuple[Tensor, Tensor, Tensor | None]]
"""Parameters, the values to return to, and how much each weight counts; None: all alike."""


class Pull:
    """Adds ``strength * importance * (w - w0)`` to the gradients of one optimizer."""

    def __init__(self, held: Held, strength: float) -> None:
        self._held = held
        self._strength = strength

    @torch.no_grad()
    def add_to_gradients(self, grad_scale: Tensor | None) -> None:
        """Pull every weight that has a gradient.

        Args:
            grad_scale: what a GradScaler has multiplied the gradients by; None if nothing.
        """
        for param, start, importance in self._held:
            grad = param.grad
            if grad is None or grad.layout is not torch.strided:
                continue
            grad, now = local_part(grad), local_part(param)
            if now.shape != start.shape or now.device != start.device:
                continue  # the model was changed since; what is new has nowhere to return to
            off = now - start
            if importance is not None:
                off = off * importance
            if grad_scale is not None:
                off = off * grad_scale.to(off.device, non_blocking=True)
            grad.add_(off.to(grad.dtype), alpha=self._strength)


class WeightAnchor:
    """Sets the pull of all optimizers together, and ends it in time.

    Args:
        optimizers: whose weights are held.
        ranks: who hold together, so that every shard is weighed by the same mean.

    Attributes:
        steps_left: how long the anchor still holds; 0 if there is none.
    """

    def __init__(self, optimizers: Sequence["WatchedOptimizer"], ranks: Ranks) -> None:
        self.steps_left = 0
        self._optimizers = optimizers
        self._ranks = ranks

    @torch.no_grad()
    def hold(self, strength: float, steps: int) -> bool:
        """Hold the weights where they are now, in place of any anchor before; False if it cannot.

        The squared gradients that Adam keeps are the diagonal of the empirical Fisher information
        of mini-batches. A weight counts ``2 * F / (F + mean(F))``: 1 if it is as important as the
        mean, never above 2, so that the pull by itself is stable under plain descent while
        ``lr * strength < 1``. Weights without such a memory count 1.
        """
        self.release()
        means = [self._mean(optimizer) for optimizer in self._optimizers]
        held: list[Held] = []
        failure: Exception | None = None
        try:
            held = [_held(o, mean) for o, mean in zip(self._optimizers, means, strict=True)]
        except Exception as error:  # most likely there is no memory for a copy of the weights
            failure = error
        # All ranks or none: replicas that are pulled differently are replicas no more.
        if not self._ranks.all_agree(failure is None and any(held)):
            if failure is not None:
                raise failure
            return False
        for optimizer, parts in zip(self._optimizers, held, strict=True):
            optimizer.hold(Pull(parts, strength))
        self.steps_left = steps
        return True

    def count_step(self) -> None:
        """Count a step; the last one releases the weights."""
        if self.steps_left:
            self.steps_left -= 1
            if not self.steps_left:
                self.release()

    def release(self) -> None:
        """Let go, and free the memory."""
        self.steps_left = 0
        for optimizer in self._optimizers:
            optimizer.release()

    def _mean(self, optimizer: Any) -> Tensor:
        """Return the mean of what is remembered, over all weights of all ranks, on the device."""
        params = _trained(optimizer)
        device = params[0].device if params else torch.device("cpu")
        sums = torch.zeros(2, dtype=torch.float64, device=device)
        for param in params:
            fisher = _squares(param, optimizer.state.get(param, {}))
            if fisher is not None:
                sums[0] += fisher.sum(dtype=torch.float64).to(device, non_blocking=True)
                sums[1] += fisher.numel()
        sums = self._ranks.mean(sums)
        return sums[0] / sums[1].clamp(min=SMALLEST)


def _trained(optimizer: Any) -> list[Tensor]:
    return [p for p in optimized(optimizer) if p.requires_grad]


def _held(optimizer: Any, mean: Tensor) -> Held:
    held: Held = []
    for param in _trained(optimizer):
        fisher = _squares(param, optimizer.state.get(param, {}))
        importance = None if fisher is None else _importance(fisher, mean).to(param.dtype)
        held.append((param, local_part(param).clone(), importance))
    return held


def _squares(param: Tensor, state: dict[str, Any]) -> Tensor | None:
    for name in SQUARES:
        value = state.get(name)
        if isinstance(value, Tensor) and value.shape == param.shape:
            return local_part(value)
    return None


def _importance(fisher: Tensor, mean: Tensor) -> Tensor:
    mean = mean.to(fisher.device, fisher.dtype, non_blocking=True)
    share = fisher.add(mean).reciprocal_().mul_(fisher).mul_(2.0)
    return torch.where(mean > 0, share, 1.0)
