"""The steps of a trainer: what stands in for its own calls while it trains."""

import copy
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from heal.actions import HealingError
from heal.causes import Cause, Family
from heal.data.split import CannotSplit, num_samples, own_copy, split
from heal.detectors.rewards import REWARD
from heal.detectors.robust import FEWEST, RECENT, SAME, Window
from heal.diagnose import Diagnosis
from heal.exit_codes import ExitCode
from heal.guarded_step import Judged, WatchedOptimizer
from heal.healer import Healer
from heal.integrations.patches import Patches
from heal.integrations.transformers.batches import ReplayedEpochs, TrainerBatches
from heal.integrations.transformers.position import TrainerPosition
from heal.ranks import HostFacts
from zclip.clippers import ClipResult

LOGGED = ("_metrics", "_stored_metrics", "_logs", "_total_train_tokens")
"""What trainers of TRL write in ``compute_loss`` for their logs, and an experiment must not."""


class TrainerSteps:
    """Stands in for ``training_step``, the accelerator's clip, and the optimizer's step.

    Gradients are measured before they are clipped, and bad steps are skipped on the device. A
    trainer clips and steps in two calls; one verdict serves both. Without ZClip the trainer's own
    clip follows the measurement, so that a healthy run is bit-identical to the bare one. Nothing
    here reads the device.

    With ``batches`` what a step raises is healed, in one process. A failure undoes the whole step
    so far, because its gradients cannot be separated: generators and buffers return to where the
    step began, and its micro-batches come again. One that cannot be used is replaced by the next
    of the stream, so that the step keeps its size.

    Args:
        trainer: its model, optimizer and scheduler are ready.
        patches: undone by their owner when the run ends.
        batches: the trainer's, drawn through the healer; None to watch and skip only.
        epochs: what makes the trainer's loop follow a rollback; None if nothing does.

    Attributes:
        stopped: why the run has to stop, if a signal arrived; it was saved first.
        has_hooks: whether the trainer calls back at the beginning of its steps.
    """

    def __init__(
        self,
        trainer: Any,
        healer: Healer,
        patches: Patches,
        position: TrainerPosition,
        batches: TrainerBatches | None = None,
        epochs: ReplayedEpochs | None = None,
    ) -> None:
        self.stopped: HealingError | None = None
        self.has_hooks = False
        self._trainer = trainer
        self._healer = healer
        self._guarded = healer.guarded
        self._position = position
        self._batches = batches
        self._epochs = epochs
        self._own_training_step = trainer.training_step
        self._own_clip = trainer.accelerator.clip_grad_norm_
        self._own_step = trainer.optimizer.step
        self._scaler = getattr(trainer.optimizer, "scaler", None)
        self._is_paired = is_paired(trainer)
        # Of the step that is under way.
        self._is_in_step = False
        self._calls = 0  # of training_step
        self._inputs: list[Any] = []  # of its micro-batches, so far
        self._num_items: Any = None  # in the step, once a batch of it was replaced
        self._online_step = 0  # what TRL counted when it began
        self._loss: Tensor | None = None  # the sum of what its micro-batches returned
        self._facts = HostFacts()
        self._results: list[ClipResult | None] | None = None
        self._judged: Judged | None = None
        self._has_loss = self._posted = False
        self._failure: Exception | None = None  # of the optimizer
        patches.set(trainer, "training_step", self.training_step)
        patches.set(trainer.accelerator, "clip_grad_norm_", self.clip_grad_norm_)
        step: Any = partial(self.step)
        step._wrapped_by_lr_sched = True  # else schedulers warn
        patches.set(trainer.optimizer, "step", step)

    def begin_step(self) -> None:
        """Do what comes before the first micro-batch of a step."""
        self._is_in_step = self.has_hooks = True
        self._healer.contained(self._healer.before_step)

    # A micro-batch, again after a cure.

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Return the micro-batch's loss, as the trainer would.

        Where other ranks wait for our gradients nothing is tried again: what is raised goes on.
        """
        retries = self._batches is not None and not self._healer.has_others
        if retries and not self._calls:
            self._healer.micro.begin()
            self._forget()
            self._online_step = getattr(self._trainer, "_step", 0)
        is_due = self._healer.experiment.is_due and hasattr(self._trainer, "compute_loss")
        with self._trial(model, inputs, num_items_in_batch) if is_due else nullcontext():
            if retries:
                return self._healed(model, inputs, num_items_in_batch)
            return self._added(self._own_training_step(model, inputs, num_items_in_batch))

    def _added(self, loss: Tensor) -> Tensor:
        """Add the share of a micro-batch to the step's mean loss, on the device."""
        self._loss = loss.detach() if self._loss is None else self._loss + loss.detach()
        return loss

    def _forget(self) -> None:
        self._results = self._judged = self._loss = None

    @contextmanager
    def _trial(self, model: Any, inputs: Any, num_items_in_batch: Any) -> Iterator[None]:
        """Compare old weights with today's on a micro-batch, which is prepared once for both."""
        trainer, experiment = self._trainer, self._healer.experiment
        model.train()
        prepared = trainer._prepare_inputs(inputs)
        kept = {
            name: copy.deepcopy(vars(trainer)[name]) for name in LOGGED if name in vars(trainer)
        }
        num_tokens = getattr(trainer.state, "num_input_tokens_seen", 0)

        def compute() -> Tensor:
            with trainer.compute_loss_context_manager():
                loss: Tensor = trainer.compute_loss(
                    model, own_copy(prepared), num_items_in_batch=num_items_in_batch
                )
            return loss.mean()

        def lost_reward() -> float:
            trainer._generate_and_score_completions(own_copy(inputs))
            return -float(trainer._metrics["train"][REWARD][-1])

        # A loss over completions that the policy has just generated is about zero, whatever the
        # weights. There rewards are compared, for which both weights generate answers; not in
        # evaluation mode, where the trainer keeps rewards elsewhere.
        asked, level = experiment.suspicion, None
        if asked and asked.cause is not Cause.NONFINITE_GRADIENT and not asked.is_of_evaluation:
            level = reward_level(trainer, asked.bad_step)
        if level is None:
            experiment.compare(compute)
        else:
            experiment.compare(lost_reward, level)
        vars(trainer).update(kept)
        trainer.state.num_input_tokens_seen = num_tokens
        with Patches() as patches:
            patches.set(trainer, "_prepare_inputs", lambda _: prepared)
            yield

    def _healed(self, model: Any, inputs: Any, num_items_in_batch: Any) -> Tensor:
        self._calls += 1
        self._inputs.append(inputs)
        first = at = len(self._inputs) - 1

        def compute() -> Tensor:
            """Run micro-batches; return the loss of the last, the others were returned before."""
            nonlocal at
            whole = self._healer.micro.pieces == 1
            run = self._own_training_step if whole else self._run_in_pieces
            items = num_items_in_batch if self._num_items is None else self._num_items
            for at in range(first, len(self._inputs)):
                loss = self._added(run(model, self._inputs[at], items))
            return loss

        def failed(diagnosis: Diagnosis) -> None:
            nonlocal first
            first = 0  # the whole step is undone
            self._forget()
            if hasattr(self._trainer, "_step"):
                self._trainer._step = self._online_step
            self._healer.micro.note_size(self._count(self._inputs[at]))
            if diagnosis.family is Family.DATA and self._batches is not None:
                diagnosis.evidence.update(self._batches.identity(self._inputs[at]))

        while self._inputs:
            is_done, result = self._healer.repeat(compute, failed)
            if is_done:
                last: Tensor = result
                return last
            self._replace(at, num_items_in_batch)
        return torch.zeros((), device=self._trainer.args.device)

    def _replace(self, at: int, num_items_in_batch: Any) -> None:
        """Take another batch for one that was given up; count the items of the step again."""
        trainer, batches = self._trainer, self._batches
        assert batches is not None
        del self._inputs[at]
        replacement = batches.replacement()
        if replacement is not None:
            self._inputs.append(replacement)
        else:
            trainer.current_gradient_accumulation_steps -= 1
        step = self._inputs + batches.of_step[self._calls :]
        if num_items_in_batch is not None and step:
            self._num_items = trainer._get_num_items_in_batch(step, trainer.args.device)

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
        parts = self._healer.micro.parts_of(self._count(inputs))
        for piece, share in in_pieces(prepared, parts, self._is_paired):
            weight = 1.0 if adds else share
            with Patches() as patches:
                patches.set(trainer, "_prepare_inputs", lambda _, piece=piece: piece)
                patches.set(
                    accelerator,
                    "backward",
                    lambda loss, weight=weight, **own: backward(loss * weight, **own),
                )
                losses.append(self._own_training_step(model, piece, num_items_in_batch) * weight)
            if online_step is not None:  # one micro-batch, however many pieces
                trainer._step = online_step
        if online_step is not None:
            trainer._step = online_step + 1
        return torch.stack(losses).sum()

    # The optimizer's step.

    @torch.no_grad()
    def clip_grad_norm_(
        self, parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2.0
    ) -> Any:
        """Replace the accelerator's: return the norm before clipping, on the device."""
        parameters = list(parameters)
        if self._scaler is not None:
            self._trainer.accelerator.unscale_gradients()
        found = [result for result in self._measured() if result is not None]
        if found and self._healer.config.zclip_enabled:
            return found[0].total_norm.float()
        own = self._own_clip if self._scaler is None else torch.nn.utils.clip_grad_norm_
        norm = own(parameters, max_norm, norm_type)
        if not found or not isinstance(norm, Tensor):
            return norm
        # Skipped gradients are zero by now; the log should show their norm as it was.
        return torch.where(found[0].blocked > 0, found[0].total_norm.to(norm), norm)

    def _measured(self) -> list[ClipResult | None]:
        """Measure, clip if that is ours, and judge the loss; all groups are skipped or none is."""
        if self._results is None:
            ranks, self._facts = self._guarded.ranks, HostFacts()
            self._healer.contained(self._ask_host)
            lanes = ranks.lanes(self._facts, self._loss) if ranks.has_others else None
            self._results = self._guarded.clip(self._loss, lanes)
            self._judged = self._guarded.judge(self._results, self._loss, lanes)
        return self._results

    def _ask_host(self) -> None:
        self._facts = self._healer.monitor.facts()

    def step(self, closure: Any = None) -> None:
        """Replace ``optimizer.step``. What it raises is healed once the step is over.

        By then the trainer has stepped its scheduler and its counters, so that all can be returned
        together.
        """
        optimizer = self._trainer.optimizer
        optimizer._opt_called = True  # schedulers check whether the optimizer has stepped
        if not optimizer.gradient_state.sync_gradients:
            return
        if not self._is_in_step:
            # A trainer with a loop of its own, as that of PPO: no hook is called for its steps. Its
            # counters are left alone, and what it raises goes on.
            self._healer.contained(self._healer.before_step)
            self._take_step()
            self._after_step(None)
            return
        try:
            self._take_step()
        except Exception as error:
            if self._batches is None:
                raise
            self._failure = error

    @torch.no_grad()
    def _take_step(self) -> None:
        """Step unless skipped, and post the verdict, if there were gradients."""
        results = self._measured()  # by now, if the trainer clips
        judged, self._has_loss = self._judged, self._loss is not None
        self._posted = judged is not None
        self._forget()
        try:
            for optimizer, result in zip(self._guarded.optimizers, results, strict=True):
                if result is None:
                    optimizer.inner.step()  # without gradients: up to the optimizer
                elif self._scaler is not None:
                    self._step_scaled(optimizer, result)
                else:
                    optimizer.step_if_allowed(result)
        finally:  # also if the optimizer fails: ranks must post equally often
            if judged is not None:
                self._guarded.post(self._healer.training.step, judged)
            else:
                self._guarded.buffers.settle(False)

    def _step_scaled(self, optimizer: WatchedOptimizer, result: ClipResult) -> None:
        """Have the GradScaler step; a step to skip looks to it like one that overflowed."""
        assert self._scaler is not None
        skips = optimizer.skips(result.verdict)
        state = self._scaler._per_optimizer_states[id(optimizer.inner)]
        for found in state["found_inf_per_device"].values():
            found.clamp_(min=skips.to(found, non_blocking=True))
        with optimizer.scaled_lr():
            self._own_step()

    # After it.

    def end_step(self, control: Any) -> None:
        """Do what comes after the optimizer, the scheduler and the trainer's count have stepped.

        Raises:
            HealingError: the run must stop; the postmortem is written.
        """
        if not self._is_in_step:
            return  # a trainer with a loop of its own
        if self._inputs:
            self._healer.failures.worked()
        self._is_in_step = False
        self._inputs.clear()
        self._calls, self._num_items = 0, None
        was_set_back = self._position.was_set_back  # within the step, which then was repeated
        self._position.correct_epoch()
        failure, self._failure = self._failure, None
        if failure is None:
            self._after_step(control)
        else:
            self._forget()
            self._healer.heal(*self._healer.failures.judge(failure, "step"))
            if not self._position.was_set_back:
                self._healer.training.advance()
        epochs = None if was_set_back else self._epochs
        if self._position.settle(control, epochs is not None) and epochs is not None:
            epochs.leave(control)

    def _after_step(self, control: Any) -> None:
        """Count the step, and recover from what the records of earlier ones show."""
        healer = self._healer
        try:
            with healer.halting():
                healer.contained(
                    lambda: healer.after_step(self._facts, self._posted, self._has_loss)
                )
        except HealingError as halt:
            is_stop = halt.exit_code == int(ExitCode.PREEMPTED)
            if self._batches is None or control is None or not is_stop:
                raise
            self.stopped = halt  # raised once the trainer has saved and returned
            control.should_save = control.should_training_stop = True


def reward_level(trainer: Any, bad_step: int) -> tuple[float, float] | None:
    """Return the usual reward, negated like a loss, and its noise, from before a step.

    None if the trainer makes no completions, if another process makes them, which does not have the
    weights of a trial, or if it has logged too few rewards.
    """
    if not hasattr(trainer, "_generate_and_score_completions") or trainer.use_vllm:
        return None
    rewards = [
        line[REWARD]
        for line in trainer.state.log_history
        if REWARD in line and line["step"] <= bad_step
    ]
    if len(rewards) < FEWEST:
        return None
    window = Window(RECENT, rewards)
    return -window.median, max(window.spread, SAME * abs(window.median))


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
