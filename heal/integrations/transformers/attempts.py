"""Tries the micro-batches of a trainer's step, and heals what an attempt raises."""

import copy
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from heal.attempts import Attempts
from heal.causes import Family
from heal.data.split import CannotSplit, num_samples, split
from heal.data.stream import own_copy
from heal.diagnose import Diagnosis
from heal.guarded_step import GuardedStep, Judged, WatchedOptimizer
from heal.healer import Healer
from heal.integrations.patches import Patches
from heal.integrations.transformers.batches import TrainerBatches
from heal.ranks import HostFacts
from heal.training_state import RngState
from zclip.clippers import ClipResult

# Clip and step of a trainer, guarded. The trainer asks for both apart; the verdict joins them.


class TrainerGuard:
    """Measures gradients before they are clipped, refuses bad steps on the device.

    Without ZClip the trainer's own clip follows the measurement, so that a healthy run stays bit
    by bit what it was. Nothing here reads the device.

    Args:
        guarded: the optimizers, as the healer wrapped them.
        clips: whether our clipper takes the place of the trainer's.
        own_clip: ``accelerator.clip_grad_norm_`` as it was.
        facts: tells what the host knows of the step that is about to be taken.
        scaled: what steps where a GradScaler is in use; None without one.

    Attributes:
        loss: the sum of what the micro-batches of this step returned; None before the first.
        facts: what was told in the last step.
        has_loss: whether that step had a loss.
    """

    def __init__(
        self,
        guarded: GuardedStep,
        clips: bool,
        own_clip: Callable[..., Any],
        facts: Callable[[], HostFacts],
        scaled: "ScaledStep | None" = None,
    ) -> None:
        self.loss: Tensor | None = None
        self.facts = HostFacts()
        self.has_loss = False
        self._guarded = guarded
        self._clips = clips
        self._own_clip = own_clip
        self._ask_facts = facts
        self._scaled = scaled
        self._results: list[ClipResult | None] | None = None
        self._judged: Judged | None = None

    def add_loss(self, loss: Tensor) -> None:
        """Hear of a micro-batch; its share of the step's mean loss, on the device."""
        self.loss = loss.detach() if self.loss is None else self.loss + loss.detach()

    @torch.no_grad()
    def clip_grad_norm_(
        self, parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2.0
    ) -> Any:
        """Take the place of the accelerator's: returns the norm before clipping, on the device."""
        parameters = list(parameters)
        if self._scaled is not None:
            self._scaled.unscale()
        found = self._judge()
        if not self._clips or not found:
            own = self._own_clip if self._scaled is None else torch.nn.utils.clip_grad_norm_
            norm = own(parameters, max_norm, norm_type)
            if not found or not isinstance(norm, Tensor):
                return norm
            # Refused gradients are zero by now; the log should tell their norm as it was.
            told = found[0].total_norm.to(norm)
            return torch.where(found[0].blocked > 0, told, norm)
        return found[0].total_norm.float()

    @torch.no_grad()
    def step(self, step: int) -> bool:
        """Step unless refused, and mail the verdict; False if there were no gradients."""
        guarded = self._guarded
        if self._results is None:  # a trainer that does not clip
            self._judge()
        results, self._results = self._results or [], None
        self.has_loss, self.loss = self.loss is not None, None
        judged, self._judged = self._judged, None
        try:
            for optimizer, result in zip(guarded.optimizers, results, strict=True):
                if result is None:
                    optimizer.inner.step()  # what it makes of no gradients is its own affair
                elif self._scaled is not None:
                    self._scaled.step(optimizer, result)
                else:
                    optimizer.step_if_allowed(result)
        finally:  # also if the optimizer fails: ranks must count their mail alike
            if judged is not None:
                guarded.post(step, judged)
            else:
                guarded.buffers.settle(False)
        return judged is not None

    def forget(self) -> None:
        """Drop what a step that was given up left behind."""
        self._results = self._judged = self.loss = None

    def _judge(self) -> list[ClipResult]:
        """Measure, clip if that is ours, and judge the loss; all groups or none are refused."""
        if self._results is None:
            ranks = self._guarded.ranks
            self.facts = self._ask_facts()
            lanes = ranks.lanes(self.facts, self.loss) if ranks.has_others else None
            self._results = self._guarded.clip(self.loss, lanes)
            self._judged = self._guarded.judge(self._results, self.loss, lanes)
        return [result for result in self._results if result is not None]


class ScaledStep:
    """The step of an optimizer whose gradients a GradScaler made larger.

    The scaler steps, as without us; a step that we refuse looks to it like one that overflowed, so
    that nothing but its own way of refusing is used.

    Args:
        accelerated: the optimizer as accelerate wrapped it.
        unscale: brings gradients to their true size; once per step.
    """

    def __init__(self, accelerated: Any, unscale: Callable[[], None]) -> None:
        self.unscale = unscale
        self._scaler = accelerated.scaler
        self._own_step = accelerated.step

    def step(self, optimizer: WatchedOptimizer, result: ClipResult) -> None:
        """Step unless refused or overflowed, and update the scale."""
        refused = optimizer.skips(result.verdict)
        state = self._scaler._per_optimizer_states[id(optimizer.inner)]
        for found in state["found_inf_per_device"].values():
            found.clamp_(min=refused.to(found, non_blocking=True))
        with optimizer.scaled_lr():
            self._own_step()


def clip_limit(own: float, configured: float) -> float:
    """Return the limit for our clipper: the trainer's where it has one."""
    return float(own) if own and own > 0 and math.isfinite(own) else configured


# A batch of a trainer in pieces, each weighted so that the gradient stays that of the whole.


PAIRED = "DataCollatorForPreference"
"""Collators of this name stack all chosen samples on all rejected ones."""

SUMMED = ("dapo", "cispo", "vespo")
"""Losses of GRPO that are sums over tokens, divided by the tokens of all pieces together."""


def is_paired(trainer: Any) -> bool:
    """Tell whether the first half of a batch belongs to the second, row by row."""
    kinds = type(getattr(trainer, "data_collator", None)).__mro__
    return any(kind.__name__ == PAIRED for kind in kinds)


def adds_up(trainer: Any, num_items_in_batch: Any) -> bool:
    """Tell whether the losses of pieces are to be added; else they are means, to be weighted.

    A loss divided by the items of the whole step adds up. Where trainers say nothing, the rule is
    that of ``Trainer.training_step``.
    """
    scaled = getattr(trainer, "loss_is_scaled_for_ga", None)
    if hasattr(trainer, "loss_type") and scaled:
        return trainer.loss_type in SUMMED
    if scaled is not None:
        return bool(scaled)
    by_model = trainer.model_accepts_loss_kwargs and num_items_in_batch is not None
    return bool(by_model or trainer.compute_loss_func is not None)


def in_pieces(inputs: Any, parts: int, paired: bool) -> list[tuple[Any, float]]:
    """Cut prepared inputs; return each piece with its share of the samples.

    Args:
        inputs: what the model or the loss is given.
        parts: how many pieces, at most.
        paired: keep row ``i`` together with row ``i + half``.
    """
    if paired:
        return _paired_pieces(inputs, parts)
    try:
        pieces = split(inputs, parts)
    except CannotSplit:
        return [(inputs, 1.0)]  # whole: what cannot be cut may fit, and a wrong cut is worse
    total = sum(count for _, count in pieces)
    return [(piece, count / total) for piece, count in pieces]


def count_samples(inputs: Any, paired: bool) -> int:
    """Return how many pieces a batch could be cut into."""
    return _num_pairs(inputs) if paired else num_samples(inputs)


def _paired_pieces(inputs: dict[str, Any], parts: int) -> list[tuple[Any, float]]:
    half = _num_pairs(inputs)
    rows = split(torch.arange(half), parts)
    return [
        ({name: _rows(value, index, half) for name, value in inputs.items()}, count / half)
        for index, count in rows
    ]


def _num_pairs(inputs: dict[str, Any]) -> int:
    """Count by the first tensor, that of tokens: log-probabilities are half as long."""
    tokens = (v for v in inputs.values() if isinstance(v, Tensor) and v.dim() > 0)
    return next((len(v) // 2 for v in tokens), 1)


def _rows(value: Any, index: Tensor, half: int) -> Any:
    if not isinstance(value, Tensor) or value.dim() == 0:
        return value
    index = index.to(value.device, non_blocking=True)
    if len(value) == 2 * half:
        return torch.cat([value[index], value[index + half]])
    return value[index] if len(value) == half else value


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
            healer.training,
            healer.guarded,
            healer.micro,
            healer.recovery,
            healer.stream,
            healer.journal,
            healer.experiment,
            healer.durable,
            healer.report,
        )
        self._healer = healer
        self._trainer = trainer
        self._guard = guard
        self._batches = batches
        self._training_step = training_step
        self._buffers = healer.guarded.buffers
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

    def heal(self, diagnosis: Diagnosis, error: Exception) -> bool:
        """Carry out the plan; a halt leaves its postmortem before the trainer sees it."""
        with self._healer.halting():
            return super().heal(diagnosis, error)

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
