"""The training run as actions change it: the Run protocol over model, optimizers and data."""

import gc
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from heal.actions import HealingError
from heal.buffers import Key
from heal.causes import Cause
from heal.config import LEAST_SNAPSHOTS, HealingConfig
from heal.data.stream import BatchStream
from heal.exit_codes import ExitCode
from heal.guarded_step import ClipLimits, GuardedStep
from heal.lr_schedules import Schedules
from heal.micro_batch import MicroBatcher, checkpoint_activations
from heal.snapshot_files import temporary_folders
from heal.snapshots import Snapshot, SnapshotCorrupt, SnapshotRing
from heal.state_checks import Constants, find_corruption
from heal.training_state import RestoreFailed, RngState, StateMismatch, TrainingState

if TYPE_CHECKING:
    from heal.durable import Durable
    from heal.lab.weight_anchor import WeightAnchor

TRIES = 2  # to write a snapshot before an older one is used


class TorchRun:
    """Implements :class:`heal.actions.Run`, and keeps what actions changed.

    A rollback writes a snapshot over ``state``, and brings stream, schedules, mailbox and held
    states along. Where no snapshot is old enough it uses a checkpoint of ``durable``.

    Everything below the monitor finds its parts here.

    Attributes:
        step: the number of the step that comes next.
        calls: how many steps were taken in all, those that a rollback undid included.
        is_between_steps: whether a snapshot or a rollback waits for :meth:`between_steps`.
        micro: cuts batches into pieces.
        training_state: all that steps change; ``buffers`` are copies of those that they write.
        clip_limits: tightens clipping for some steps.
        anchor: holds weights near those of a snapshot; None until a plan asks for it.
        lr_limit: at which the learning rate is held; None if it is not.
    """

    def __init__(
        self,
        state: TrainingState,
        guarded: GuardedStep,
        config: HealingConfig,
        stream: BatchStream,
        micro: MicroBatcher,
        schedules: Schedules,
        durable: "Durable | None",
        note: Callable[[str], None],
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.step = self.calls = 0
        self.buffers = state.buffers
        self.schedules = schedules
        self.durable = durable
        self._held: dict[str, tuple[Callable[[], Any], Callable[[Any], None]]] = {}
        self._rollback_callbacks: list[Callable[[int], None]] = []
        folders = [] if durable is None else [durable.store.directory]
        self.ring = SnapshotRing(
            config.snapshot_interval,
            max(LEAST_SNAPSHOTS, math.ceil(config.snapshot_memory_factor)),
            config.snapshot_memory_factor,
            config.quarantine_steps,
            [*folders, *temporary_folders()],
        )
        self.training_state = state
        self.guarded = guarded
        self._ranks = guarded.ranks
        self.config = config
        self.stream = stream
        self.micro = micro
        self.note = note
        self._sleep = sleep
        self._lr_scale = 1.0
        self._ramp: tuple[float, int, int] | None = None  # start, steps done, steps in all
        self.lr_limit: float | None = None
        self._lr_limit_until = 0
        self.clip_limits = ClipLimits(guarded.optimizers, config.lr_ramp_steps, note)
        self.close_watch_until = 0
        self.anchor: WeightAnchor | None = None
        self._constants = Constants(state, note)
        state.has_changed_shape()  # what comes later is compared with the present one
        self.is_between_steps = False
        self._saved_late: dict[str, Callable[[], Any]] = {}  # those held until the next step
        self._unfinished: Snapshot | None = None  # to be completed
        self._returned_to: Snapshot | None = None  # by the rollback of this step

    def begin_at(self, step: int) -> None:
        """Count from the step that a trainer is at."""
        self.step = step

    def hold(
        self,
        name: str,
        save: Callable[[], Any],
        load: Callable[[Any], None],
        *,
        until_next_step: bool = False,
    ) -> None:
        """Add what ``save`` returns to snapshots in memory; a rollback calls ``load`` with it.

        ``until_next_step``: save once more before the next step, because what comes after a step
        changes it too.
        """
        self._held[name] = save, load
        if until_next_step:
            self._saved_late[name] = save

    def on_rollback(self, callback: Callable[[int], None]) -> None:
        """Call ``callback(step)`` after each rollback, when all else has returned to ``step``."""
        self._rollback_callbacks.append(callback)

    @property
    def lr_scale(self) -> float:
        """The factor on every learning rate, beside all schedules."""
        return self._lr_scale

    @lr_scale.setter
    def lr_scale(self, value: float) -> None:
        self._lr_scale = value
        for optimizer in self.guarded.optimizers:
            optimizer.lr_scale = value

    @property
    def micro_batches(self) -> int:
        """How many pieces each batch is cut into."""
        return self.micro.pieces

    @micro_batches.setter
    def micro_batches(self, value: int) -> None:
        self.micro.cut_into(value)

    def snapshots(self) -> Sequence[int]:
        """Return the steps that every rank can return to, in memory or on disk, newest first."""
        kept = self.ring.good_steps()
        saved = [] if self.durable is None else self.durable.steps()
        return self._ranks.common(sorted({*kept, *saved}, reverse=True))

    def capture(self, is_proven: bool = False) -> bool:
        """Take a snapshot of the state before the step that comes next.

        Args:
            is_proven: whether it is good at once, as the first state of training is.
        """
        if self.step % self.config.snapshot_interval == 0:  # not for each of the first steps
            self._constants.look(self.step)
        self.has_changed_shape()
        values = {
            **self.training_state.values(),
            "rng": RngState.now(),
            "data": self.stream.position(),
            **{name: save() for name, (save, _) in self._held.items()},
        }
        tensors, without_nan = self.training_state.tensors(), self.training_state.without_nan()
        taken = self.ring.capture(self.step, tensors, values, is_proven, without_nan)
        snapshot = self.ring.of_step(self.step) if taken else None
        if snapshot is not None:
            snapshot.note_owners(self.training_state.parameters())
        if self.ring.degraded:
            self.note(self.ring.degraded)
        return taken

    def learning_rate(self) -> float:
        """Return the first parameter group's learning rate, healing left out; NaN if unknown."""
        for optimizer in self.guarded.optimizers:
            for group in optimizer.inner.param_groups:
                lr = group.get("lr")
                if isinstance(lr, float | int):
                    return float(lr)
        return math.nan

    def hold_lr(self, limit: float) -> None:
        """Hold the learning rate at ``limit`` until the incident is over and it is no higher.

        A rollback has just put it back: that it is no higher now says nothing about what raised it.
        A rate whose schedule is known is held on that.
        """
        self.lr_limit = limit
        self.schedules.hold(True)
        self._lr_limit_until = self.step + self.config.incident_steps

    def apply_lr_limit(self) -> None:
        """Scale the rate of the next step down to the limit of :meth:`hold_lr`, if there is one."""
        if self.lr_limit is None:
            return
        lr, scheduled = self.learning_rate(), self.schedules.rates()[1]
        is_on_schedule = not math.isnan(scheduled)  # at least since it was put back
        if is_on_schedule or lr == 0.0 or 0.0 < lr <= self.lr_limit * (1.0 + 1e-6):
            self.lr_scale = self._lr_scale
            if self.step >= self._lr_limit_until and not self.schedules.was_put_back:
                self.lr_limit = None
                self.schedules.hold(False)
            return
        for optimizer in self.guarded.optimizers:
            # A negative rate changes its sign: no schedule ascends.
            optimizer.lr_scale = self.lr_limit / lr * min(self._lr_scale, 1.0)

    def capture_after_step(self) -> bool:
        """Take a snapshot within ``step``, to be completed by :meth:`between_steps`.

        The user's code after ``step`` belongs to it: it may update a moving average, or evaluate
        and draw random numbers.
        """
        taken = self.capture()
        self._unfinished = self.ring.of_step(self.step) if taken else None
        self.is_between_steps |= taken
        return taken

    def between_steps(self, is_drawing: bool) -> None:
        """Complete a snapshot or a rollback of the last step, after the user's code.

        A rollback put generators and added states back within ``step``. The user's code has changed
        them since, as by an update of a moving average, for a step that did not happen.

        Args:
            is_drawing: whether a batch is about to be drawn. Else the forward of the next step has
                used the generators already.
        """
        self.is_between_steps = False
        snapshot, self._unfinished = self._unfinished, None
        if snapshot is not None:
            if self.training_state.added:
                snapshot.values["added"] = self.training_state.added.saved()
            snapshot.values.update((name, save()) for name, save in self._saved_late.items())
            if is_drawing:
                snapshot.values["rng"] = RngState.now()
        returned, self._returned_to = self._returned_to, None
        if returned is not None:
            self.training_state.added.load(returned.values.get("added", {}))
            if is_drawing and self.config.after_rollback == "replay_data":
                returned.values["rng"].put_back()

    def state(self) -> dict[str, Any]:
        """Return what healing changed about the run, as plain values; see :meth:`resume`."""
        return {
            "calls": self.calls,
            "lr_scale": self._lr_scale,
            "ramp": self._ramp,
            "lr_limit": self.lr_limit,
            "micro_batches": self.micro_batches,
            "micro": self.micro.state(),
            "anchor_steps": self.anchor_steps,
            **self.clip_limits.state(),
        }

    def resume(self, step: int, saved: dict[str, Any]) -> None:
        """Go on at a step of another process, with what :meth:`state` returned there."""
        self.step, self.calls = step, saved.get("calls", step)  # not in the first checkpoints
        self.lr_scale, self._ramp = saved["lr_scale"], saved["ramp"]
        self.lr_limit = saved.get("lr_limit")  # not before version 0.2
        self.micro_batches = saved["micro_batches"]
        if "micro" in saved:  # not in the first checkpoints
            self.micro.load_state(saved["micro"])
        self.clip_limits.resume(saved)
        if saved.get("anchor_steps"):  # weights and importance would double the checkpoint
            self.note(f"an anchor held for {saved['anchor_steps']} more steps; it was not saved")
        self.guarded.mailbox.clear()
        self.ring.drop_all()
        self._constants.forget()
        self.training_state.has_changed_shape()

    def has_changed_shape(self) -> bool:
        """Return whether parameters came, went, froze or thawed since last asked; follow them."""
        if not self.training_state.has_changed_shape():
            return False
        self.follow_shape()
        return True

    def follow_shape(self) -> None:
        """Drop snapshots of other parameters, and learn the names of new ones."""
        self.ring.drop_all()
        self.guarded.learn_names(self.training_state.model.named_parameters())

    def restore(self, step: int) -> None:
        """Return to the good snapshot of ``step``, or to an older one if that fails twice.

        All ranks return to the same one, or none does.

        Raises:
            HealingError: there is none, it does not fit, or none could be written. Nothing was
                changed, unless the message says that the memory holds a mix.
        """
        failure: RestoreFailed | None = None
        for snapshot in self._verified(self._ranks.least(step)):
            changed = self._constants.changed()
            problem = self._misfit(snapshot, changed)
            if not self._ranks.all_agree(not problem):
                raise HealingError(problem or "another rank could not return to its snapshot")
            for _ in range(TRIES):
                failure = self._write(snapshot)
                if failure is None:
                    self._returned(snapshot, changed)
                    return
                self.note(f"the rollback to step {snapshot.step} failed: {failure}")
        if failure is None:
            raise HealingError(f"no intact snapshot of step {step} or before", ExitCode.NO_SNAPSHOT)
        held = (
            "the memory holds a mix of two states: do not save it, resume from a checkpoint"
            if failure.is_mixed
            else "the state is what it was before"
        )
        raise HealingError(f"no rollback succeeded, the last failed with {failure}; {held}")

    def _write(self, snapshot: Snapshot) -> RestoreFailed | None:
        """Write a snapshot over the run; return why it could not be done."""
        settle = self.schedules.before_return()
        try:
            self.training_state.restore(
                snapshot.tensors,
                snapshot.values,
                lambda: settle(snapshot.step),
                self._ranks.all_agree,
            )
        except RestoreFailed as failure:
            return failure
        return None

    def _returned(self, snapshot: Snapshot, changed: Sequence[Key]) -> None:
        """Bring everything else to the state that was written."""
        self.guarded.mailbox.clear()
        if self.anchor is not None:
            self.anchor.release()
        self._unfinished, self._returned_to = None, snapshot
        self.is_between_steps = True
        if self.config.after_rollback == "replay_data":
            snapshot.values["rng"].put_back()
            self.stream.rewind(snapshot.values["data"])
        # Else data and generators go on: restored, they would shuffle the next epoch as before.
        self.stream.abandon_from(snapshot.step)
        self._constants.count_as_changing(changed, ", and stays as it is in this rollback")
        self.step = snapshot.step
        self.ring.drop_after(snapshot.step)
        for name, (_, load) in self._held.items():
            if name in snapshot.values:
                load(snapshot.values[name])
        if self.durable is not None:
            self.durable.abandon_after(snapshot.step)
        for callback in self._rollback_callbacks:
            callback(snapshot.step)

    def _misfit(self, snapshot: Snapshot, changed: Sequence[Key]) -> str:
        """Return why the run cannot return to a snapshot; empty if it can."""
        corrupt = self._constants.corrupt(changed)
        if corrupt:
            return f"{corrupt} holds NaN or Inf, and no snapshot holds it"
        try:
            self.training_state.check(snapshot.tensors)
        except StateMismatch as error:
            return f"the snapshot of step {snapshot.step} does not fit: {error}"
        return ""

    def whereabouts(self, step: int, with_samples: bool) -> Mapping[str, Any]:
        """Return names of a step that rollbacks do not change.

        ``call`` counts the calls of ``step`` from 1. Epoch, batch and samples are known for batches
        of :meth:`heal.Healer.batches`; samples only on one rank, else another may have the bad one.
        """
        found: dict[str, Any] = {"call": self.calls - (self.step - step) + 1}
        place = self.stream.batch_of(step)
        if place is None:
            return found
        if with_samples and not self._ranks.has_others:
            return {**found, **place.named()}
        return {**found, "epoch": place.epoch, "batch": place.number}

    def data_fault(self, step: int) -> str | None:
        """Read the batch of a step again: what is NaN in it, "" if nothing is, None if unknown."""
        place = self.stream.batch_of(step)
        return None if place is None else place.bad_numbers()

    def corruption(self, is_shared: bool, with_frozen: bool) -> Mapping[str, Any] | None:
        """Return cause and tensor of NaN or Inf in the state, if any; waits for the device.

        Args:
            is_shared: whether every rank asks now; else ranks that have peers do not look.
            with_frozen: whether frozen weights are read too, which may be most of the model.
        """
        if self._ranks.has_others and not is_shared:
            return None
        found = find_corruption(self.training_state)
        if found is None and with_frozen:
            frozen = self._constants.corrupt(self._constants.changed())
            if frozen:
                found = {"cause": Cause.WEIGHT_CORRUPTION.value, "tensor": frozen, "tensors": 1}
        answers = self._ranks.gather(found)
        rank = next((r for r, answer in enumerate(answers) if answer is not None), None)
        if rank is None or len(answers) == 1:
            return found
        return {**answers[rank], "rank": rank}

    def scale_lr(self, factor: float, floor: float, ramp_steps: int) -> None:
        self.lr_scale = max(self._lr_scale * factor, floor)
        self._ramp = (self._lr_scale, 0, ramp_steps) if ramp_steps else None
        for optimizer in self.guarded.optimizers:
            if any(group.get("lr") is None for group in optimizer.param_groups):
                self.note(
                    f"{type(optimizer.inner).__name__} has parameter groups whose lr is None: it "
                    "finds their rate by itself, and healing cannot lower it"
                )

    def advance(self) -> None:
        """Count a step; the learning rate ramps back towards its schedule."""
        self.step += 1
        self.calls += 1
        if self.anchor is not None:
            self.anchor.count_step()
        if self.clip_limits.steps_left:
            self.clip_limits.count_step()
        if self._ramp is not None:
            start, done, total = self._ramp
            done += 1
            self.lr_scale = start + (1.0 - start) * (done / total) if done < total else 1.0
            self._ramp = (start, done, total) if done < total else None

    def tighten_clip(self, factor: float) -> None:
        self.clip_limits.tighten(factor)

    def relearn_clip(self) -> None:
        for optimizer in self.guarded.optimizers:
            optimizer.clipper.reset()

    def skip_batches(self, first_step: int, last_step: int) -> None:
        self.stream.skip(first_step, last_step)

    def shrink_micro_batch(self) -> bool:
        return self._ranks.any_has(self.micro.shrink())

    def checkpoint_activations(self) -> bool:
        return self._ranks.any_has(checkpoint_activations(self.training_state.model))

    def clear_cache(self) -> None:
        gc.collect()
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.empty_cache()

    def sleep(self, seconds: float) -> None:
        self._sleep(seconds)

    def take_snapshot(self) -> bool:
        return self.ring.newest_step() == self.step or self.capture()

    def watch_closely(self, steps: int) -> None:
        self.close_watch_until = self.step + steps

    @torch.no_grad()
    def perturb_weights(self, std: float, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for param in self.training_state.parameters():
            if param.requires_grad and param.numel() > 1:
                noise = torch.randn(param.shape, generator=generator).to(param)
                param.add_(noise * param.std() * std)

    def anchor_weights(self, strength: float, steps: int) -> bool:
        from heal.lab.weight_anchor import WeightAnchor  # the laboratory is imported when used

        if self.anchor is None:
            self.anchor = WeightAnchor(self.guarded.optimizers, self.guarded.ranks)
        return self.anchor.hold(strength, steps)

    @property
    def anchor_steps(self) -> int:
        """How many steps an anchor still holds the weights."""
        return 0 if self.anchor is None else self.anchor.steps_left

    def _verified(self, step: int) -> Iterator[Snapshot]:
        """Yield snapshots of ``step`` and before that are intact on every rank, newest first."""
        for candidate in [s for s in self.snapshots() if s <= step]:
            snapshot = self._intact(candidate)
            if self._ranks.all_agree(snapshot is not None) and snapshot is not None:
                yield snapshot

    def _intact(self, step: int) -> Snapshot | None:
        try:
            return self.ring.take(step)
        except SnapshotCorrupt as error:
            self.note(f"{error}; falling back to the disk, or to an older one")
        except KeyError:
            pass  # it is on the disk only
        return None if self.durable is None else self.durable.snapshot(step)
