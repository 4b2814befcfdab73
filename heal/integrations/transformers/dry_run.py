"""Tries a few steps of a trainer on its own data, and leaves no trace of them."""

import copy
import math
import time
from typing import Any

import torch
from torch import Tensor
from transformers.trainer_callback import CallbackHandler, DefaultFlowCallback, TrainerControl

from heal.healer.dry_run import DryRunReport
from heal.integrations.patches import Patches
from heal.state.rng import RngState

QUIET = {
    "save_strategy": "no",
    "eval_strategy": "no",
    "eval_on_start": False,
    "load_best_model_at_end": False,
    "push_to_hub": False,
    "auto_find_batch_size": False,
}
"""What a dry run switches off: nothing is written, nothing is evaluated."""


def dry_run(trainer: Any, num_steps: int) -> DryRunReport:
    """Take ``num_steps`` real steps and put everything back, also if they fail.

    Weights, buffers, optimizer, scheduler, generators, counters, log and what trainers of TRL
    keep are as before; the trainer's callbacks hear nothing, and no file is written.
    """
    if num_steps < 1:
        raise ValueError(f"num_steps is {num_steps}; wanted at least 1")
    before = _Before(trainer)
    tried = _Tried(trainer)
    began = time.perf_counter()
    try:
        _make_quiet(trainer, num_steps)
        tried.listen()
        trainer.train()
    except Exception as error:
        tried.problems.append(f"{type(error).__name__}: {error}")
    finally:
        tried.patches.put_back()
        before.put_back()
    losses = tried.losses_per_step()
    if not all(math.isfinite(loss) for loss in losses):
        tried.problems.append(f"losses are not finite: {losses}")
    if losses and not tried.trained:
        tried.problems.append("no parameter has a gradient")
    seconds = (time.perf_counter() - began) / max(1, len(losses))
    return DryRunReport(losses, seconds, before.num_bytes, tried.trained, tried.problems)


class _Tried:
    """What was seen of the steps."""

    def __init__(self, trainer: Any) -> None:
        self.patches = Patches()
        self.problems: list[str] = []
        self.trained = 0
        self._trainer = trainer
        self._losses: dict[int, list[Tensor]] = {}

    def listen(self) -> None:
        """Note every loss, and how many parameters have a gradient."""
        trainer, training_step = self._trainer, self._trainer.training_step

        def listening(*args: Any, **kwargs: Any) -> Any:
            loss = training_step(*args, **kwargs)
            self._losses.setdefault(trainer.state.global_step, []).append(loss)
            self.trained = sum(p.grad is not None for p in trainer.model.parameters())
            return loss

        self.patches.set(trainer, "training_step", listening)

    def losses_per_step(self) -> list[float]:
        return [float(sum(parts)) for parts in self._losses.values()]


class _Before:
    """A trainer as it was: copies of what steps write to, references to what they replace."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._attributes = dict(vars(trainer))
        self._small = {
            name: copy.deepcopy(value)
            for name, value in vars(trainer).items()
            if name in ("state", "_metrics", "_logs")
        }
        self._rng = RngState.now()
        model = trainer.model
        self._tensors = [(t, t.detach().clone()) for t in (*model.parameters(), *model.buffers())]
        self._grads = [(p, p.grad) for p in model.parameters()]
        self._modes = [(module, module.training) for module in model.modules()]
        self._recomputes = getattr(model, "is_gradient_checkpointing", False)
        optimizer = trainer.optimizer
        self._optimizer = None if optimizer is None else copy.deepcopy(optimizer.state_dict())
        self._accelerator = {
            name: list(value)
            for name, value in vars(trainer.accelerator).items()
            if isinstance(value, list)
        }

    @property
    def num_bytes(self) -> int:
        return sum(saved.nbytes for _, saved in self._tensors)

    @torch.no_grad()
    def put_back(self) -> None:
        trainer = self._trainer
        for tensor, saved in self._tensors:
            tensor.copy_(saved)
        for param, grad in self._grads:
            param.grad = grad
        for module, mode in self._modes:
            module.training = mode
        if not self._recomputes and getattr(trainer.model, "is_gradient_checkpointing", False):
            trainer.model.gradient_checkpointing_disable()
        vars(trainer).clear()
        vars(trainer).update(self._attributes)
        for name, value in self._small.items():
            setattr(trainer, name, value)
        for name, values in self._accelerator.items():
            getattr(trainer.accelerator, name)[:] = values
        if self._optimizer is not None:
            trainer.optimizer.load_state_dict(self._optimizer)
        self._rng.put_back()


def _make_quiet(trainer: Any, num_steps: int) -> None:
    """Give the trainer settings and callbacks for a trial; :class:`_Before` has its own."""
    trainer.args = copy.copy(trainer.args)
    for name, value in {**QUIET, "max_steps": num_steps}.items():
        setattr(trainer.args, name, type(getattr(trainer.args, name))(value))
    trainer.callback_handler = CallbackHandler(
        [DefaultFlowCallback()],
        trainer.model,
        trainer.processing_class,
        trainer.optimizer,
        trainer.lr_scheduler,
    )
    trainer.control = TrainerControl()
