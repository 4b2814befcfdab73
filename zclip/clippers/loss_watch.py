"""The running statistics of a loss, judged beside the gradients of its step."""

from typing import NamedTuple

import torch
from torch import Tensor


class LossWatch(NamedTuple):
    """Writes into the verdict of a step what its loss shows; see the operator ``watch_loss_``.

    A loss that is NaN or Inf skips the step on the device; rises and spikes are flags.

    Attributes:
        state: float64 [8], on the device of the verdicts.
        settings: factor, rising_steps, decay and warmup_steps of the operator.
    """

    state: Tensor
    settings: tuple[float, int, float, int]

    def judge(self, loss: Tensor, verdict: Tensor) -> None:
        """Absorb the loss, and write what it shows; nothing waits."""
        if loss.dim() and loss.numel() != 1:
            loss = loss.mean()
        if loss.device != self.state.device:
            loss = loss.to(self.state.device, non_blocking=True)
        with_graph = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)  # as no_grad() does, in a tenth of its time
        try:
            torch.ops.zclip.watch_loss_.default(self.state, loss, verdict, *self.settings)
        finally:
            torch._C._set_grad_enabled(with_graph)
