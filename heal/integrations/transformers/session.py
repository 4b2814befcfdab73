"""One training run of a trainer under healing: built when it begins, taken apart when it ends."""

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from heal.actions import HealingError
from heal.causes import Family
from heal.checkpoint.files import put_aside
from heal.config import HealingConfig
from heal.detectors.preference import ACCURACY, MARGIN
from heal.detectors.progress import Plateau
from heal.healer import Healer
from heal.integrations.patches import Patches, hold_models_of
from heal.integrations.transformers.attempts import (
    ScaledStep,
    TrainerAttempts,
    TrainerGuard,
    clip_limit,
)
from heal.integrations.transformers.batches import (
    ReplayedEpochs,
    TrainerBatches,
    TrainerPosition,
    batches_passed_over,
    inner_optimizer,
    is_preemption,
    known_to_schedulers,
    raise_lr_at_chance,
)
from heal.journal import LEFT_OUT
from heal.monitor import LogWatch
from heal.ranks import HostFacts
from heal.snapshots import Snapshot
from heal.training_state import RngState

# What becomes of a trainer's checkpoints whose steps were taken back: no resume begins with them.
#
# At least one sound checkpoint stays, if there was one, whatever kills the run next.


ABANDONED = "abandoned-"
"""Before the name: what begins with ``checkpoint-`` the trainer counts, keeps and removes."""


def checkpoint_folder(trainer: Any, step: int) -> Path:
    """Return where the trainer saves its checkpoint of a step."""
    return Path(trainer.args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{step}"


class UndoneCheckpoints:
    """Knows what a run has saved, and puts aside what it took back.

    Args:
        trainer: about to take its first step.
        note: told of what cannot be renamed or removed; it is left.
    """

    def __init__(self, trainer: Any, note: Callable[[str], None]) -> None:
        self._trainer = trainer
        self._note = note
        # Of this run only, with what it was resumed from: a folder may hold what others left there.
        self._steps: set[int] = {trainer.state.global_step}
        self._bad_step = 0

    def after_save(self) -> list[Path]:
        """Count a checkpoint of the trainer's present step; what it replaces is put aside.

        As many of those put aside stay, for the post-mortem, as the trainer keeps good ones.

        Returns:
            What was put aside, by its present name.
        """
        self._steps.add(self._trainer.state.global_step)
        renamed = self.put_aside(self._bad_step)
        limit = self._trainer.args.save_total_limit
        if limit and limit > 0 and self._trainer.args.should_save:
            self._remove_abandoned(limit)
        return renamed

    def put_aside(self, bad_step: int) -> list[Path]:
        """Rename checkpoints of steps after the trainer's present one.

        If none of the steps before is left, the newest of a sound state stays until the trainer has
        saved again: a kill before that would leave nothing to resume from. The best one may be
        among those renamed: then there is none, until a better one is found.

        Args:
            bad_step: the first step that may have done damage.

        Returns:
            What they are called now.
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
                self._note(f"{there[step]} was taken back, and cannot be renamed: {error}")
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


class Session:
    """Binds a healer to a trainer whose model, optimizer and scheduler are ready.

    Args:
        trainer: about to take its first step.
        config: how patient to be.
        run_dir: where the journal goes.
        retries: whether what a step raises is healed too; else it is only watched and refused.
        sleep: waits between retries of what the network refused.
        patches: where changes to the trainer are noted, to be undone by the owner.
        plateau_lr_factor: what the LR is multiplied by at a plateau at chance; None: alert only.
        trackers: told of every decision; None for none.

    Attributes:
        healer: does the healing.
        position: where the trainer is.
        stopped: why the run was told to stop, if it was; it was saved first.
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
        self.healer = self._make_healer(trainer, config, run_dir, trackers, sleep)
        self.log_watch = LogWatch(config)
        self.position = TrainerPosition(trainer, replays=config.after_rollback == "replay_data")
        self._failure: Exception | None = None
        self._fresh_snapshot: Snapshot | None = None
        self._posted = False
        self._is_in_step = False
        self._has_hooks = False  # whether the trainer tells of the beginning of its steps
        self._retries = retries
        self.stopped: HealingError | None = None
        self._checkpoints = UndoneCheckpoints(trainer, self.healer.note)
        self._patches = patches
        accelerator = trainer.accelerator
        self._guard = TrainerGuard(
            self.healer.guarded,
            config.zclip_enabled,
            accelerator.clip_grad_norm_,
            self._facts,
            ScaledStep(trainer.optimizer, accelerator.unscale_gradients)
            if getattr(trainer.optimizer, "scaler", None) is not None
            else None,
        )
        self._keep_position()
        hold_models_of(trainer.callback_handler.callbacks, self.healer)
        if plateau_lr_factor is not None:
            self.healer.on_instability(raise_lr_at_chance(plateau_lr_factor, config))
        patches.set(accelerator, "clip_grad_norm_", self._guard.clip_grad_norm_)
        patches.set(trainer.optimizer, "step", known_to_schedulers(self._step))
        self._attempts: TrainerAttempts | None = None
        self._epochs: ReplayedEpochs | None = None
        self.batches: TrainerBatches | None = None
        if retries:
            self.healer.exits.catch_signals()
            self._take_over_batches()
        else:
            self.healer.exits.enter()
            self._listen_to_losses(trainer.training_step)

    def begin_step(self) -> None:
        """Before the first micro-batch of a step."""
        self._is_in_step = self._has_hooks = True
        self.finish_snapshot()
        self.healer.contained(self.healer.before_step)

    def finish_snapshot(self) -> None:
        """Bring a snapshot of this very step up to date.

        It was taken when the step before had ended, but not yet its log, evaluation and save. These
        are not repeated after a rollback; what they changed is noted here.
        """
        snapshot = self._fresh_snapshot
        if snapshot is not None:
            self._fresh_snapshot = None
            snapshot.values["rng"] = RngState.now()
            snapshot.values["trainer"] = self.position.save()
            snapshot.values["log"] = self.log_watch.state()

    def end_step(self, control: Any) -> None:
        """After the optimizer, the scheduler and the trainer's count have stepped.

        Raises:
            HealingError: the run must stop; the postmortem is written.
        """
        if not self._is_in_step:
            return  # a trainer with a loop of its own: each step of its optimizer was heard alone
        self._is_in_step = False
        if self._attempts is not None:
            self._attempts.end_step()
        was_set_back = self.position.was_set_back  # within the step, which then was taken anew
        self.position.correct_epoch()
        failure, self._failure = self._failure, None
        if failure is not None:
            self._heal_optimizer(failure)
        else:
            self._hear(control)
        follows = self._epochs is not None and not was_set_back
        if self.position.settle(control, follows) and follows and self._epochs is not None:
            self._epochs.leave(control)

    def _hear(self, control: Any) -> None:
        """Count the step and hear of those before; what they tell is treated."""
        healer, guard = self.healer, self._guard
        try:
            with healer.halting():
                healer.contained(
                    lambda: healer.after_step(guard.facts, self._posted, guard.has_loss)
                )
        except HealingError as halt:
            if not self._retries or control is None or not is_preemption(halt):
                raise
            self._stop(halt, control)
        fresh = healer.training.ring.of_step(healer.training.step)
        if fresh is not None:
            self._fresh_snapshot = fresh

    def observe_log(self, logs: Mapping[str, Any]) -> None:
        """Hear of a line of the trainer's log: what it tells of preferences and rewards."""
        healer = self.healer
        detectors = healer.monitor.watch.detectors
        if ACCURACY in logs or MARGIN in logs:
            # The loss alone would name a plateau at chance; here there is better evidence.
            plateau = detectors.get("plateau")
            if isinstance(plateau, Plateau):
                plateau.chance = 0.0
        healer.contained(lambda: healer.treat(self.log_watch.observe(healer.training.step, logs)))

    def close(self, error: BaseException | None = None) -> None:
        """Write the postmortem."""
        self.healer.close(error)
        self.healer.exits.leave()

    def _make_healer(
        self,
        trainer: Any,
        config: HealingConfig,
        run_dir: str | Path | None,
        trackers: Any,
        sleep: Callable[[float], None],
    ) -> Healer:
        limit = clip_limit(trainer.args.max_grad_norm, config.max_grad_norm)
        optimizer = inner_optimizer(trainer)
        healer = Healer(
            trainer.model,
            optimizer,
            trainer.lr_scheduler,
            replace(config, max_grad_norm=limit),
            run_dir=run_dir,
            trackers=trackers,
            sleep=sleep,
        )
        healer.training.begin_at(trainer.state.global_step)
        healer.schedules.follow_caller()  # a rollback returns the trainer's count as well
        return healer

    def _facts(self) -> HostFacts:
        try:
            return self.healer.monitor.facts()
        except Exception as error:
            self.healer.note(f"{LEFT_OUT}: {error!r}")
            return HostFacts()

    def _keep_position(self) -> None:
        """Have snapshots hold the trainer's own counters beside the healer's."""
        training = self.healer.training
        training.hold("trainer", self.position.save, self._put_position_back)
        training.hold("log", self.log_watch.state, self.log_watch.load_state)

    def _put_position_back(self, saved: Any) -> None:
        if self._has_hooks:
            self.position.put_back(saved)
            self.healer.contained(self._undo_checkpoints)

    def note_save(self) -> None:
        """The trainer has saved a checkpoint of its present step."""
        self.healer.contained(lambda: self._tell_aside(self._checkpoints.after_save()))

    def _undo_checkpoints(self) -> None:
        """Also those that were saved before the damage: the run will save these steps anew."""
        treated = self.healer.recovery.treated
        bad_step = self.trainer.state.global_step if treated is None else treated.bad_step
        self._tell_aside(self._checkpoints.put_aside(bad_step))

    def _tell_aside(self, paths: Sequence[Path]) -> None:
        step = self.trainer.state.global_step
        for path in paths:
            self.healer.journal.event("checkpoint_abandoned", step, path=str(path))

    def _take_over_batches(self) -> None:
        trainer = self.trainer
        if self.position.replays and hasattr(trainer, "_run_epoch"):
            self._epochs = ReplayedEpochs(trainer, self._patches)
        self.batches = batches = TrainerBatches(
            trainer,
            self.healer.stream,
            self._waits,
            self.finish_snapshot,
            batches_passed_over(trainer),
            is_followed=self._epochs is not None,
        )
        self._attempts = TrainerAttempts(
            trainer, self.healer, self._guard, batches, trainer.training_step
        )
        self._patches.set(trainer, "get_batch_samples", batches.get_batch_samples)
        self._patches.set(trainer, "training_step", self._attempts.training_step)

    def _listen_to_losses(self, training_step: Callable[..., Any]) -> None:
        def listening(*args: Any, **kwargs: Any) -> Any:
            loss = training_step(*args, **kwargs)
            self._guard.add_loss(loss)
            return loss

        self._patches.set(self.trainer, "training_step", listening)

    def _step(self, closure: Any = None) -> None:
        """Take the place of ``optimizer.step``. What it raises is treated once the step is over.

        By then the trainer has stepped its scheduler and its counters, so that all can be returned
        together.
        """
        optimizer = self.trainer.optimizer
        optimizer._opt_called = True  # schedulers ask whether the optimizer has stepped
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
        """Serve a trainer that has a loop of its own, as that of PPO: no hook tells of its steps.

        The trainer's counters are left alone then, and what it raises goes on.
        """
        self.healer.contained(self.healer.before_step)
        self._posted = self._guard.step(self.healer.training.step)
        self._hear(None)
        self._fresh_snapshot = None

    def _stop(self, halt: HealingError, control: Any) -> None:
        """Told to stop from outside: have the trainer save and return, then say so."""
        self.stopped = halt
        control.should_save = control.should_training_stop = True

    def _heal_optimizer(self, error: Exception) -> None:
        assert self._attempts is not None
        self._guard.forget()
        self._attempts.treat(error, "step")
        if not self.position.was_set_back:
            self.healer.training.advance()

    def _waits(self, error: Exception) -> bool:
        """Wait if that may cure an error of the loader; True if it was waited."""
        assert self._attempts is not None
        diagnosis, error = self._attempts.judge_read(error)
        if diagnosis.family is not Family.WAIT:
            return False
        self._attempts.heal(diagnosis, error)
        return True
