"""One training run of a trainer under healing: built when it begins, taken apart when it ends."""

import math
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from heal.actions import HealingError, Plan, ScaleLr
from heal.causes import Cause
from heal.checkpoint.files import put_aside
from heal.config import HealingConfig
from heal.data.split import own_copy
from heal.detect import LogWatch
from heal.detectors.preference import ACCURACY, MARGIN
from heal.detectors.progress import Plateau
from heal.diagnose import Diagnosis
from heal.exit_codes import ExitCode
from heal.healer import Healer
from heal.integrations.patches import Patches, hold_models_of
from heal.integrations.transformers.attempts import TrainerAttempts, TrainerGuard
from heal.integrations.transformers.batches import ReplayedEpochs, TrainerBatches
from heal.policy import LR_FLOOR
from heal.recovery import Hook
from heal.snapshots import Snapshot
from heal.training_state import RngState

FILE = "healing.pt"  # what healing has learned, beside the files of a trainer's checkpoint


class Session:
    """Binds a healer to a trainer whose model, optimizer and scheduler are ready.

    With ``retries`` what a step raises is healed too; else steps are only watched and skipped.
    The owner of ``patches`` undoes the changes to the trainer. The other arguments are those of
    :class:`heal.SelfHealingTrainer`.

    Attributes:
        log_watch: watches the lines of the trainer's log.
        position: where the trainer is.
        stopped: why the run has to stop, if a signal arrived; it was saved first.
        batches: the trainer's, if they are drawn through the healer.
    """

    def __init__(
        self,
        trainer: Any,
        config: HealingConfig,
        run_dir: str | Path | None,
        retries: bool,
        sleep: Callable[[float], None],
        patches: Patches,
        plateau_lr_factor: float | None = None,
        trackers: Any = None,
    ) -> None:
        self.trainer = trainer
        own = trainer.args.max_grad_norm
        if own and 0 < own < math.inf:
            config = replace(config, max_grad_norm=float(own))
        self.healer = healer = Healer(
            trainer.model,
            inner_optimizer(trainer),
            trainer.lr_scheduler,
            config,
            run_dir=run_dir,
            trackers=trackers,
            sleep=sleep,
        )
        healer.training.begin_at(trainer.state.global_step)
        healer.schedules.follow_caller()  # a rollback returns the trainer's count as well
        hold_models_of(trainer.callback_handler.callbacks, healer)
        if plateau_lr_factor is not None:
            healer.on_instability(raise_lr_at_chance(plateau_lr_factor, config))
        self.log_watch = LogWatch(config)
        self.position = TrainerPosition(trainer, replays=config.after_rollback == "replay_data")
        healer.training.hold("trainer", self.position.save, self._put_position_back)
        healer.training.hold("log", self.log_watch.state, self.log_watch.load_state)
        self.stopped: HealingError | None = None
        self._checkpoints = UndoneCheckpoints(trainer, healer.note)
        self._failure: Exception | None = None
        self._fresh_snapshot: Snapshot | None = None
        self._posted = False
        self._is_in_step = False
        self._has_hooks = False  # whether the trainer calls back at the beginning of its steps
        self._guard = TrainerGuard(trainer, healer)
        patches.set(trainer.accelerator, "clip_grad_norm_", self._guard.clip_grad_norm_)
        step: Any = partial(self._step)
        step._wrapped_by_lr_sched = True  # else schedulers warn
        patches.set(trainer.optimizer, "step", step)
        self._attempts: TrainerAttempts | None = None
        self._epochs: ReplayedEpochs | None = None
        self.batches: TrainerBatches | None = None
        healer.enter(catches_signals=retries)
        if retries:
            self._take_over_batches(patches)
        else:
            patches.set(trainer, "training_step", self._watched(trainer.training_step))

    def _take_over_batches(self, patches: Patches) -> None:
        trainer = self.trainer
        if self.position.replays and hasattr(trainer, "_run_epoch"):
            self._epochs = ReplayedEpochs(trainer, patches)
        self.batches = TrainerBatches(
            trainer, self.healer, self.finish_snapshot, is_followed=self._epochs is not None
        )
        self._attempts = TrainerAttempts(trainer, self.healer, self._guard, self.batches)
        patches.set(trainer, "get_batch_samples", self.batches.get_batch_samples)
        patches.set(trainer, "training_step", self._attempts.training_step)

    def _watched(self, training_step: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            loss = training_step(*args, **kwargs)
            self._guard.add_loss(loss)
            return loss

        return watched

    # A step, from its first micro-batch to the trainer's callbacks.

    def begin_step(self) -> None:
        """Do what comes before the first micro-batch of a step."""
        self._is_in_step = self._has_hooks = True
        if self.batches is None:  # else it was done before these were drawn
            self.finish_snapshot()
        self.healer.contained(self.healer.before_step)

    def finish_snapshot(self) -> None:
        """Bring a snapshot of this very step up to date.

        It was taken when the step before had ended, but not yet its log, evaluation and save. These
        are not repeated after a rollback; what they changed is saved here.
        """
        snapshot = self._fresh_snapshot
        if snapshot is not None:
            self._fresh_snapshot = None
            snapshot.values["rng"] = RngState.now()
            snapshot.values["trainer"] = self.position.save()
            snapshot.values["log"] = self.log_watch.state()

    def _step(self, closure: Any = None) -> None:
        """Replace ``optimizer.step``. What it raises is healed once the step is over.

        By then the trainer has stepped its scheduler and its counters, so that all can be returned
        together.
        """
        optimizer = self.trainer.optimizer
        optimizer._opt_called = True  # schedulers check whether the optimizer has stepped
        if not optimizer.gradient_state.sync_gradients:
            return
        if not self._is_in_step:
            self._step_alone()
            return
        try:
            self._posted = self._guard.step(self.healer.training.step)
        except Exception as error:
            if self._attempts is None:
                raise
            self._failure = error

    def _step_alone(self) -> None:
        """Serve a trainer with a loop of its own, as that of PPO: no hook is called for its steps.

        The trainer's counters are left alone then, and what it raises goes on.
        """
        self.healer.contained(self.healer.before_step)
        self._posted = self._guard.step(self.healer.training.step)
        self._after_step(None)
        self._fresh_snapshot = None

    def end_step(self, control: Any) -> None:
        """Do what comes after the optimizer, the scheduler and the trainer's count have stepped.

        Raises:
            HealingError: the run must stop; the postmortem is written.
        """
        if not self._is_in_step:
            return  # a trainer with a loop of its own
        self._is_in_step = False
        if self._attempts is not None:
            self._attempts.end_step()
        was_set_back = self.position.was_set_back  # within the step, which then was repeated
        self.position.correct_epoch()
        failure, self._failure = self._failure, None
        if failure is None:
            self._after_step(control)
        else:
            self._heal_optimizer(failure)
        follows = self._epochs is not None and not was_set_back
        if self.position.settle(control, follows) and follows and self._epochs is not None:
            self._epochs.leave(control)

    def _after_step(self, control: Any) -> None:
        """Count the step, and recover from what the records of earlier ones show."""
        healer, guard = self.healer, self._guard
        try:
            with healer.halting():
                healer.contained(
                    lambda: healer.after_step(guard.facts, self._posted, guard.has_loss)
                )
        except HealingError as halt:
            is_stop = halt.exit_code == int(ExitCode.PREEMPTED)
            if self._attempts is None or control is None or not is_stop:
                raise
            self.stopped = halt  # raised once the trainer has saved and returned
            control.should_save = control.should_training_stop = True
        fresh = healer.training.ring.of_step(healer.training.step)
        if fresh is not None:
            self._fresh_snapshot = fresh

    def _heal_optimizer(self, error: Exception) -> None:
        self._guard.forget()
        self.healer.heal(*self.healer.retries.judge(error, "step"))
        if not self.position.was_set_back:
            self.healer.training.advance()

    def _put_position_back(self, saved: Any) -> None:
        if self._has_hooks:
            self.position.put_back(saved)
            self.healer.contained(self._undo_checkpoints)

    # Between steps.

    def observe_log(self, logs: Mapping[str, Any]) -> None:
        """Take in a line of the trainer's log: what it shows of preferences and rewards."""
        healer = self.healer
        detectors = healer.monitor.watch.detectors
        if ACCURACY in logs or MARGIN in logs:
            # The loss alone would suggest a plateau at chance; here there is better evidence.
            plateau = detectors.get("plateau")
            if isinstance(plateau, Plateau):
                plateau.chance = 0.0
        healer.contained(lambda: healer.treat(self.log_watch.observe(healer.training.step, logs)))

    def after_save(self) -> None:
        """Add what healing has learned to the checkpoint that the trainer has just saved."""
        folder = checkpoint_folder(self.trainer, self.trainer.state.global_step)
        if self.trainer.args.should_save and folder.is_dir():
            self.healer.contained(lambda: self.save(folder))
        self.healer.contained(lambda: self._report_aside(self._checkpoints.after_save()))

    def save(self, folder: Path) -> None:
        """Write what was tried, what is remembered and what was changed into a checkpoint."""
        unwanted = [] if self.batches is None else self.batches.unwanted()
        log, memory = self.log_watch.state(), self.healer.memory.state_dict()
        beside = folder / f"{FILE}.partial"
        torch.save({**memory, "log": log, "unwanted": unwanted}, beside)
        os.replace(beside, folder / FILE)

    def resume(self, folder: str | Path) -> None:
        """Return to what was saved; nothing if the checkpoint was made without healing.

        What cannot be read is noted: training goes on, and learns it again.
        """
        path = Path(folder) / FILE
        if not path.is_file():
            return
        try:
            state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
            self.healer.memory.load_state_dict(state)
            self.log_watch.load_state(state["log"])
            if self.batches is not None:
                self.batches.leave_out(state["unwanted"])
        except Exception as error:  # a torn file raises almost anything
            self.healer.note(f"{path} cannot be read: {error!r}")

    def _undo_checkpoints(self) -> None:
        """Also those that were saved before the damage: the run will save these steps again."""
        treated = self.healer.recovery.treated
        bad_step = self.trainer.state.global_step if treated is None else treated.bad_step
        self._report_aside(self._checkpoints.put_aside(bad_step))

    def _report_aside(self, paths: Sequence[Path]) -> None:
        step = self.trainer.state.global_step
        for path in paths:
            self.healer.journal.event("checkpoint_abandoned", step, path=str(path))

    def close(self, error: BaseException | None = None) -> None:
        """Write the postmortem."""
        self.healer.leave(error)


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


# Where a trainer is: the counters, sums and buffers that it keeps beside weights and optimizer.


COUNTS = ("global_step", "epoch", "num_input_tokens_seen", "total_flos")
BEST = ("best_metric", "best_model_checkpoint", "best_global_step")
"""What the trainer's state holds of its best evaluation, which may be of a step that is undone."""

SUMS = ("_total_loss_scalar", "_globalstep_last_logged", "current_flos")
"""What the trainer adds up between two lines of its log."""

ONLINE = (
    *("_step", "_buffered_inputs", "_metrics"),
    *("_current_train_step_time", "_total_train_tokens"),
)
"""What trainers of TRL keep from step to step: generations to train on, numbers to log."""


class TrainerPosition:
    """Saves the place of a trainer as plain values, and returns it to such a place.

    Attributes:
        replays: whether data are rewound as well, so that epochs are counted back.
        was_set_back: whether the trainer was returned since the last :meth:`settle`.
    """

    def __init__(self, trainer: Any, replays: bool) -> None:
        self._trainer = trainer
        self.replays = replays
        self._epochs_ahead = 0.0  # the loop's own count of epochs cannot be set back
        self._ahead = 0.0  # by the rollback of this step
        self.was_set_back = False

    def save(self) -> dict[str, Any]:
        """Return the place; a sum on the device is copied there, buffered tensors are shared."""
        trainer, state = self._trainer, self._trainer.state
        running = getattr(trainer, "_tr_loss", None)
        return {
            "state": {name: getattr(state, name) for name in COUNTS + BEST if hasattr(state, name)},
            "logged": len(state.log_history),
            "running_loss": running.detach().clone() if isinstance(running, Tensor) else None,
            "sums": {name: getattr(trainer, name) for name in SUMS if hasattr(trainer, name)},
            "online": {
                name: own_copy(getattr(trainer, name)) for name in ONLINE if hasattr(trainer, name)
            },
        }

    @torch.no_grad()
    def put_back(self, saved: dict[str, Any]) -> None:
        """Return to a place. Lines of the log about steps that are undone are taken out."""
        trainer, state = self._trainer, self._trainer.state
        if self.replays and state.epoch is not None:
            self._ahead += state.epoch - (saved["state"]["epoch"] or 0.0)
        for name, value in saved["state"].items():
            setattr(state, name, value)
        del state.log_history[saved["logged"] :]
        if saved["running_loss"] is not None:
            trainer._tr_loss.copy_(saved["running_loss"])
        for name, value in {**saved["sums"], **own_copy(saved["online"])}.items():
            setattr(trainer, name, value)
        self.was_set_back = True

    def correct_epoch(self) -> None:
        """Count epochs by the data seen: the trainer's loop counts what was undone as well."""
        state = self._trainer.state
        self._epochs_ahead, self._ahead = self._epochs_ahead + self._ahead, 0.0
        if self._epochs_ahead and state.epoch is not None:
            state.epoch -= self._epochs_ahead

    def settle(self, control: Any, is_loop_set_back: bool = False) -> bool:
        """Return whether the step just taken was undone; if so it is neither logged nor saved.

        A stop that the undone step had reached is undone too. ``is_loop_set_back``: the trainer's
        loop follows, so that it counts epochs right.
        """
        if not self.was_set_back:
            return False
        self.was_set_back = False
        if is_loop_set_back:
            self._ahead = 0.0
        control.should_log = control.should_save = control.should_evaluate = False
        if self._trainer.state.global_step < self._trainer.state.max_steps:
            control.should_training_stop = False
        return True


# What becomes of a trainer's checkpoints whose steps were undone: no resume begins with them.
#
# At least one sound checkpoint stays, if there was one, whatever kills the run next.


ABANDONED = "abandoned-"
"""Before the name: what begins with ``checkpoint-`` the trainer counts, keeps and removes."""


def checkpoint_folder(trainer: Any, step: int) -> Path:
    """Return where the trainer saves its checkpoint of a step."""
    return Path(trainer.args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{step}"


class UndoneCheckpoints:
    """Keeps a list of what a run has saved, and puts aside what it undid.

    What cannot be renamed or removed is noted and left.
    """

    def __init__(self, trainer: Any, note: Callable[[str], None]) -> None:
        self._trainer = trainer
        self._note = note
        # Of this run only, with what it was resumed from: a folder may hold those of other runs.
        self._steps: set[int] = {trainer.state.global_step}
        self._bad_step = 0

    def after_save(self) -> list[Path]:
        """Count a checkpoint of the trainer's present step, and put aside what it replaces.

        As many of those put aside stay, for the post-mortem, as the trainer keeps good ones.
        Returns the new names.
        """
        self._steps.add(self._trainer.state.global_step)
        renamed = self.put_aside(self._bad_step)
        limit = self._trainer.args.save_total_limit
        if limit and limit > 0 and self._trainer.args.should_save:
            self._remove_abandoned(limit)
        return renamed

    def put_aside(self, bad_step: int) -> list[Path]:
        """Rename checkpoints of steps after the trainer's present one; return their new names.

        If none of the steps before is left, the newest from before ``bad_step``, the first that may
        have done damage, stays until the trainer has saved again: a kill before that would leave
        nothing to resume from. If the best one is renamed, there is none until the next best.
        """
        self._bad_step = bad_step
        state, renamed = self._trainer.state, []
        there = {s: p for s in self._steps if (p := checkpoint_folder(self._trainer, s)).is_dir()}
        undone = sorted(step for step in there if step > state.global_step)
        if len(undone) == len(there):
            # A checkpoint of a step is what the step began with.
            kept = max((step for step in undone if step <= bad_step), default=None)
            undone = [step for step in undone if step != kept]
        for step in undone if self._trainer.args.should_save else ():
            try:
                renamed.append(put_aside(there[step], ABANDONED + there[step].name))
            except OSError as error:
                self._note(f"{there[step]} was undone, and cannot be renamed: {error}")
        best = state.best_model_checkpoint
        if best is not None and not os.path.isdir(best):
            state.best_metric = state.best_model_checkpoint = state.best_global_step = None
        return renamed

    def _remove_abandoned(self, keep: int) -> None:
        folder = Path(self._trainer.args.output_dir)
        found = [p for p in folder.glob(f"{ABANDONED}{PREFIX_CHECKPOINT_DIR}-*") if p.is_dir()]
        found.sort(key=lambda path: (path.stat().st_mtime, path.name))  # when it was saved
        for path in found[: max(0, len(found) - keep)]:
            try:
                shutil.rmtree(path)
            except OSError as error:
                self._note(f"cannot remove {path}: {error}")
