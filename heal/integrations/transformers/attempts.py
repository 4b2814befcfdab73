"""Clips, steps and retries for a trainer: what stands in for its own calls while it trains."""

import copy
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from heal.causes import Family
from heal.data.split import CannotSplit, num_samples, own_copy, split
from heal.guarded_step import Judged, WatchedOptimizer
from heal.healer import Healer
from heal.integrations.patches import Patches
from heal.integrations.transformers.batches import TrainerBatches
from heal.journal import LEFT_OUT
from heal.ranks import HostFacts
from zclip.clippers import ClipResult


class TrainerGuard:
    """Measures gradients before they are clipped, and skips bad steps on the device.

    A trainer clips and steps in two calls; one verdict serves both. Without ZClip the trainer's own
    clip follows the measurement, so that a healthy run is bit-identical to the bare one. Nothing
    here reads the device.

    Attributes:
        loss: the sum of what the micro-batches of this step returned; None before the first.
        facts: what the host knew of the last step.
        has_loss: whether that step had a loss.
    """

    def __init__(self, trainer: Any, healer: Healer) -> None:
        self.loss: Tensor | None = None
        self.facts = HostFacts()
        self.has_loss = False
        self._healer = healer
        self._guarded = healer.guarded
        self._own_clip = trainer.accelerator.clip_grad_norm_
        self._own_step = trainer.optimizer.step
        self._unscale = trainer.accelerator.unscale_gradients
        self._scaler = getattr(trainer.optimizer, "scaler", None)
        self._results: list[ClipResult | None] | None = None
        self._judged: Judged | None = None

    def add_loss(self, loss: Tensor) -> None:
        """Add the share of a micro-batch to the step's mean loss, on the device."""
        self.loss = loss.detach() if self.loss is None else self.loss + loss.detach()

    @torch.no_grad()
    def clip_grad_norm_(
        self, parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2.0
    ) -> Any:
        """Replace the accelerator's: return the norm before clipping, on the device."""
        parameters = list(parameters)
        if self._scaler is not None:
            self._unscale()
        found = self._judge()
        if found and self._healer.config.zclip_enabled:
            return found[0].total_norm.float()
        own = self._own_clip if self._scaler is None else torch.nn.utils.clip_grad_norm_
        norm = own(parameters, max_norm, norm_type)
        if not found or not isinstance(norm, Tensor):
            return norm
        # Skipped gradients are zero by now; the log should show their norm as it was.
        return torch.where(found[0].blocked > 0, found[0].total_norm.to(norm), norm)

    @torch.no_grad()
    def step(self, step: int) -> bool:
        """Step unless skipped, and post the verdict; False if there were no gradients."""
        guarded = self._guarded
        if self._results is None:  # a trainer that does not clip
            self._judge()
        results, judged = self._results or [], self._judged
        self.has_loss = self.loss is not None
        self.forget()
        try:
            for optimizer, result in zip(guarded.optimizers, results, strict=True):
                if result is None:
                    optimizer.inner.step()  # without gradients: up to the optimizer
                elif self._scaler is not None:
                    self._step_scaled(optimizer, result)
                else:
                    optimizer.step_if_allowed(result)
        finally:  # also if the optimizer fails: ranks must post equally often
            if judged is not None:
                guarded.post(step, judged)
            else:
                guarded.buffers.settle(False)
        return judged is not None

    def forget(self) -> None:
        """Drop what a step left behind."""
        self._results = self._judged = self.loss = None

    def _step_scaled(self, optimizer: WatchedOptimizer, result: ClipResult) -> None:
        """Have the GradScaler step; a step to skip looks to it like one that overflowed."""
        assert self._scaler is not None
        skips = optimizer.skips(result.verdict)
        state = self._scaler._per_optimizer_states[id(optimizer.inner)]
        for found in state["found_inf_per_device"].values():
            found.clamp_(min=skips.to(found, non_blocking=True))
        with optimizer.scaled_lr():
            self._own_step()

    def _judge(self) -> list[ClipResult]:
        """Measure, clip if that is ours, and judge the loss; all groups are skipped or none is."""
        if self._results is None:
            ranks = self._guarded.ranks
            try:
                self.facts = self._healer.monitor.facts()
            except Exception as error:
                self.facts = HostFacts()
                self._healer.note(f"{LEFT_OUT}: {error!r}")
            lanes = ranks.lanes(self.facts, self.loss) if ranks.has_others else None
            self._results = self._guarded.clip(self.loss, lanes)
            self._judged = self._guarded.judge(self._results, self.loss, lanes)
        return [result for result in self._results if result is not None]


# A batch of a trainer in pieces, each weighted so that the gradient stays that of the whole.


PAIRED = "DataCollatorForPreference"
"""Collators of this name stack all chosen samples on all rejected ones."""

SUMMED = ("dapo", "cispo", "vespo")
"""Losses of GRPO that are sums over tokens, divided by the tokens of all pieces together."""


def is_paired(trainer: Any) -> bool:
    """Return whether row ``i`` of a batch belongs to row ``i + half``."""
    kinds = type(getattr(trainer, "data_collator", None)).__mro__
    return any(kind.__name__ == PAIRED for kind in kinds)


def adds_up(trainer: Any, num_items_in_batch: Any) -> bool:
    """Return whether the losses of pieces are to be added; else they are means, to be weighted.

    A loss divided by the items of the whole step adds up. Where a trainer does not declare it, the
    rule is that of ``Trainer.training_step``.
    """
    scaled = getattr(trainer, "loss_is_scaled_for_ga", None)
    if hasattr(trainer, "loss_type") and scaled:
        return trainer.loss_type in SUMMED
    if scaled is not None:
        return bool(scaled)
    by_model = trainer.model_accepts_loss_kwargs and num_items_in_batch is not None
    return bool(by_model or trainer.compute_loss_func is not None)


def in_pieces(inputs: Any, parts: int, paired: bool) -> list[tuple[Any, float]]:
    """Cut prepared inputs into at most ``parts``; return each piece with its share of the samples.

    If ``paired``, row ``i`` stays together with row ``i + half``.
    """
    if paired:
        half = _num_pairs(inputs)
        return [
            ({name: _rows(value, index, half) for name, value in inputs.items()}, count / half)
            for index, count in split(torch.arange(half), parts)
        ]
    try:
        pieces = split(inputs, parts)
    except CannotSplit:
        return [(inputs, 1.0)]  # whole: what cannot be cut may fit, and a wrong cut is worse
    total = sum(count for _, count in pieces)
    return [(piece, count / total) for piece, count in pieces]


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


LOGGED = ("_metrics", "_stored_metrics", "_logs", "_total_train_tokens")
"""What trainers of TRL write in ``compute_loss`` for their logs, and an experiment must not."""


class TrainerAttempts:
    """Stands in for ``trainer.training_step``: the same micro-batch, or again after a cure.

    A failure undoes the whole step so far, because its gradients cannot be separated: generators
    and buffers return to where the step began, and its micro-batches come again. One that cannot
    be used is replaced by the next of the stream, so that the step keeps its size.
    """

    def __init__(
        self, trainer: Any, healer: Healer, guard: TrainerGuard, batches: TrainerBatches
    ) -> None:
        self._trainer = trainer
        self._healer = healer
        self._guard = guard
        self._batches = batches
        self._training_step = trainer.training_step
        self._micro = healer.micro
        self._experiment = healer.experiment
        self._is_alone = not healer.has_others
        self._is_paired = is_paired(trainer)
        self._inputs: list[Any] = []  # of the micro-batches of this step, so far
        self._calls = 0
        self._num_items: Any = None  # in the step, once a batch of it was replaced
        self._online_step = 0

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Return the micro-batch's loss, as the trainer would.

        Where other ranks wait for our gradients nothing is tried again: what is raised goes on.
        """
        if not self._calls and self._is_alone:
            self._micro.begin()
            self._guard.forget()
            self._online_step = getattr(self._trainer, "_step", 0)
        is_due = self._experiment.is_due
        trial = self._trial(model, inputs, num_items_in_batch) if is_due else nullcontext()
        with trial:
            if self._is_alone:
                return self._heal_step(model, inputs, num_items_in_batch)
            loss: Tensor = self._training_step(model, inputs, num_items_in_batch)
            self._guard.add_loss(loss)
            return loss

    def end_step(self) -> None:
        """Forget the batches of a step that the optimizer has taken."""
        if self._inputs:
            self._healer.retries.worked()
        self._inputs.clear()
        self._calls, self._num_items = 0, None

    @contextmanager
    def _trial(self, model: Any, inputs: Any, num_items_in_batch: Any) -> Iterator[None]:
        """Compare old weights with today's on a micro-batch before the step takes it.

        The batch is prepared once: completions that were generated for the trial serve the step
        as well. What the trainer counts and logs in ``compute_loss`` is put back.
        """
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

        self._experiment.compare(compute)
        vars(trainer).update(kept)
        with Patches() as patches:
            patches.set(trainer, "_prepare_inputs", lambda _: prepared)
            yield

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
            self._guard.forget()
            self._micro.undo()
            if hasattr(self._trainer, "_step"):
                self._trainer._step = self._online_step
            if not self._healer.heal(*failure):
                self._replace_last(num_items_in_batch)
                if not self._inputs:
                    return torch.zeros((), device=self._trainer.args.device)
            first = 0

    def _replace_last(self, num_items_in_batch: Any) -> None:
        """Take another batch for one that was given up; count the items of the step again."""
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
            run = self._training_step if self._micro.pieces == 1 else self._run_in_pieces
            for one in inputs:
                loss = run(model, one, num_items_in_batch)
                self._guard.add_loss(loss)
        except Exception as error:
            diagnosis, raised = self._healer.retries.judge(error, "forward")
        else:
            return loss, None
        self._micro.note_size(self._count(one))
        if diagnosis.family is Family.DATA:
            diagnosis.evidence.update(self._batches.identity(one))
        return loss, (diagnosis, raised)

    def _count(self, inputs: Any) -> int:
        """Return into how many pieces a batch could be cut."""
        if isinstance(inputs, list):  # prompts: the samples are made from them
            return int(self._trainer.args.per_device_train_batch_size)
        return _num_pairs(inputs) if self._is_paired else num_samples(inputs)

    def _run_in_pieces(self, model: Any, inputs: Any, num_items_in_batch: Any) -> Tensor:
        """Prepare the batch once, as generations must be; then step by step through its pieces."""
        trainer, accelerator = self._trainer, self._trainer.accelerator
        model.train()
        prepared = trainer._prepare_inputs(inputs)
        adds = adds_up(trainer, num_items_in_batch)
        backward, online_step = accelerator.backward, getattr(trainer, "_step", None)
        losses: list[Tensor] = []
        parts = self._micro.parts_of(self._count(inputs))
        for piece, share in in_pieces(prepared, parts, self._is_paired):
            weight = 1.0 if adds else share
            with Patches() as patches:
                patches.set(trainer, "_prepare_inputs", lambda _, piece=piece: piece)
                patches.set(
                    accelerator,
                    "backward",
                    lambda loss, weight=weight, **own: backward(loss * weight, **own),
                )
                losses.append(self._training_step(model, piece, num_items_in_batch) * weight)
            if online_step is not None:  # one micro-batch, however many pieces
                trainer._step = online_step
        if online_step is not None:
            trainer._step = online_step + 1
        return torch.stack(losses).sum()
