"""The loss, judged on the device: NaN and Inf are refused there, rises are left to the host."""

import torch
from torch import Tensor

from heal.step.ranks import HAS_FAILED, Ranks
from zclip.layout import BLOCKED, NUM_LOSS_STATE
from zclip.schemas import wide_dtype

LOSS_DECAY = 0.99  # the running mean of the loss remembers about a hundred steps
LOSS_WARMUP_STEPS = 25  # losses to absorb before any is called a spike, as many as ZClip's norms


_watch = torch.ops.zclip.watch_loss_.default


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
