"""Old weights in place of today's for one forward pass, and every bit back afterwards."""

import math
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from heal.buffers import Key, are_of_evaluation
from heal.snapshots import Snapshot
from heal.training_state import RngState, TrainingState


class Trial:
    """Old weights in place of today's, until :meth:`end`.

    Weights that the optimizer trains and buffers that move are swapped by copying, so that every
    tensor keeps its address. Gradients, generators, parameter groups and schedulers are put back.

    Args:
        state: the tensors that are swapped.
        snapshot: the old weights; None if there is none, so that nothing can be tried.
        player: the optimizer whose weights are swapped; None for those of all.
        wants_gradients: whether gradients are in question, so that the loss is backpropagated.
        is_of_evaluation: whether layers that keep running statistics read them, as evaluation does.
            All else stays in training mode: there forward returns what the caller expects.
        note: called with what failed.
    """

    def __init__(
        self,
        state: TrainingState,
        snapshot: Snapshot | None,
        player: int | None,
        wants_gradients: bool,
        is_of_evaluation: bool,
        note: Callable[[str], None],
    ) -> None:
        self._note = note
        self.wants_gradients = wants_gradients
        self.is_of_evaluation = is_of_evaluation
        self._state = state
        self._live = state.everything()
        held = [key for key in self._live if key[0] in ("parameter", "buffer")]
        # On the host: the body may need all the memory that the device has.
        self._saved = {key: self._live[key].detach().to("cpu", copy=True) for key in held}
        self._grads = [(p, p.grad) for p in state.parameters()]
        self._modes = [(module, module.training) for module in state.model.modules()]
        self._hooks: list[Any] = []
        if is_of_evaluation:
            for module, _ in self._modes:
                if are_of_evaluation(module):
                    module.eval()
                    # The body may put the model into training mode once more.
                    self._hooks.append(module.register_forward_pre_hook(_evaluate))
        self._values = state.values()
        self.rng = RngState.now()
        self.is_possible = snapshot is not None
        for param, _ in self._grads:
            param.grad = None
        if snapshot is not None:
            swapped = state.keys_of(player, snapshot.tensors)
            self._write({key: snapshot.tensors[key] for key in swapped if key in self._live})

    @torch.no_grad()
    def _write(self, tensors: Mapping[Key, Tensor]) -> None:
        for key, tensor in tensors.items():
            # Through .data: a write that is taken back is none to whoever counts versions.
            self._live[key].data.copy_(tensor)
        fsdp: Any = sys.modules.get("torch.distributed.fsdp")  # to import it takes a second
        for module in () if fsdp is None else self._state.model.modules():
            if isinstance(module, fsdp.FSDPModule):
                module.reshard()  # what a forward without a backward leaves gathered is old now

    @property
    def needs_both(self) -> bool:
        """Whether the loss with today's weights must come from the trial too, not from the step.

        The cause of NaN in the real step, such as a hook, may be missing in a trial, and the step
        is not taken in evaluation mode.
        """
        return self.wants_gradients or self.is_of_evaluation

    def forward(self, compute: Callable[[], Tensor | float]) -> float | None:
        """Return a loss computed without gradients; None if that failed. Generators are put back.

        Where gradients are in question it is backpropagated, and infinite if they are not finite.
        With several ranks all of them call this, and a failure of one is a failure of all.
        """
        if not self.is_possible:
            return None
        if self.wants_gradients:
            return self._backward(compute)
        for mode in (torch.no_grad, torch.enable_grad):  # a loss may differentiate by itself
            try:
                with mode():
                    return float(compute())
            except Exception as error:  # an experiment must not end a run
                problem = error
            finally:
                self.rng.put_back()
        self._note(f"experiment: the forward pass failed: {problem!r}")
        return None

    def _backward(self, compute: Callable[[], Tensor | float]) -> float | None:
        try:
            with torch.enable_grad():
                loss = compute()
                if isinstance(loss, Tensor) and loss.requires_grad:
                    loss.backward()
            return self.judged(float(loss.detach() if isinstance(loss, Tensor) else loss))
        except Exception as error:  # an experiment must not end a run
            self._note(f"experiment: the backward pass failed: {error!r}")
            return None
        finally:
            for param, _ in self._grads:
                param.grad = None
            self.rng.put_back()

    def judged(self, loss: float) -> float:
        """Return the loss of a body that has backpropagated; infinite if its step would be skipped.

        So it is where gradients are in question and they, or the statistics that forward wrote,
        are not finite: weights that overflow a variance leave loss and gradients finite.
        """
        if not self.wants_gradients:
            return loss
        grads = [p.grad for p, _ in self._grads if p.grad is not None]
        buffers = [
            self._live[key]
            for key, before in self._saved.items()
            if key[0] == "buffer" and _is_finite(before)
        ]
        return loss if all(map(_is_finite, [*grads, *buffers])) else math.inf

    def put_back(self) -> None:
        """Put today's weights back, and go on in the trial, to compute with them."""
        self._write(self._saved)
        self.rng.put_back()

    def end(self) -> None:
        """Put every bit back. May be called again, if a body goes on after it."""
        self._write(self._saved)
        for param, grad in self._grads:
            param.grad = grad
        while self._hooks:
            self._hooks.pop().remove()
        for module, mode in self._modes:
            module.training = mode
        self._state.restore_settings(self._values)
        self.rng.put_back()


def _evaluate(module: Module, arguments: Any) -> None:
    module.training = False


def _is_finite(tensor: Tensor) -> bool:
    return bool(getattr(tensor, "_local_tensor", tensor).isfinite().all())
