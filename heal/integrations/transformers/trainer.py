"""Healing in a trainer: a callback that watches it from within, and a wrapper that retries too."""

import copy
import math
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from transformers import TrainerCallback, TrainerState
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import CallbackHandler, DefaultFlowCallback, TrainerControl
from transformers.trainer_utils import get_last_checkpoint

from heal.actions import Backoff, Halt, Plan, Rollback, ScaleLr, ShrinkBatch, Skip, SkipBatches
from heal.causes import Cause
from heal.checkpoint.store import training_state
from heal.config import HealingConfig
from heal.detectors.plateau import Plateau
from heal.detectors.preference import ACCURACY, MARGIN
from heal.detectors.watch import LogWatch
from heal.diagnose import Diagnosis
from heal.dry_run import DryRunReport, unchanged
from heal.healer import Healer, checked_config
from heal.integrations.patches import Patches, hold_models_of
from heal.integrations.trackers import make_trackers
from heal.integrations.transformers.batches import ReplayedEpochs, TrainerBatches
from heal.integrations.transformers.position import (
    TrainerPosition,
    UndoneCheckpoints,
    checkpoint_folder,
)
from heal.integrations.transformers.steps import TrainerSteps
from heal.policy import LR_FLOOR
from heal.recovery import Hook

FILE = "healing.pt"  # what healing has learned, beside the files of a trainer's checkpoint
MORE_EPOCHS = 10**6  # beyond the planned ones: steps that were undone need batches too
LARGEST_LR_RAISE = 5.0  # a larger factor makes a run diverge that was only stuck


class SelfHealingCallback(TrainerCallback):
    """Detection, experiments, clipping and skipping for a trainer, without the retry loop.

    Gradients are measured before they are clipped; a step with NaN or Inf is skipped on the
    device; loss, gradients, weights and evaluations are watched; damage is rolled back in memory.
    Exceptions pass: :class:`SelfHealingTrainer` heals these too.

    Args:
        trainer: already built; it is changed only while it trains, and put back after. The callback
            has to be added to this one: hooks see neither losses nor gradients before clipping.
        config: settings, or a dict of them. With ``zclip_enabled`` our clipper replaces the
            trainer's, with the trainer's ``max_grad_norm`` as its limit.
        run_dir: where journal and postmortem go; the trainer's ``output_dir`` if None.
        trackers: names or objects that get alerts and numbers, beside the trainer's own
            ``report_to``, which always gets the numbers of :class:`SelfHealingTrainer`.
        plateau_lr_factor: what the learning rate is multiplied by when preference training stays
            at chance, from 1 to 5; None for an alert and no more.
        sleep: waits between retries after a network failure.

    Attributes:
        healer: of the run that is under way, or the last one; None before.
        log_watch: watches the lines of the trainer's log.
        resumed_from: the checkpoint whose healing state is to be loaded; None for none.

    Raises:
        TypeError: the trainer is not one.
        ConfigError: a setting is unknown or wrong.
        ValueError: a tracker is not known, or the factor makes no sense.

    Example:
        >>> trainer.add_callback(SelfHealingCallback(trainer))
        >>> trainer.train()
    """

    _retries = False

    def __init__(
        self,
        trainer: Any,
        config: HealingConfig | Mapping[str, Any] | None = None,
        run_dir: str | Path | None = None,
        trackers: Any = None,
        *,
        plateau_lr_factor: float | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        if plateau_lr_factor is not None and not 1.0 < plateau_lr_factor <= LARGEST_LR_RAISE:
            raise ValueError(
                f"plateau_lr_factor: expected more than 1 and at most {LARGEST_LR_RAISE}, got "
                f"{plateau_lr_factor!r}"
            )
        self.config = checked_config(config)
        self.trainer = checked_trainer(trainer)
        self.trackers = make_trackers(trackers) or None
        self.log_watch = LogWatch(self.config)
        self.healer: Healer | None = None
        self.resumed_from: str | None = None
        self._run_dir = run_dir
        self._plateau_lr_factor = plateau_lr_factor
        self._sleep = sleep
        self._patches = Patches()
        self._batches: TrainerBatches | None = None
        self._steps: TrainerSteps | None = None

    # The run begins and ends.

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Bind a healer to the trainer, whose model, optimizer and scheduler are ready now."""
        self.detach()
        trainer, config, patches = self.trainer, self.config, self._patches
        own = args.max_grad_norm
        if own and 0 < own < math.inf:
            config = replace(config, max_grad_norm=float(own))
        healer = Healer(
            trainer.model,
            inner_optimizer(trainer),
            trainer.lr_scheduler,
            config,
            run_dir=args.output_dir if self._run_dir is None else self._run_dir,
            trackers=self.trackers,
            sleep=self._sleep,
        )
        healer.training.begin_at(state.global_step)
        if state.global_step:
            healer.journal.event("resumed", state.global_step)
        healer.schedules.follow_caller()  # a rollback returns the trainer's count as well
        hold_models_of(trainer.callback_handler.callbacks, healer)
        if self._plateau_lr_factor is not None:
            healer.on_instability(raise_lr_at_chance(self._plateau_lr_factor, config))
        self.log_watch = LogWatch(config)
        replays = config.after_rollback == "replay_data"
        position = self._position = TrainerPosition(trainer, replays)
        # A step's log, evaluation and save come after its snapshot and are not repeated after a
        # rollback: what they change is saved before the next step.
        hold = healer.training.hold
        hold("trainer", position.save, self._put_position_back, until_next_step=True)
        hold("log", self.log_watch.state, self.log_watch.load_state, until_next_step=True)
        self._checkpoints = UndoneCheckpoints(trainer, healer.note)
        healer.enter(catches_signals=self._retries)
        epochs = None
        if self._retries:
            if replays and hasattr(trainer, "_run_epoch"):
                epochs = ReplayedEpochs(trainer, patches)
            self._batches = TrainerBatches(trainer, healer, is_followed=epochs is not None)
            patches.set(trainer, "get_batch_samples", self._batches.get_batch_samples)
        self._steps = TrainerSteps(trainer, healer, patches, position, self._batches, epochs)
        self.healer = healer
        if self.resumed_from:
            self._resume(Path(self.resumed_from) / FILE)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.detach()
        if self.healer is not None:
            self.healer.leave()

    def detach(self) -> None:
        """Give the trainer back as it was; done at the end of training."""
        self._patches.put_back()

    # Every step.

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._steps is not None:
            self._steps.begin_step()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._steps is not None:
            self._steps.end_step(control)

    def _put_position_back(self, saved: Any) -> None:
        """Follow a rollback, unless the trainer has a loop of its own."""
        if self._steps is not None and self._steps.has_hooks and self.healer is not None:
            self._position.put_back(saved)
            self.healer.contained(self._undo_checkpoints)

    # Between steps.

    def on_evaluate(
        self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any
    ) -> None:
        loss = (metrics or {}).get("eval_loss")
        if self.healer is not None and loss is not None:
            self.healer.observe_eval(float(loss))

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Take in a line of the trainer's log: what it shows of preferences and rewards."""
        healer = self.healer
        if healer is None or not logs:
            return
        if ACCURACY in logs or MARGIN in logs:
            # The loss alone would suggest a plateau at chance; here there is better evidence.
            plateau = healer.monitor.watch.detectors.get("plateau")
            if isinstance(plateau, Plateau):
                plateau.ignore_chance()
        healer.contained(lambda: self._observe(healer, logs))

    def _observe(self, healer: Healer, logs: Mapping[str, Any]) -> None:
        findings = self.log_watch.observe(healer.training.step, logs)
        healer.recover_from(findings)
        for finding in findings:
            if finding.cause is Cause.REWARD_COLLAPSE:  # which losses of such trainers do not show
                healer.suspect(finding)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Add what healing has learned to the checkpoint that the trainer has just saved."""
        healer = self.healer
        if healer is None:
            return
        folder = checkpoint_folder(self.trainer, state.global_step)
        if args.should_save and folder.is_dir():
            healer.contained(lambda: self._save(folder))
        healer.contained(lambda: self._report_aside(self._checkpoints.after_save()))

    def _save(self, folder: Path) -> None:
        assert self.healer is not None
        unwanted = [] if self._batches is None else self._batches.unwanted()
        own = {"log": self.log_watch.state(), "unwanted": unwanted}
        beside = folder / f"{FILE}.partial"
        torch.save({**self.healer.memory.state_dict(), **own}, beside)
        os.replace(beside, folder / FILE)

    def _resume(self, path: Path) -> None:
        """Return to what was saved; what cannot be read is noted, and learned again."""
        if self.healer is None or not path.is_file():
            return
        try:
            state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
            self.healer.memory.load_state_dict(state)
            self.log_watch.load_state(state["log"])
            if self._batches is not None:
                self._batches.leave_out(state["unwanted"])
        except Exception as error:  # a torn file raises almost anything
            self.healer.note(f"{path} cannot be read: {error!r}")

    def _undo_checkpoints(self) -> None:
        """Also those that were saved before the damage: the run will save these steps again."""
        assert self.healer is not None
        diagnosis = self.healer.recovery.recovering_from
        bad_step = self.trainer.state.global_step if diagnosis is None else diagnosis.bad_step
        self._report_aside(self._checkpoints.put_aside(bad_step))

    def _report_aside(self, paths: Sequence[Path]) -> None:
        assert self.healer is not None
        for path in paths:
            step = self.trainer.state.global_step
            self.healer.journal.event("checkpoint_abandoned", step, path=str(path))


class SelfHealingTrainer(SelfHealingCallback):
    """Trains a ``transformers.Trainer``, or any trainer of TRL, and heals what goes wrong.

    It takes the arguments of :class:`SelfHealingCallback`, which it adds to the trainer for the
    time of :meth:`train`, and also heals what steps and the loader raise, leaves out batches that
    did harm, and stops cleanly after SIGTERM.

    Example:
        >>> trainer = SFTTrainer(model, args=args, train_dataset=dataset)
        >>> result = SelfHealingTrainer(trainer, HealingConfig()).train()
        >>> result.metrics["healing/recovery_attempts"]
    """

    _retries = True
    _planned_epochs: int | None = None

    def dry_run(self, num_steps: int = 2) -> DryRunReport:
        """Try some steps on the trainer's own data and undo them.

        Returns:
            Losses, seconds and problems; ``is_ok`` if training can begin.
        """
        check_ready(self.trainer)
        return dry_run(self.trainer, num_steps)

    def train(self, resume_from_checkpoint: str | bool | None = None, **kwargs: Any) -> Any:
        """Train as the trainer does, healing on the way.

        Args:
            resume_from_checkpoint: as the trainer takes it; what healing had learned by then is in
                the checkpoint too.
            kwargs: passed on.

        Returns:
            What the trainer's own ``train`` returns; its ``metrics`` also hold a summary of
            healing.

        Raises:
            HealingError: healing is at its end; its ``exit_code`` says why. The postmortem is
                written.
            RuntimeError: the trainer is training already.
            PermissionError: its ``output_dir`` cannot be written.
        """
        trainer, patches = self.trainer, Patches()
        check_ready(trainer)
        self.healer = self._steps = None
        resume = resume_from_checkpoint
        if resume:
            kwargs["resume_from_checkpoint"] = resume
        folder = get_last_checkpoint(trainer.args.output_dir) if resume is True else resume
        self.resumed_from = str(folder) if folder else None
        numbers = TrackedNumbers(lambda: {} if self.healer is None else self.healer.metrics())
        error: BaseException | None = None
        try:
            planned = getattr(trainer, "set_initial_training_values", None)
            if planned is not None:
                values = self._with_more_epochs(planned)
                patches.set(trainer, "set_initial_training_values", values)
            trainer.callback_handler.callbacks.insert(0, numbers)
            trainer.add_callback(self)
            output = trainer.train(**kwargs)
            if self._steps is not None and self._steps.stopped is not None:
                raise self._steps.stopped
        except BaseException as raised:
            error = raised
            raise
        finally:
            self.detach()
            for added in (self, numbers):
                trainer.remove_callback(added)
            patches.put_back()
            trainer.is_in_train = False
            if self.healer is not None:
                self.healer.leave(error)
        if self.healer is not None and hasattr(output, "metrics"):
            output.metrics.update(summary(self.healer))
        return output

    def _with_more_epochs(self, planned: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function for what the trainer plans, with epochs to spare, and as many steps."""

        def values(*args: Any, **kwargs: Any) -> Any:
            epochs, *rest = planned(*args, **kwargs)
            self._planned_epochs = epochs
            if self._steps_done() >= rest[-1]:
                return (epochs, *rest)  # all are done: one epoch more would be one step more
            return (min(epochs + MORE_EPOCHS, 2**62), *rest)

        return values

    def _steps_done(self) -> int:
        """Return how many steps the trainer had taken when it saved the checkpoint."""
        path = Path(self.resumed_from or "") / TRAINER_STATE_NAME
        if self.resumed_from is None or not path.is_file():
            return 0  # the trainer will raise what is wrong with it
        return int(TrainerState.load_from_json(str(path)).global_step)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        super().on_train_begin(args, state, control, **kwargs)
        if self._planned_epochs is not None:
            state.num_train_epochs = self._planned_epochs

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Go on after an epoch that gave no batch; the trainer would take it for the end."""
        if self._steps is None or self._batches is None or self._steps.stopped is not None:
            return
        if self._batches.has_lost_epoch and state.global_step < state.max_steps:
            control.should_training_stop = False

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Leave the end to :meth:`train`, which raises if a signal stopped the run."""
        self.detach()


def inner_optimizer(trainer: Any) -> Optimizer:
    """Return the torch optimizer within what accelerate made of it.

    Raises:
        TypeError: it is not one that can be guarded.
    """
    optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            "the trainer's optimizer: expected a torch Optimizer, whose steps can be skipped, got "
            f"{type(optimizer).__name__}; DeepSpeed steps by itself and cannot be healed"
        )
    return optimizer


def raise_lr_at_chance(factor: float, config: HealingConfig) -> Hook:
    """Return a hook that answers a plateau at chance with a higher learning rate."""

    def hook(diagnosis: Diagnosis, plan: Plan) -> Plan | None:
        if diagnosis.cause is Cause.PLATEAU and diagnosis.evidence.get("at_chance"):
            return (ScaleLr(factor, LR_FLOOR, config.lr_ramp_steps),)
        return None

    return hook


class TrackedNumbers(TrainerCallback):
    """Comes before the trainer's trackers, and adds what healing measured to their numbers.

    The trainer's own log was written by then and stays as it is.
    """

    def __init__(self, numbers: Callable[[], dict[str, float]]) -> None:
        self._numbers = numbers

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if logs is not None:
            logs.update(self._numbers())


COUNTED = {
    "healing/refusals": Skip,
    "healing/rollbacks": Rollback,
    "healing/lr_cuts": ScaleLr,
    "healing/skips": SkipBatches,
    "healing/batch_cuts": ShrinkBatch,
    "healing/waits": Backoff,
    "healing/halts": Halt,
}


def summary(healer: Healer) -> dict[str, float]:
    """Return the healer's metrics and how often it did what, for ``TrainOutput.metrics``."""
    actions = [action for _, _, plan in healer.history for action in plan]
    counts = {
        name: float(sum(isinstance(action, kind) for action in actions))
        for name, kind in COUNTED.items()
    }
    alerts = sum(not plan for _, _, plan in healer.history)
    return {
        **healer.metrics(),
        **counts,
        "healing/alerts": float(alerts),
        "healing/lr_scale": healer.lr_scale,
        "healing/micro_batches": float(healer.training.micro_batches),
    }


# What can be wrong before training begins: checked with nothing touched.

NEEDED = ("train", "args", "accelerator", "callback_handler", "training_step")
"""What is used of a trainer. Any object that has it will do, whatever its class."""


def checked_trainer(trainer: Any) -> Any:
    """Return the trainer if it is one.

    Raises:
        TypeError: it is a class, or lacks what healing needs.
    """
    if isinstance(trainer, type):
        name = trainer.__name__
        raise TypeError(f"trainer: expected an instance, got the class {name}; pass {name}(...)")
    missing = [name for name in NEEDED if not hasattr(trainer, name)]
    if missing:
        raise TypeError(
            "trainer: expected a transformers.Trainer or a trainer of TRL, got "
            f"{type(trainer).__name__}, which lacks {', '.join(missing)}"
        )
    if getattr(trainer, "is_deepspeed_enabled", False):
        raise TypeError("the trainer uses DeepSpeed, whose engine steps by itself: not supported")
    return trainer


def check_ready(trainer: Any) -> None:
    """Raise unless training can begin now.

    Raises:
        RuntimeError: the trainer is training already, or another wrapper heals it.
        PermissionError: its ``output_dir`` cannot be written.
    """
    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, SelfHealingTrainer):  # which adds itself while it trains
            raise RuntimeError(
                f"{type(trainer).__name__} is training already; wait until its train() has returned"
            )
        if isinstance(callback, SelfHealingCallback):
            raise RuntimeError(
                f"the trainer already has a {type(callback).__name__}; remove it with "
                "trainer.remove_callback, or call trainer.train() itself"
            )
    if getattr(trainer, "is_in_train", False):  # transformers leaves it set when train() raises
        warnings.warn(
            f"{type(trainer).__name__}.is_in_train is set: its train() has raised before, or is "
            "still running. If it is running, wait until it has returned",
            RuntimeWarning,
            stacklevel=3,
        )
    folder, problem = trainer.args.output_dir, ""
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as error:
        problem = f"made: {error.strerror}"
    else:
        if not os.access(folder, os.W_OK | os.X_OK):
            problem = "written"
    if problem:
        raise PermissionError(
            f"output_dir {folder} cannot be {problem}; checkpoints and the postmortem go there. "
            "Nothing was trained yet"
        )


# Tries a few steps of a trainer on its own data, and leaves no trace of them.

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
    keep are as before; the trainer's callbacks are not called, and no file is written.
    """
    if num_steps < 1:
        raise ValueError(f"num_steps: expected at least 1, got {num_steps}")
    model, training_step = trainer.model, trainer.training_step
    num_bytes = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    parts: dict[int, list[Tensor]] = {}  # losses, by step
    problems: list[str] = []
    trained = 0

    def watched(*args: Any, **kwargs: Any) -> Any:
        nonlocal trained
        loss = training_step(*args, **kwargs)
        parts.setdefault(trainer.state.global_step, []).append(loss)
        trained = sum(p.grad is not None for p in trainer.model.parameters())
        return loss

    began = time.perf_counter()
    try:
        with _unchanged(trainer), Patches() as patches:
            _make_quiet(trainer, num_steps)
            patches.set(trainer, "training_step", watched)
            trainer.train()
    except Exception as error:
        problems.append(f"{type(error).__name__}: {error}")
    losses = [float(sum(of_step)) for of_step in parts.values()]
    return DryRunReport.of(losses, began, num_bytes, trained, problems)


@contextmanager
def _unchanged(trainer: Any) -> Iterator[None]:
    """Put a trainer back after the body: copies of what steps write, references to the rest."""
    model, accelerator = trainer.model, trainer.accelerator
    attributes = dict(vars(trainer))
    names = [name for name in ("state", "_metrics", "_logs") if name in attributes]
    small = {name: copy.deepcopy(attributes[name]) for name in names}
    lists = {name: list(v) for name, v in vars(accelerator).items() if isinstance(v, list)}
    recomputes = getattr(model, "is_gradient_checkpointing", False)
    optimizers = () if trainer.optimizer is None else inner_optimizer(trainer)
    with unchanged(training_state(model, optimizers, trainer.lr_scheduler), with_frozen=True):
        try:
            yield
        finally:
            if not recomputes and getattr(model, "is_gradient_checkpointing", False):
                model.gradient_checkpointing_disable()
            vars(trainer).clear()
            vars(trainer).update({**attributes, **small})
            for name, values in lists.items():
                getattr(accelerator, name)[:] = values


def _make_quiet(trainer: Any, num_steps: int) -> None:
    """Give the trainer settings and callbacks for a trial; :func:`_unchanged` keeps its own."""
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
