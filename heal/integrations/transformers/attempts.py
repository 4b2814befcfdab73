"""Tries the micro-batches of a trainer's step, and heals what an attempt raises."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from heal.causes import Family
from heal.data.own_copy import own_copy
from heal.healer.attempts import Attempts
from heal.integrations.patches import Patches
from heal.integrations.transformers.batches import TrainerBatches
from heal.integrations.transformers.guard import TrainerGuard
from heal.integrations.transformers.pieces import adds_up, count_samples, in_pieces, is_paired
from heal.loop import Healer
from heal.state.rng import RngState

TrainingStep = Callable[..., Tensor]

LOGGED = ("_metrics", "_stored_metrics", "_logs", "_total_train_tokens")
"""What trainers of TRL write in ``compute_loss`` for their logs, and a trial must not."""


class TrainerAttempts(Attempts):
    """Stands in for ``trainer.training_step``: the same micro-batch, or again after a cure.

    A failure takes back the whole step so far, for its gradients cannot be told apart: generators
    and buffers return to where the step began, and its micro-batches come again. One that cannot
    be used makes way for the next of the stream, so that the step keeps its size.

    Args:
        trainer: whose step it is.
        healer: treats what is raised.
        guard: hears the losses.
        batches: where a replacement comes from.
        training_step: that of the trainer, as it was.
    """

    def __init__(
        self,
        trainer: Any,
        healer: Healer,
        guard: TrainerGuard,
        batches: TrainerBatches,
        training_step: TrainingStep,
    ) -> None:
        super().__init__(
            healer.parts.run,
            healer.parts.guarded,
            healer.parts.micro,
            healer.parts.treatment,
            healer.parts.stream,
            healer.journal,
            healer,
            healer.parts.experiment,
        )
        self._trainer = trainer
        self._guard = guard
        self._batches = batches
        self._training_step = training_step
        self._buffers = healer.parts.guarded.buffers
        self._is_paired = is_paired(trainer)
        self._inputs: list[Any] = []  # of the micro-batches of this step, so far
        self._calls = 0
        self._num_items: Any = None  # in the step, once a batch of it was replaced
        self._rng: RngState | None = None
        self._online_step = 0

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Return the micro-batch's loss, as the trainer would.

        Where other ranks wait for our gradients nothing is tried again: what is raised goes on.
        """
        if self._ranks.has_others:
            with self._tried(model, inputs, num_items_in_batch):
                loss = self._training_step(model, inputs, num_items_in_batch)
            self._guard.add_loss(loss)
            return loss
        if not self._calls:
            self._begin_step()
        with self._tried(model, inputs, num_items_in_batch):
            return self._heal_step(model, inputs, num_items_in_batch)

    @contextmanager
    def _tried(self, model: Any, inputs: Any, num_items_in_batch: Any) -> Iterator[None]:
        """Compare old weights with today's on a micro-batch, if an experiment is due.

        The batch is prepared once: completions that were generated for the trial serve the step
        as well. What the trainer counts and logs in ``compute_loss`` is put back.
        """
        if not self._experiment.is_due:
            yield
            return
        trainer = self._trainer
        model.train()
        prepared = trainer._prepare_inputs(inputs)
        kept = {
            name: copy.deepcopy(vars(trainer)[name]) for name in LOGGED if name in vars(trainer)
        }

        def compute() -> Tensor:
            with trainer.compute_loss_context_manager():
                loss: Tensor = trainer.compute_loss(
                    model, own_copy(prepared), num_items_in_batch=num_items_in_batch
                )
            return loss.mean()

        with self._experiment.trial() as trial:
            old = trial.forward(compute)
            trial.put_back()
            now = trial.forward(compute)
        vars(trainer).update(kept)
        self._experiment.note_losses(old, now)
        patches = Patches()
        patches.set(trainer, "_prepare_inputs", lambda _: prepared)
        try:
            yield
        finally:
            patches.put_back()

    def _heal_step(self, model: Any, inputs: Any, num_items_in_batch: Any) -> Tensor:
        self._calls += 1
        self._inputs.append(inputs)
        first = len(self._inputs) - 1
        while True:
            items = num_items_in_batch if self._num_items is None else self._num_items
            loss, failure = self._try(model, self._inputs[first:], items)
            if failure is None:
                return loss
            # The except block is left: nothing holds the frames whose tensors must be freed.
            self._undo()
            if not self.heal(*failure):
                self._replace_last(num_items_in_batch)
                if not self._inputs:
                    return torch.zeros((), device=self._trainer.args.device)
            first = 0

    def treat(self, error: Exception, phase: str) -> None:
        """Heal what was raised outside of forward and backward."""
        self.heal(*self.judge(error, phase))

    def end_step(self) -> None:
        """The optimizer has stepped: what it was made of may be forgotten."""
        if self._inputs:
            self._worked()
        self._inputs.clear()
        self._calls, self._num_items = 0, None

    def _begin_step(self) -> None:
        self._rng = RngState.now()
        self._buffers.begin()
        self._online_step = getattr(self._trainer, "_step", 0)
        self._guard.forget()

    def _undo(self) -> None:
        self._guard.forget()
        for param in self._trainer.model.parameters():
            param.grad = None
        self._buffers.put_back()
        if self._rng is not None:
            self._rng.put_back()
        if hasattr(self._trainer, "_step"):
            self._trainer._step = self._online_step

    def _replace_last(self, num_items_in_batch: Any) -> None:
        """Take another batch for one that was given up; count the items of the step anew."""
        trainer = self._trainer
        self._inputs.pop()
        replacement = self._batches.replacement()
        if replacement is not None:
            self._inputs.append(replacement)
        else:
            trainer.current_gradient_accumulation_steps -= 1
        step = self._inputs + self._batches.of_step[self._calls :]
        if num_items_in_batch is not None and step:
            self._num_items = trainer._get_num_items_in_batch(step, trainer.args.device)

    def _try(self, model: Any, inputs: list[Any], num_items_in_batch: Any) -> tuple[Tensor, Any]:
        """Run micro-batches; the loss is that of the last, the others were returned before."""
        loss, one = torch.zeros(()), None
        try:
            for one in inputs:
                loss = self._run_one(model, one, num_items_in_batch)
                self._guard.add_loss(loss)
        except Exception as error:
            diagnosis, raised = self.judge(error, "forward")
        else:
            return loss, None
        if diagnosis.family is Family.DATA:
            diagnosis.evidence.update(self._batches.identity(one))
        return loss, (diagnosis, raised)

    def _run_one(self, model: Any, inputs: Any, num_items_in_batch: Any) -> Tensor:
        self._micro.attempts += 1
        if isinstance(inputs, list):  # prompts: the samples are made from them
            self._micro.largest_batch = self._trainer.args.per_device_train_batch_size
        else:
            self._micro.largest_batch = count_samples(inputs, self._is_paired)
        if self._micro.pieces == 1:
            return self._training_step(model, inputs, num_items_in_batch)
        return self._run_in_pieces(model, inputs, num_items_in_batch)

    def _run_in_pieces(self, model: Any, inputs: Any, num_items_in_batch: Any) -> Tensor:
        """Prepare the batch once, as generations must be; then step by step through its pieces."""
        trainer, accelerator = self._trainer, self._trainer.accelerator
        model.train()
        prepared = trainer._prepare_inputs(inputs)
        adds = adds_up(trainer, num_items_in_batch)
        backward, online_step = accelerator.backward, getattr(trainer, "_step", None)
        losses: list[Tensor] = []
        parts = self._micro.parts_of(self._micro.largest_batch)
        for piece, share in in_pieces(prepared, parts, self._is_paired):
            weight = 1.0 if adds else share
            patches = Patches()
            patches.set(trainer, "_prepare_inputs", lambda _, piece=piece: piece)
            patches.set(
                accelerator,
                "backward",
                lambda loss, weight=weight, **own: backward(loss * weight, **own),
            )
            try:
                losses.append(self._training_step(model, piece, num_items_in_batch) * weight)
            finally:
                patches.put_back()
            if online_step is not None:  # one micro-batch, however many pieces
                trainer._step = online_step
        if online_step is not None:
            trainer._step = online_step + 1
        return torch.stack(losses).sum()
