"""The training run as healing sees it: the Run protocol over model, optimizers, data and clock."""

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from heal.actions import CannotHeal
from heal.config import HealingConfig
from heal.data.stream import BatchStream
from heal.exit_codes import ExitCode
from heal.state.constants import Constants
from heal.state.distinct import Key
from heal.state.rng import RngState
from heal.state.snapshots import Snapshot, SnapshotCorrupt, SnapshotRing
from heal.state.training_state import StateMismatch, TrainingState
from heal.step.activation_checkpointing import checkpoint_activations
from heal.step.clip_limits import ClipLimits
from heal.step.guarded_step import GuardedStep
from heal.step.micro_batch import MicroBatcher
from heal.step.schedules import Schedules
from heal.step.weight_anchor import WeightAnchor


class Checkpoints(Protocol):
    """What the run needs of checkpoints on disk."""

    def steps(self) -> list[int]:
        """Return the steps of finished ones, newest first."""
        ...

    def snapshot(self, step: int) -> Snapshot | None:
        """Return one in the form of a snapshot; None if it is damaged."""
        ...

    def abandon_after(self, step: int) -> None:
        """Put those of later steps aside."""
        ...


class TorchRun:
    """What may be done to a run, and its state where actions changed it.

    Args:
        state: what a snapshot is made of.
        guarded: the optimizers.
        config: the limits.
        stream: where batches come from.
        micro: how finely they are cut.
        note: told of what went otherwise than planned.
        sleep: waits; tests give one that does not.

    Attributes:
        step: the number of the step that comes next.
        buffers: copies of those that steps write.
        on_restore: called with the plain healing state that was saved, after a rollback.
        on_resume: called after a run of another process is gone on with.
        healing_state: returns that state, to be saved.
        schedules: those that the caller steps stay as they are in a rollback, or return with it.
        durable: checkpoints on disk, for where no snapshot is old enough; None if there are none.
        clip_limits: tightens clipping for some steps.
        anchor: holds weights near those of a snapshot, for some steps after a rollback.
    """

    def __init__(
        self,
        state: TrainingState,
        guarded: GuardedStep,
        config: HealingConfig,
        stream: BatchStream,
        micro: MicroBatcher,
        note: Callable[[str], None],
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.step = 0
        self.buffers = state.buffers
        self.on_restore: Callable[[dict[str, Any]], None] = lambda saved: None
        self.on_resume: Callable[[], None] = lambda: None
        self.healing_state: Callable[[], dict[str, Any]] = dict
        self.schedules: Schedules | None = None
        self.durable: Checkpoints | None = None
        self.ring = SnapshotRing(
            config.snapshot_interval,
            config.snapshot_count,
            config.snapshot_memory_fraction,
            config.quarantine_steps,
        )
        self._state = state
        self._guarded = guarded
        self._ranks = guarded.ranks
        self._config = config
        self._stream = stream
        self._micro = micro
        self._note = note
        self._sleep = sleep
        self._lr_scale = 1.0
        self._ramp: tuple[float, int, int] | None = None  # start, steps done, steps in all
        self.clip_limits = ClipLimits(guarded.optimizers, config.lr_ramp_steps, note)
        self.close_watch_until = 0
        self.anchor = WeightAnchor(guarded.optimizers, guarded.ranks)
        self._constants = Constants(state, note)
        self._signature = state.signature()

    @property
    def lr_scale(self) -> float:
        """The factor on every learning rate, beside all schedules."""
        return self._lr_scale

    @lr_scale.setter
    def lr_scale(self, value: float) -> None:
        self._lr_scale = value
        for optimizer in self._guarded.optimizers:
            optimizer.lr_scale = value

    @property
    def micro_batches(self) -> int:
        """How many pieces each batch is cut into."""
        return self._micro.pieces

    @micro_batches.setter
    def micro_batches(self, value: int) -> None:
        self._micro.pieces = value

    def snapshots(self) -> Sequence[int]:
        """Return the steps that every rank can return to, in memory or on disk, newest first."""
        kept = self.ring.good_steps()
        saved = [] if self.durable is None else self.durable.steps()
        return self._ranks.common(sorted({*kept, *saved}, reverse=True))

    def capture(self, is_proven: bool = False) -> bool:
        """Take a snapshot of the state before the step that comes next.

        Args:
            is_proven: whether it is good at once, as the state is that training begins with.
        """
        self._constants.look(self.step)
        self.has_changed_shape()
        values = {
            **self._state.values(),
            "rng": RngState.now(),
            "data": self._stream.position(),
            "healing": self.healing_state(),
        }
        return self.ring.capture(self.step, self._state.tensors(), values, is_proven)

    def state(self) -> dict[str, Any]:
        """Return what healing changed about the run, as plain values; see :meth:`resume`."""
        return {
            "lr_scale": self._lr_scale,
            "ramp": self._ramp,
            "micro_batches": self.micro_batches,
            "micro": self._micro.state(),
            "anchor_steps": self.anchor.steps_left,
            **self.clip_limits.state(),
        }

    def resume(self, step: int, saved: dict[str, Any]) -> None:
        """Go on at a step of another process, with what :meth:`state` returned there."""
        self.step = step
        self.lr_scale, self._ramp = saved["lr_scale"], saved["ramp"]
        self.micro_batches = saved["micro_batches"]
        if "micro" in saved:  # not in the first checkpoints
            self._micro.load_state(saved["micro"])
        self.clip_limits.resume(saved)
        if saved.get("anchor_steps"):  # weights and importance would double the checkpoint
            self._note(f"an anchor held for {saved['anchor_steps']} more steps; it was not saved")
        self._guarded.mailbox.clear()
        self.ring.drop_all()
        self._constants.forget()
        self._signature = self._state.signature()
        self.on_resume()

    def has_changed_shape(self) -> bool:
        """Return whether parameters came, went, froze or thawed since last asked.

        Snapshots of before cannot be returned to and are dropped; new parameters get their names.
        """
        signature = self._state.signature()
        if signature == self._signature:
            return False
        self._signature = signature
        self.ring.drop_all()
        self._guarded.learn_names(self._state.model.named_parameters())
        return True

    def restore(self, step: int) -> None:
        """Return to the good snapshot of ``step``, or to an older one if its bytes have changed.

        All ranks return to the same one, or none does.

        Raises:
            CannotHeal: there is none, or it does not fit; nothing was changed.
        """
        snapshot = self._verified(self._ranks.least(step))
        changed = self._constants.changed()
        problem = self._misfit(snapshot, changed)
        if not self._ranks.all_agree(not problem):
            raise CannotHeal(problem or "another rank could not return to its snapshot")
        self._guarded.mailbox.clear()
        self.anchor.release()
        settle = None if self.schedules is None else self.schedules.before_return()
        self._state.restore(snapshot.tensors, snapshot.values)
        if settle is not None:
            settle(snapshot.step)
        if self._config.data == "replay":
            snapshot.values["rng"].put_back()
            self._stream.rewind(snapshot.values["data"])
        # Else data and generators go on from here: set back, they would shuffle the next epoch
        # as one that was already seen.
        self._stream.abandon_from(snapshot.step)
        self._constants.count_as_changing(changed, ", and stays as it is in this rollback")
        self.step = snapshot.step
        self.ring.drop_after(snapshot.step)
        self.on_restore(snapshot.values["healing"])
        if self.durable is not None:
            self.durable.abandon_after(snapshot.step)

    def _misfit(self, snapshot: Snapshot, changed: Sequence[Key]) -> str:
        """Return why the run cannot return to a snapshot; empty if it can."""
        corrupt = self._constants.corrupt(changed)
        if corrupt:
            return f"{corrupt} holds NaN or Inf, and no snapshot holds it"
        try:
            self._state.check(snapshot.tensors)
        except StateMismatch as error:
            return f"the snapshot of step {snapshot.step} does not fit: {error}"
        return ""

    def scale_lr(self, factor: float, floor: float, ramp_steps: int) -> None:
        """Multiply the learning rate's factor, and return to 1 over ``ramp_steps`` steps."""
        self.lr_scale = max(self._lr_scale * factor, floor)
        self._ramp = (self._lr_scale, 0, ramp_steps) if ramp_steps else None
        for optimizer in self._guarded.optimizers:
            if any(group.get("lr") is None for group in optimizer.param_groups):
                self._note(
                    f"{type(optimizer.inner).__name__} has parameter groups whose lr is None: it "
                    "finds their rate by itself, and healing cannot lower it"
                )

    def advance(self) -> None:
        """Count a step: the learning rate comes a little closer to its schedule."""
        self.step += 1
        if self.anchor.steps_left:
            self.anchor.count_step()
        if self.clip_limits.steps_left:
            self.clip_limits.count_step()
        if self._ramp is not None:
            start, done, total = self._ramp
            done += 1
            self.lr_scale = start + (1.0 - start) * (done / total) if done < total else 1.0
            self._ramp = (start, done, total) if done < total else None

    def tighten_clip(self, factor: float) -> None:
        """Multiply the limit of every clipper, until the learning rate is back on its schedule."""
        self.clip_limits.tighten(factor)

    def relearn_clip(self) -> None:
        """Forget what the clippers take for usual."""
        for optimizer in self._guarded.optimizers:
            optimizer.clipper.reset()

    def skip_batches(self, first_step: int, last_step: int) -> None:
        """Never again feed the batches of these steps."""
        self._stream.skip(first_step, last_step)

    def shrink_micro_batch(self) -> bool:
        """Cut batches twice as fine; False if pieces are as small as they may be, on all ranks."""
        return self._ranks.any_has(self._micro.shrink())

    def cut_as(self, state: Mapping[str, int]) -> None:
        """Cut batches as finely as another process found that it must; see MicroBatcher.state."""
        self._micro.load_state(state)

    def checkpoint_activations(self) -> bool:
        """Recompute activations in backward; False if the model cannot or already does."""
        return self._ranks.any_has(checkpoint_activations(self._state.model))

    def clear_cache(self) -> None:
        """Free what nobody holds, and give the allocator's reserve back to the device."""
        gc.collect()
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.empty_cache()

    def sleep(self, seconds: float) -> None:
        """Wait."""
        self._sleep(seconds)

    def take_snapshot(self) -> bool:
        """Take a snapshot now; it is quarantined like any other."""
        return self.ring.newest_step() == self.step or self.capture()

    def watch_closely(self, steps: int) -> None:
        """Have weights and optimizer state checked more often up to a step."""
        self.close_watch_until = self.step + steps

    @torch.no_grad()
    def perturb_weights(self, std: float, seed: int) -> None:
        """Add normal noise to trainable weights, from a generator of its own."""
        generator = torch.Generator().manual_seed(seed)
        for param in self._state.parameters():
            if param.requires_grad and param.numel() > 1:
                noise = torch.randn(param.shape, generator=generator).to(param)
                param.add_(noise * param.std() * std)

    def anchor_weights(self, strength: float, steps: int) -> bool:
        """Hold the weights where they are; see :class:`heal.step.weight_anchor.WeightAnchor`."""
        return self.anchor.hold(strength, steps)

    def _verified(self, step: int) -> Snapshot:
        for candidate in [s for s in self.snapshots() if s <= step]:
            snapshot = self._intact(candidate)
            if self._ranks.all_agree(snapshot is not None) and snapshot is not None:
                return snapshot
        raise CannotHeal(f"no intact snapshot of step {step} or before", ExitCode.NO_SNAPSHOT)

    def _intact(self, step: int) -> Snapshot | None:
        try:
            return self.ring.take(step)
        except SnapshotCorrupt as error:
            self._note(f"{error}; falling back to the disk, or to an older one")
        except KeyError:
            pass  # it is on the disk only
        return None if self.durable is None else self.durable.snapshot(step)
