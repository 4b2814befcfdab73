"""The loss, judged on the device: NaN and Inf are refused there, rises are left to the host."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from heal.step.ranks import HAS_FAILED, Ranks
from zclip.layout import BLOCKED, NUM_LOSS_STATE
from zclip.schemas import wide_dtype

LOSS_DECAY = 0.99  # the running mean of the loss remembers about a hundred steps
LOSS_WARMUP_STEPS = 25  # losses to absorb before any is called a spike, as many as ZClip's norms

JUDGED = frozenset((torch.float32, torch.bfloat16, torch.float16, torch.float64))
"""Dtypes of a loss that can be judged as they are."""

_watch = torch.ops.zclip.watch_loss_.default


def judgeable(loss: Any, note: Callable[[str], None]) -> Tensor | None:
    """Return a loss as one number that can be judged; None if it cannot, which is told once.

    Raises:
        TypeError: it is neither a number nor a tensor.
    """
    number: Tensor = loss if isinstance(loss, Tensor) else _as_tensor(loss)
    if number.dtype in JUDGED and not number.dim():
        return number
    if number.numel() and not number.dtype.is_complex:
        number = number.detach()
        number = number if number.dtype in JUDGED else number.float()
        return number.mean() if number.numel() > 1 else number
    what = str(number.dtype).removeprefix("torch.") if number.numel() else "empty"
    note(f"the loss is {what}, which cannot be judged: it is not watched; wanted one real number")
    return None


def _as_tensor(loss: Any) -> Tensor:
    for make in (float, torch.as_tensor):
        try:
            return torch.as_tensor(make(loss))
        except (TypeError, ValueError, RuntimeError):
            continue
    raise TypeError(f"loss is {type(loss).__name__}; wanted a tensor, a number or None")


class LossWatch:
    """The running statistics of the loss, on the device of the parameters."""

    def __init__(self, factor: float, device: torch.device) -> None:
        self.factor = factor
        self.state = torch.zeros(NUM_LOSS_STATE, dtype=wide_dtype(device), device=device)

    def judge(self, loss: Tensor, verdict: Tensor) -> None:
        """Write into the verdict what the loss says. Rises are left to the host, which has time."""
        if loss.dim() and loss.numel() != 1:
            loss = loss.mean()
        if loss.device != self.state.device:
            loss = loss.to(self.state.device, non_blocking=True)
        with_graph = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)  # as no_grad() does, in a tenth of its time
        try:
            _watch(self.state, loss, verdict, self.factor, 0, LOSS_DECAY, LOSS_WARMUP_STEPS)
        finally:
            torch._C._set_grad_enabled(with_graph)

    def judge_together(self, ranks: Ranks, summed: Tensor, verdict: Tensor) -> None:
        """As :meth:`judge`, by the mean over all ranks; refuse too if one of them failed."""
        self.judge(ranks.mean_loss(summed, self.state), verdict)
        verdict[BLOCKED].clamp_(min=summed[HAS_FAILED].clamp(max=1.0).to(verdict.dtype))
