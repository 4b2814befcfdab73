"""Real failures for any trainer: each is put into a live trainer and does its damage by itself."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from heal.data.split import num_samples


class Injection:
    """Changes what ``compute_loss`` of one trainer does; counts its calls in steps.

    Not those of experiments, which compute without gradients: they would use up the failure.

    Args:
        trainer: any; its instance is patched, as a faulty subclass would be written.
        harm: takes the number of the call, the inputs and a function that computes the loss.
    """

    def __init__(self, trainer: Any, harm: Callable[[int, Any, Callable[[], Tensor]], Tensor]):
        self.calls = 0
        self.trainer = trainer
        self._harm = harm
        self._sound = trainer.compute_loss
        trainer.compute_loss = self.compute_loss

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if not self.trainer.model.training or not torch.is_grad_enabled():
            return self._sound(model, inputs, *args, **kwargs)
        call, self.calls = self.calls, self.calls + 1
        return self._harm(call, inputs, lambda: self._sound(model, inputs, *args, **kwargs))


def nan_loss(trainer: Any, at: int = 4, times: int = 1) -> Injection:
    def harm(call, inputs, loss):
        return loss() * float("nan") if at <= call < at + times else loss()

    return Injection(trainer, harm)


def raises(trainer: Any, error: Callable[[], Exception], at: int = 4, times: int = 1) -> Injection:
    def harm(call, inputs, loss):
        if at <= call < at + times:
            raise error()
        return loss()

    return Injection(trainer, harm)


def oom_above(trainer: Any, rows: int, at: int = 4) -> Injection:
    """Memory for so many rows only, from a call on."""

    def harm(call, inputs, loss):
        if call >= at and num_samples(inputs) > rows:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return loss()

    return Injection(trainer, harm)


def scaled_loss(trainer: Any, factor: float, at: int, times: int = 1) -> Injection:
    def harm(call, inputs, loss):
        return loss() * factor if at <= call < at + times else loss()

    return Injection(trainer, harm)


def corrupts_weights(
    trainer: Any, at: int, then: Callable[[int], None] = lambda step: None
) -> Injection:
    """Weights become NaN; ``then`` is called with the trainer's step when that is over."""

    def harm(call, inputs, loss):
        if call == at:
            with torch.no_grad():
                next(iter(trainer.model.parameters())).fill_(float("nan"))
        if call > at + 1:
            then(trainer.state.global_step)
        return loss()

    return Injection(trainer, harm)
