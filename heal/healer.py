"""The healing loop: clip, step, poll what the device reported, and recover if something is wrong.

Call ``step`` and ``batches`` in a loop of your own, or ``run``, which is the whole loop.
"""

import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from heal.actions import HealingError, Plan
from heal.buffers import BufferCopies
from heal.causes import Finding
from heal.cluster.checks import ClusterWatch
from heal.config import HealingConfig
from heal.data.loader_pass import AfterError
from heal.data.stream import BatchStream, NoMoreBatches, StepBatches
from heal.detectors.watch import Detector, Watch
from heal.diagnose import Diagnosis
from heal.dry_run import DryRunReport, Recomputation, dry_run, recompute
from heal.durable import Durable, HealingMemory
from heal.exit_codes import ExitCode
from heal.exits import Exits
from heal.experiment import Experiment
from heal.extra_state import note_rewriting, note_stateless
from heal.failed_steps import FailedSteps
from heal.former import OldName
from heal.guarded_step import JUDGED, GuardedStep, judgeable
from heal.integrations.trackers import attach
from heal.journal import LEFT_OUT, Journal, Notes, describe_machine, describe_training
from heal.lr_schedules import Schedules
from heal.micro_batch import MicroBatcher, TrainStep, fewest_samples
from heal.monitor import Monitor, Seen
from heal.optimizer_settings import SettingsCheck
from heal.policy import decide
from heal.progress_bar import progress_bar
from heal.ranks import NO_FACTS, HostFacts
from heal.record import Flag, Record
from heal.recovery import NOTHING_DONE, Hook, Outcome, Recovery
from heal.snapshots import Snapshot, is_due, next_due
from heal.training_run import TorchRun
from heal.training_state import TrainingState
from heal.trials import BodyTrials
from zclip import ClippedOptimizer

if TYPE_CHECKING:
    from heal.lab.attached_probes import AttachedProbes

METRICS_INTERVAL = 10  # steps between lines of metrics.jsonl

NO_GRADIENTS = (
    "step: expected gradients, got a step before which no parameter of the optimizer had one; call "
    "loss.backward() before step and zero_grad() after it, and give the optimizer of this model"
)
STEPPED_TWICE = (
    "step: expected the loss of a new backward pass, got the same tensor twice; call step once for "
    "each backward, or the update is made twice"
)

Entered = TypeVar("Entered", bound="Healer")


class Healer:
    """Watches a training run and recovers it from NaN, damage, lack of memory and bad batches.

    A healthy run is bit-identical to the bare loop (apart from clipping, see ``zclip_enabled``),
    and nothing waits for the device. The optimizer that you pass goes on working: gradients, state
    and parameter groups are shared.

    Args:
        model: the module that is trained.
        optimizer: one, or several that step together; best built with ``fused=True``.
        scheduler: one, several or None; :meth:`step` steps each once per step, skipped steps
            included. Step a ReduceLROnPlateau yourself, because it needs your metric.
        config: a :class:`HealingConfig`, or a dict for :meth:`HealingConfig.from_dict`.
        own_schedulers: those that you step yourself, say once per epoch: saved, never stepped. See
            :class:`heal.lr_schedules.Schedules` for what a rollback does to them.
        scaler: a GradScaler; :meth:`step` then steps and updates it.
        run_dir: where the journal goes; without it only the postmortem of a failure is written.
        checkpoint_dir: where checkpoints go, shared by all ranks; without it none are saved. See
            :meth:`resume` and ``checkpoint_interval``.
        rank: of this process; the environment's ``RANK`` if None.
        process_group: the ranks that act alike, where ``torch.distributed`` is in use; all if None.
        trackers: names such as "trackio,tensorboard", or objects; see
            :func:`heal.integrations.trackers.make_trackers`.
        forward: computes the loss of a batch without a backward pass. Experiments use it to
            distinguish damaged weights from other data; without it they run the body of your loop
            over :meth:`batches` once more. Pass it if that body must not run twice.
        sleep: waits between retries.
        clock: seconds, for the duration of steps.

    Attributes:
        notes: what healing itself could not do; also in the journal.
        guarded: clips and steps, unless the device skips the step.
        state: all that training changes.
        stream: the batches, and where in them the run is.
        durable: the checkpoints on disk; None without a ``checkpoint_dir``.
        training: the run as plans change it: snapshots, learning rate, data.
        monitor: what the device reported, as records and findings.
        experiment: distinguishes damaged weights from other data.
        recovery: what was found and done so far.
        failures: diagnoses what steps and the loader raise.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: there is no optimizer, one is given twice, or a setting is wrong.
        OSError: ``checkpoint_dir`` cannot be made; a ``run_dir`` that cannot is only noted.

    Example:
        >>> healer = Healer(model, optimizer, scheduler)
        >>> for batch in healer.batches(loader):
        ...     loss = model(batch)
        ...     loss.backward()
        ...     healer.step(loss)
        ...     optimizer.zero_grad()
    """

    def __init__(
        self,
        model: Module,
        optimizer: Optimizer | Sequence[Optimizer],
        scheduler: Any = None,
        config: HealingConfig | Mapping[str, Any] | None = None,
        *,
        own_schedulers: Any = None,
        scaler: Any = None,
        run_dir: str | Path | None = None,
        checkpoint_dir: str | Path | None = None,
        rank: int | None = None,
        process_group: Any = None,
        trackers: Any = None,
        forward: Callable[[Any], Tensor | float] | None = None,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not isinstance(model, Module):
            raise TypeError(f"model: expected a torch Module, got {type(model).__name__}")
        if isinstance(scheduler, HealingConfig):
            raise TypeError(
                "scheduler: expected a scheduler or None, got a HealingConfig; "
                "pass it as Healer(model, optimizer, config=...)"
            )
        self.model = model
        self.config = config = checked_config(config)
        given = checked_optimizers(optimizer)

        self.journal = Journal(run_dir, rank)
        self._notes = Notes(self.journal, self._next_step)
        self.notes, note = self._notes.texts, self._notes.add
        attach(self.journal, trackers, config.to_dict(), note)

        buffers = BufferCopies(model, note)
        self.guarded = GuardedStep(
            given, config, model.named_parameters(), scaler, process_group, note, buffers
        )
        ranks, optimizers = self.guarded.ranks, self.guarded.optimizers
        replays = config.after_rollback == "replay_data"
        self.schedules = Schedules(scheduler, own_schedulers, optimizers, replays, note)
        rules = {"loss": self.guarded.watch.state}
        self.state = TrainingState(
            model, optimizers, self.schedules.all, self.guarded.scaler, rules, buffers, note
        )
        least, grow_steps = fewest_samples(model), config.micro_batch_grow_steps
        self.micro = MicroBatcher(model, self.state.parameters, least, grow_steps, buffers=buffers)
        self.stream = BatchStream(self._loader_failed, keeps_last=ranks.has_others, note=note)
        self.durable = None if checkpoint_dir is None else self._open(checkpoint_dir, process_group)
        self.training = TorchRun(
            self.state,
            self.guarded,
            config,
            self.stream,
            self.micro,
            self.schedules,
            self.durable,
            note,
            sleep,
        )

        watch = Watch(config, ranks.has_others)
        self.experiment = Experiment(self.training, watch, 2 * config.loss_spike_patience)
        self.trials = BodyTrials(self.experiment, self.guarded, self.schedules, forward, note)
        reported: deque[Flag] = deque()  # signal handlers and threads append while a step reads
        cluster = ClusterWatch(model, config, self.journal, reported.append, note, process_group)
        self.monitor = Monitor(self.training, watch, self.experiment, cluster, reported, clock)
        self.recovery = Recovery(self.training, self.monitor, config, self.journal, note)
        self.failures = FailedSteps(
            self.training, self.recovery, self.journal, self.experiment, self.monitor.report
        )
        self.memory = HealingMemory(self.training, self.monitor, self.recovery)
        self.probes: AttachedProbes | None = None

        self._wants_snapshot = self._owes_checkpoint = self._is_stepping = False
        self._last_loss: Callable[[], Any] = lambda: None
        self._busy_at = 0  # the next step after which something is due
        self._num_waited = 0  # steps that a snapshot was put off
        note_stateless(self.schedules.given, note)
        note_rewriting(given, note)
        self.settings = SettingsCheck(optimizers, note)
        self.exits = Exits(self, self.journal, clock)
        trained = describe_training(model, optimizers, config)
        self.journal.event("started", self.training.step, **describe_machine(), **trained)

    # What a hand-written loop calls.

    def batches(self, loader: Any) -> Iterator[Any]:
        """Yield the batches of one epoch; skips bad ones, moves on or rewinds after a rollback.

        For training only, and one loop at a time. Iterate a loader for evaluation directly.
        """
        return self.trials.batches(self.epoch(loader))

    def epoch(self, loader: Any, *, sets_epoch: bool = False) -> Iterator[Any]:
        """Yield the batches of one epoch, for integrations; :meth:`batches` adds experiments.

        Args:
            loader: what is passed over.
            sets_epoch: call ``set_epoch`` of its samplers and dataset, unless you do.
        """
        if not hasattr(loader, "__iter__") and not hasattr(loader, "__getitem__"):
            raise TypeError(f"loader: expected an iterable of batches, got {kind_of(loader)}")
        number = self.stream.begin(loader, sets_epoch=sets_epoch)
        try:
            self._begin_epoch()
            while True:
                self._between_steps(is_drawing=True)
                # Not by way of a name: it would keep the batch while the next one is read.
                yield self.stream.draw(loader, number, self.training.step)
        except NoMoreBatches:
            return
        finally:
            self.stream.leave(number)

    def step(self, loss: Tensor | float | None = None) -> None:
        """Clip, step the optimizer unless the device skips it, step the scheduler, and recover.

        Call it once per optimizer step, after ``backward``; ``zero_grad`` is yours. Where there are
        other ranks each calls it, with a loss of its own; all skip, heal or stop alike.

        Args:
            loss: of this step, 0-dim, not scaled by a GradScaler; None if there is none to watch.

        Raises:
            TypeError: the loss is neither a number nor a tensor.
            HealingError: the run must stop; ``exit_code`` says why. The postmortem is written.
        """
        number: Tensor | None = None
        if type(loss) is Tensor and not loss.dim() and loss.dtype in JUDGED:
            number = loss
        elif loss is not None:
            number = judgeable(loss, self.note)
        if self.trials.is_open:  # an experiment: the body ran with old weights, nothing is taken
            self.trials.finish(number)
            return
        if loss is not None and number is loss and loss.requires_grad:
            if loss is self._last_loss():
                self.note(STEPPED_TWICE)
            self._last_loss = weakref.ref(loss)  # it would keep the graph
        training, schedules, facts, posted = self.training, self.schedules, NO_FACTS, True
        try:
            if schedules.are_followed:
                schedules.before_step(training.step)
            is_held_up = training.ring.copying is not None or self._owes_checkpoint
            if is_held_up or training.is_between_steps or training.step == 0:
                self.before_step()
            facts = self.monitor.facts()
            if training.lr_limit is not None:
                training.apply_lr_limit()
        except Exception as error:
            self.note(f"{LEFT_OUT}: {error!r}")
        self._is_stepping = True
        try:
            posted = self.guarded.step(training.step, number, facts)  # nothing waits
        except Exception as error:
            if not self.guarded.ranks.has_others:
                self.monitor.not_sent(facts)
                raise
            self._send(*self.failures.judge(error, "step"))
            self.report(Flag.STEP_FAILED)
        if schedules.are_followed:
            schedules.step()
        self._is_stepping = False
        try:
            self.after_step(facts, posted, number is not None)
        except HealingError as halt:
            self._halt(halt)
        except Exception as error:
            self.note(f"{LEFT_OUT}: {error!r}")

    def after_step(self, facts: HostFacts, posted: bool, has_loss: bool) -> None:
        """Count the step, recover from what was wrong with those before it, and do what is due.

        For integrations that step the optimizer themselves; :meth:`step` calls it.

        Args:
            facts: what the host knew of the step.
            posted: whether the step has a record.
            has_loss: whether a loss is in it.

        Raises:
            HealingError: the run must stop.
        """
        step = self.training.step + 1
        if has_loss and not posted:
            self.note(NO_GRADIENTS)
        is_calm = self.monitor.note_step(step, facts, posted, has_loss)
        self.training.advance()
        has_changed_shape = False
        try:
            if self.state.has_changed_shape():
                has_changed_shape = True
                self.training.follow_shape()
        except Exception as error:  # the detectors must be shown the records all the same
            self.note(f"{LEFT_OUT}: {error!r}")
        if is_calm and step < self._busy_at and not self.recovery.late and not has_changed_shape:
            return  # as after most steps
        self._busy_at = 0
        self._wants_snapshot |= has_changed_shape
        self.contained(self.settings.look)
        self.contained(self.monitor.check_health)
        for seen in self.recovery.poll():
            if self._recover(seen).rolled_back:
                break  # the remaining records are of steps that did not happen
        else:
            self._maintain(step)
        self._wants_snapshot |= self.monitor.take_snapshot_request()
        self._write_metrics()
        self._busy_at = self._next_due(self.training.step)

    def _recover(self, seen: Seen) -> Outcome:
        """Recover from what a record has shown, or from what a step has raised."""
        seen = self.recovery.settle(seen)  # a suspicion waits for the answer of an experiment
        diagnosis = self.recovery.diagnose(seen)  # the one cause behind all that was found
        if diagnosis is None:
            return NOTHING_DONE
        diagnosis = self.recovery.examine(diagnosis)  # do the weights or the batch hold NaN?
        history, snapshots = self.recovery.history, self.training.snapshots()
        plan = decide(diagnosis, history, self.config, snapshots, self.training.lr_scale)
        plan = self.recovery.ask_hook(diagnosis, plan)
        outcome = self.recovery.execute(plan, diagnosis)
        if not outcome.rolled_back:
            self.monitor.note_kept(seen)
        return outcome

    def _next_due(self, step: int) -> int:
        """Return the step after which something is due again, if all stays calm."""
        if self._wants_snapshot or self.recovery.late:
            return step + 1
        due = [self.monitor.next_due(step), next_due(step, self.training.ring.interval)]
        if self.journal.has_readers:
            due.append(step - step % METRICS_INTERVAL + METRICS_INTERVAL)
        if self.durable is not None:
            due.append(self.durable.next_due(step))
        if self.probes is not None:
            due += self.probes.next_due(step)
        return min(due)

    def _maintain(self, step: int) -> None:
        """Take snapshots, save checkpoints and run probes that are due."""
        self._capture_if_due()
        if self.durable is not None:
            # States that the user updates after ``step`` are complete only before the next one.
            self._owes_checkpoint = bool(self.state.added) and self.stream.is_open
            if not self._owes_checkpoint:
                self.durable.save_if_due(step, self.memory.values)
        if self.probes is not None and self.probes.are_due(step):
            with self.monitor.clock_stopped():  # else the step would seem slow
                for alert in self.probes.look(step):
                    self._recover(Seen(step, [alert]))

    def _capture_if_due(self) -> None:
        """Take a snapshot that is due, unless an open check or suspicion may need an older one."""
        ring = self.training.ring
        if not self._wants_snapshot:
            if not is_due(self.training.step, ring.interval):
                return
            if ring.is_slow:  # then the first rank that is ready asks all others
                if ring.is_ready:
                    self.request_snapshot()
                return
        self._wants_snapshot = True
        if ring.is_suspect:
            return
        if self.monitor.health.is_under_way and self._num_waited < self.config.lag:
            self._num_waited += 1
            return
        self._wants_snapshot = False
        self._num_waited = 0
        if ring.is_starved:
            self.note(
                "the last snapshots held NaN or Inf and were dropped: a rollback can only "
                "return to an older one; look at buffers and optimizer state"
            )
        self.training.capture_after_step()

    def _write_metrics(self) -> None:
        """Write a line of ``metrics.jsonl`` if one is due."""
        if self.training.step % METRICS_INTERVAL:
            return
        forecast = self.monitor.watch.forecast
        if forecast is not None and forecast.is_silent:
            self.note(forecast.silent)
        if self.journal.has_readers:
            latest = self.latest
            seen = {} if latest is None else {"seen_at": latest.step, "loss": latest.loss}
            numbers = {**seen, "lr_scale": self.training.lr_scale, **self.metrics()}
            self.journal.metrics(self.last_step, {**numbers, **self.monitor.series.take()})

    def _halt(self, halt: HealingError) -> None:
        """Save if the stop was asked for, write the postmortem, and raise."""
        with self.halting():
            halt = self.failures.explained(halt)
            if halt.exit_code == ExitCode.PREEMPTED and self.durable is not None:
                self.exits.draft(halt)
                raise self.durable.saved_before(
                    halt, self.training.step, self.memory.values
                ) from None
            raise halt from halt.__cause__

    def before_step(self) -> None:
        """Wait for copies that the step would overwrite; before the first step take a snapshot.

        For integrations that step the optimizer themselves; :meth:`step` calls it.
        """
        if self.training.is_between_steps or self._owes_checkpoint:
            self._between_steps(is_drawing=False)
        if self.training.ring.copying is not None or self.training.step == 0:
            self.contained(self._prepare_step)

    def _prepare_step(self) -> None:
        self.training.ring.before_step()
        if self.training.step == 0:  # what has changed since an epoch began must be in it
            self._wants_snapshot |= self.training.has_changed_shape()
            self._first_snapshot()

    def _first_snapshot(self) -> None:
        """Take a snapshot unless there is one; that of step 0 is good at once."""
        if self.training.ring.newest_step() is None:
            self.training.capture(is_proven=self.training.step == 0)
            self.monitor.note_weights()

    # What the stream of batches calls.

    def _next_step(self) -> int:
        training = vars(self).get("training")  # none while the healer is being made
        return 0 if training is None else training.step

    def _begin_epoch(self) -> None:
        """Take the first snapshot, of what was loaded since the healer was made, too."""
        if self.training.step == 0 and self.training.ring.newest_step() is None:
            self.contained(self.training.buffers.restored)
        self.contained(self._first_snapshot)

    def _between_steps(self, is_drawing: bool) -> None:
        """Finish what had to wait for the user's code after the last step."""
        self.contained(lambda: self.training.between_steps(is_drawing))
        if self._owes_checkpoint and self.durable is not None:
            self._owes_checkpoint = False
            self.durable.save_if_due(self.training.step, self.memory.values)

    def _loader_failed(self, error: Exception, epoch: int, index: int | None) -> AfterError:
        """Recover from an exception of the loader; return what becomes of the batch."""
        with self.halting():
            if index is None:  # the epoch could not be opened
                failure = self.failures.judge_epoch(error, epoch)
            else:
                failure = self.failures.judge_batch(error, epoch, index)
                if self.has_others:
                    self._send(*failure)
                    return AfterError.STAND_IN
            return AfterError.TRY_AGAIN if self._heal(*failure) else AfterError.PASS_OVER

    # What may go wrong.

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """Recover from exceptions of the body, from forward to ``step``, as :meth:`run` does.

        Out of memory, an unusable batch, a network that does not answer: gradients, buffers and
        generators are put back, the plan is carried out, and the loop goes on with the next batch.
        The cure for lack of memory is smaller pieces, so iterate :meth:`pieces`; otherwise the run
        halts once recomputing activations does not help either. Other exceptions pass through.

        Example:
            >>> for batch in healer.batches(loader):
            ...     with healer.attempt():
            ...         total = 0.0
            ...         for piece, share in healer.pieces(batch):  # one, unless memory ran out
            ...             loss = share * model(piece)
            ...             loss.backward()
            ...             total += loss.detach()
            ...         healer.step(total)
            ...     optimizer.zero_grad()
        """
        self._is_stepping = False
        self.micro.begin()
        failure, phase = None, "forward"
        with self.halting():
            try:
                yield
            except HealingError:
                raise
            except Exception as error:
                if self.trials.is_open:
                    self.trials.abandon()  # only an experiment: the same batch comes again
                else:
                    phase = "step" if self._is_stepping else phase
                    failure = self.failures.judge(error, phase)
            # The except block is left: nothing holds the frames whose tensors must be freed.
            self._is_stepping = False
            if failure is None:
                self.failures.worked()
            else:
                self.failures.give_back(failure, phase)
                self._heal(*failure)

    def heal(self, diagnosis: Diagnosis, error: Exception) -> bool:
        """Carry out the plan for what a step raised; True if its batches should be tried again.

        For integrations with a loop of their own; :meth:`attempt` calls it for you.

        Args:
            diagnosis: from ``healer.failures.judge(error, phase)``.
            error: that returned it too, without the memory that it held.

        Raises:
            HealingError: the run must stop; the postmortem is written.
        """
        with self.halting():
            return self._heal(diagnosis, error)

    def _heal(self, diagnosis: Diagnosis, error: Exception) -> bool:
        try:
            outcome = self._recover(Seen(diagnosis.step, raised=diagnosis))
            return self.failures.may_work_now(diagnosis, outcome)
        except HealingError as halt:
            raise self.failures.halt_for(halt, diagnosis, error) from error

    def _send(self, diagnosis: Diagnosis, error: Exception) -> None:
        """Report a failure to the other ranks: in some steps all of them recover from it."""
        if diagnosis.cause.about.sent_as is None:  # no message can reach them
            self._heal(diagnosis, error)  # halts, unless a hook has replaced the halt
        self.failures.send(diagnosis, error)

    def repeat(
        self,
        compute: Callable[[], Any],
        failed: Callable[[Diagnosis], None] = lambda diagnosis: None,
    ) -> tuple[bool, Any]:
        """Compute the gradients of a step; again after each failure that has a cure.

        For integrations in one process, after ``healer.micro.begin()``. Gradients, buffers and
        generators are put back before each further call.

        Args:
            compute: forward and backward of the step.
            failed: is called with each failure first, to add evidence.

        Returns:
            Whether it worked, and what ``compute`` returned. If not, the batch is to be given up.

        Raises:
            HealingError: the run must stop; the postmortem is written.
        """
        with self.halting():
            while True:
                try:
                    return True, compute()
                except Exception as error:
                    failure = self.failures.judge(error, self.micro.phase)
                # The except block is left: nothing holds the frames whose tensors must be freed.
                failed(failure[0])
                self.micro.undo()
                if not self._heal(*failure):
                    return False, None

    def try_step(self, loss: Tensor | float | None = None) -> bool:
        """Call :meth:`step` and recover from what it raises; return whether the step was taken.

        It is never tried again: some weights may be updated already. For integrations; the body of
        :meth:`attempt` calls :meth:`step`.

        Raises:
            HealingError: the run must stop; the postmortem is written.
        """
        with self.halting():
            try:
                self.step(loss)
            except HealingError:
                raise
            except Exception as error:
                failure = self.failures.judge(error, "step")
            else:
                self.failures.worked()
                return True
            self._heal(*failure)
            return False

    def pieces(self, batch: Any) -> list[tuple[Any, float]]:
        """Cut a batch into pieces that fit into memory, with the share of each in the mean loss.

        One piece with the share 1 until memory runs out in :meth:`attempt`. Add up the gradients of
        ``share * loss``, then call :meth:`step` once: the gradient is that of the whole batch.
        """
        return self.micro.pieces_of(batch)

    @contextmanager
    def halting(self) -> Iterator[None]:
        """Write the postmortem before a halt of the body reaches the caller."""
        try:
            yield
        except HealingError as halt:
            self.close(halt)
            raise

    def note(self, text: str) -> None:
        """Report once what healing itself could not do: in :attr:`notes`, journal and log."""
        self._notes.add(text)

    def contained(self, action: Callable[[], None]) -> None:
        """Run code of healing itself; what it raises becomes a note, and training goes on."""
        self._notes.contain(action)

    # What a user may add.

    def on_instability(self, hook: Hook) -> Hook:
        """Call ``hook(diagnosis, plan)`` with every plan; a plan that it returns is used instead.

        A plan is a tuple of actions. See :class:`heal.Action` for your own; a plan with one counts
        as an attempt, and is left out when ``max_recovery_attempts`` are spent. With several ranks
        the hook must return the same on each. It is called for a halt because a limit is reached
        (exit codes 41 and 43 to 46) but cannot replace that: healing always ends. If an exception
        gets a plan without a cure, its batch is dropped, at most three times in a row. If the hook
        raises, or returns something invalid, the plan is kept and :attr:`notes` says so.
        """
        expect_function("hook", hook)
        self.recovery.add_hook(hook)
        return hook

    def on_rollback(self, callback: Callable[[int], None]) -> Callable[[int], None]:
        """Call ``callback(step)`` after each rollback; ``step`` is the one that comes next.

        Weights, optimizer, schedules, data and added states have returned by then. With several
        ranks it is called on each. An exception of the callback ends the run.

        Example:
            >>> @healer.on_rollback
            ... def forget(step):
            ...     cache.clear()
        """
        expect_function("callback", callback)
        self.training.on_rollback(callback)
        return callback

    def on_record(self, callback: Callable[[Record], None]) -> Callable[[Record], None]:
        """Call ``callback(record)`` with every record that is polled, ``lag`` steps late or more.

        A record holds loss, gradient norm, clip coefficient, flags and learning rate of one step.
        An exception of the callback is noted once, and training goes on.
        """
        expect_function("callback", callback)
        self.monitor.on_record(callback)
        return callback

    def add_detector(self, name: str, detector: Detector) -> None:
        """Call ``detector.observe(record)`` with every record from now on.

        Healing acts on its findings as on its own; an experiment settles one with ``wants_proof``
        first. Its state is saved in snapshots and checkpoints under ``name``.

        Raises:
            TypeError: the detector lacks a method.
            ValueError: there is a detector of this name.
        """
        expect_methods("detector", detector, "observe", "state", "load_state")
        detectors = self.monitor.watch.detectors
        if name in detectors:
            taken = ", ".join(detectors)
            raise ValueError(
                f"detector name: expected one that is not taken ({taken}), got {name!r}"
            )
        detectors[name] = detector

    def expect_change(self, reason: str) -> None:
        """Announce a change made on purpose, so that it is not mistaken for trouble.

        Call it right after you reset the optimizer, replace a head, insert a layer, change the
        loss, the task or the learning rate by hand. Loss, gradients, weights and learning rate get
        new baselines, an open suspicion is dropped, and a snapshot of the new state is taken at the
        end of the next step. Every rank has to call it.

        Args:
            reason: what was changed, for the journal.

        Example:
            >>> model.head = torch.nn.Linear(64, 20)
            >>> optimizer.add_param_group({"params": model.head.parameters()})
            >>> healer.expect_change("new head for 20 classes")
        """
        self.recovery.catch_up()
        self.monitor.expect_change()
        self._wants_snapshot |= self.monitor.take_snapshot_request()
        self._busy_at = 0
        self.journal.event("expected_change", self.training.step, reason=str(reason))

    def observe_eval(self, eval_loss: float, train_loss: float | None = None) -> None:
        """Report the loss of an evaluation, to be warned of overfitting."""
        self.recovery.catch_up()
        watch, step = self.monitor.watch, self.training.step
        self.recover_from(watch.observe_eval(step, eval_loss, train_loss))

    def recover_from(self, findings: Sequence[Finding]) -> None:
        """Diagnose findings of your own and carry out the plan, as for those of detectors.

        Raises:
            HealingError: the run must stop; the postmortem is written.
        """
        with self.halting():
            self._recover(Seen(self.training.step, findings))

    def suspect(self, finding: Finding) -> None:
        """Have an experiment find out whether the weights are damaged, as ``finding`` may suggest.

        For integrations. If they are, the run returns to a snapshot from before
        ``finding.bad_step``, or to a newer one that is sound; else nothing happens.
        """
        self.recovery.catch_up()
        self.monitor.suspect(finding)
        self._busy_at = 0

    def add_state(self, name: str, save: Callable[[], Any], load: Callable[[Any], None]) -> None:
        """Add a state outside of model and optimizer to rollbacks and checkpoints.

        A moving average of the weights, a reference model, a replay buffer: without this, a
        rollback leaves it as it is. Call it before the first step. A state that the loop updates
        after :meth:`step` is exact too: it is saved and restored before the next batch is drawn.

        Args:
            name: of the state, in checkpoints.
            save: returns it: tensors, numbers and texts in dicts and lists. It is copied to host
                memory with every snapshot, which waits for the device.
            load: takes what ``save`` returned, with its tensors in host memory.

        Raises:
            TypeError: ``save`` or ``load`` cannot be called.
            ValueError: the name is taken.

        Example:
            >>> healer.add_state("ema", ema.state_dict, ema.load_state_dict)
        """
        self.state.added.add(name, save, load)

    def report(self, flag: Flag) -> None:
        """Send a flag of this host with the record of the next step, so that all ranks act on it.

        Safe in a signal handler and from other threads. See :class:`heal.detectors.host.HostNews`
        for the effect of each flag.
        """
        self.monitor.report(flag)

    def add_source(self, source: Callable[[], Flag]) -> None:
        """Call ``source`` before every step for flags to send; it must be quick and not wait."""
        self.monitor.sources.append(source)

    def watch_closely(self, steps: int) -> None:
        """Check weights and optimizer state more often for so many steps."""
        self.training.watch_closely(steps)
        self._busy_at = 0

    def request_stop(self) -> None:
        """Stop all ranks at the end of a coming step, the same one, as after SIGTERM."""
        self.report(Flag.PREEMPTED)

    def request_snapshot(self) -> None:
        """Take a snapshot at the end of a coming step, on all ranks at the same one."""
        self.report(Flag.SNAPSHOT_REQUESTED)

    def add_probe(
        self,
        name: str,
        look: Callable[[], Any],
        *,
        every: int,
        alarm: Callable[[Any], bool] | None = None,
    ) -> None:
        """Run the diagnostic ``look()`` after every ``every``-th step and log its numbers.

        The numbers are an event ``probe`` of the journal and entries ``probe/<name>`` of
        :meth:`metrics`. Generators, buffers and modes are put back, so training stays
        bit-identical; a probe must not change weights and gradients (those of
        :mod:`heal.lab.probes` do not). The step waits for it, and its time counts for no step. One
        that raises is noted once and not run again. With several ranks each adds the same probes.

        Args:
            name: a unique one.
            look: returns a number, a mapping or dataclass of numbers, or None if there is nothing
                to log; values that are no numbers are left out.
            every: steps between runs.
            alarm: takes what ``look`` returned, and returns whether to warn. The warning is an
                alert ``probe_alarm``, once each time the alarm comes on; it changes nothing unless
                a hook of :meth:`on_instability` acts on it.

        Raises:
            ValueError: the name is taken or empty, or ``every`` is below 1.

        Example:
            >>> healer.add_probe(
            ...     "sharpness",
            ...     lambda: sharpness(model, train_step, batch),
            ...     every=500,
            ...     alarm=lambda found: found.eigenvalue * lr > 2,
            ... )
        """
        from heal.lab.attached_probes import AttachedProbe, AttachedProbes  # imported when used

        if self.probes is None:
            ranks = self.guarded.ranks
            self.probes = AttachedProbes(self.model, ranks, self.journal, self._notes)
        self.probes.add(AttachedProbe(name, look, every, alarm))
        self._busy_at = 0

    # The whole loop.

    def run(
        self,
        train_step: TrainStep,
        loader: Any,
        steps: int,
        *,
        accumulate: int = 1,
        weigh: Callable[[Any], float] | None = None,
        progress: bool = True,
        on_step: Callable[[int], None] | None = None,
    ) -> None:
        """Train until ``steps`` steps are done, over as many epochs as that takes.

        Args:
            train_step: takes a batch and returns its mean loss; ``run`` backpropagates, so that it
                can cut the batch when memory runs out.
            loader: iterated once per epoch; ``set_epoch`` of its samplers and dataset is called,
                unless your code does. If an epoch has no batches, as the second one of a
                generator, the run ends early, and a note and standard error say so.
            steps: optimizer steps in all, those already done included.
            accumulate: batches per step.
            weigh: how much a piece of a batch counts, if not by its samples; see MicroBatcher.
            progress: show a bar with loss, norm, clips and heals.
            on_step: called with its number after every step that was not taken back.

        Raises:
            HealingError: the run must stop; ``exit_code`` says why.
            TypeError: ``train_step`` cannot be called, or returns no loss that requires gradients.
            ValueError: ``steps`` is negative, or ``accumulate`` less than 1.
        """
        expect_function("train_step", train_step)
        if steps < 0:
            raise ValueError(f"steps: expected at least 0, got {steps}")
        if accumulate < 1:
            raise ValueError(f"accumulate: expected at least 1, got {accumulate}")
        self.micro.weigh_by(weigh)
        self.schedules.follow_caller()
        self.journal.event("goal", self.training.step, steps=steps, accumulate=accumulate)
        with self, progress_bar(self, steps, progress) as show:
            with closing(self._all_epochs(loader)) as source:
                batches = StepBatches(source, accumulate)
                while self.training.step < steps or self._returns_at_end(train_step, batches):
                    before = self.training.step
                    try:
                        batches = StepBatches(source, accumulate)
                        was_taken = self._take_step(train_step, batches)
                    except NoMoreBatches:
                        self._note_shortfall(steps)
                        return
                    if was_taken:
                        show(self.training.step)
                        if on_step is not None and self.training.step > before:  # not rolled back
                            on_step(self.last_step)
            if self.durable is not None:
                self.durable.save_last(self.training.step, self.memory.values)

    def _returns_at_end(self, train_step: TrainStep, batches: StepBatches) -> bool:
        """Settle what the last steps have raised; return whether that has undone some of them."""
        step, experiment = self.training.step, self.experiment
        with self.halting():
            if any(self._recover(seen).rolled_back for seen in self.recovery.poll(is_last=True)):
                return True
            experiment.hurry()
            while experiment.is_due and batches.drawn and not self.guarded.has_stages:
                self.failures.try_again(train_step, batches)  # no step follows
                if self._recover(Seen(step, settled=experiment.observe_trial())).rolled_back:
                    return True
            return self._recover(Seen(step, settled=experiment.stop_waiting())).rolled_back

    def _take_step(self, train_step: TrainStep, batches: StepBatches) -> bool:
        """Take a step, again after a cure; return False if its batches were given up."""
        while True:
            loss, failure = self.failures.compute(train_step, batches)
            if failure is None:
                return self.try_step(loss)
            if self.has_others:  # nothing is tried again: all ranks skip the step
                if failure[0].cause.about.sent_as is None:
                    self._heal(*failure)
                self.failures.stand_in(failure, train_step, batches)
                return self.try_step()
            if not self._heal(*failure):
                if not self.stream.will_rewind:
                    batches.draw_rest()
                return False

    def _all_epochs(self, loader: Any) -> Generator[Any, None, None]:
        """Yield batches of all epochs, until one has none: a step may span two epochs."""
        before = -1
        while self.stream.ordinal != before:
            before = self.stream.ordinal
            yield from self.epoch(loader, sets_epoch=True)

    def _note_shortfall(self, steps: int) -> None:
        done = f"{self.training.step} of {steps} steps were done"
        text = f"the loader has no batches; {done}"
        if self.stream.ordinal:
            text = (
                f"the loader gave {self.stream.ordinal} batches and then none; {done}. Iterables "
                "that can be passed over once, such as generators, end a run with their first "
                "epoch: give a loader that starts again, or ask for fewer steps"
            )
        self.note(text)
        print(f"heal: {text}", file=sys.stderr)

    def dry_run(
        self, train_step: TrainStep, loader: Any, steps: int = 2, *, accumulate: int = 1
    ) -> DryRunReport:
        """Try ``steps`` steps and undo them: model, optimizer, generators and loader.

        Changes of ``train_step`` elsewhere, as to a teacher outside of the model, are not undone.

        Raises:
            ValueError: ``steps`` or ``accumulate`` is less than 1: nothing would be tried.
        """
        return dry_run(self.training, train_step, loader, steps, accumulate)

    # From the first step to the last record.

    def close(self, error: BaseException | None = None) -> None:
        """Read the last records and write the postmortem; ``run`` and ``with`` do it for you.

        Without either, this happens when Python exits. Inside ``with healer:`` SIGTERM and SIGUSR1
        also stop the loop after a step, which saves a checkpoint first, and an uncaught
        HealingError ends the process with its own exit code.
        """
        self.monitor.cluster.stop()
        self.trials.close()
        self.exits.close(error)

    def enter(self, *, catches_signals: bool = True) -> None:
        """Let a halt end the process with its own exit code, until :meth:`leave`.

        For integrations; ``with healer:`` does it for you.

        Args:
            catches_signals: stop all ranks after a step when one gets SIGTERM or SIGUSR1.
        """
        if catches_signals:
            self.exits.catch_signals()
        else:
            self.exits.enter()

    def leave(self, error: BaseException | None = None) -> None:
        """Close the run, and end what :meth:`enter` began."""
        self.close(error)
        self.exits.leave()

    def __enter__(self: Entered) -> Entered:
        self.enter()
        self.monitor.cluster.start(self.exits.leaving)
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        halt = self.exits.late_stop() if error is None else None
        if halt is not None:
            self.exits.draft(halt)
            if self.durable is not None:
                # Other ranks may have left already, and a save needs all of them.
                halt = self.durable.saved_before(
                    halt, self.training.step, self.memory.values, may_save=not self.has_others
                )
        self.leave(error if halt is None else halt)
        if halt is not None:
            raise halt

    hear_the_rest = OldName("finish")
    is_in_loop = OldName("stream.is_open")
    left_loop_early = OldName("stream.was_left")
    retries = OldName("failures")
    treat = OldName("recover_from")

    def __del__(self) -> None:
        exits = vars(self).get("exits")  # none if the constructor raised
        if exits is not None:
            exits.collected(self)

    def finish(self, hurries: bool = False) -> None:
        """Finish saves and read the last records, when no more steps will be taken.

        Args:
            hurries: do not wait for other ranks to finish a save, because one may have died.
        """
        if self.durable is not None:
            if hurries:
                self.durable.store.hurry()
            self.contained(self.durable.finish)
        self.contained(self.recovery.finish)
        if len(self.monitor.series):
            self.journal.metrics(self.last_step, self.monitor.series.take())

    # Checkpoints.

    def resume(self) -> int:
        """Go on from the newest checkpoint that is whole on every rank; return the next step.

        Call it once, before the first step, on every rank; 0 if there is nothing to resume.
        Weights, optimizer, schedules, generators, position in the data and the memory of healing
        are restored: the run goes on bit by bit as if it had never stopped. A damaged checkpoint is
        passed over and noted.

        Raises:
            ValueError: no ``checkpoint_dir`` was given.
            StateMismatch: the checkpoint is of another model or optimizer; nothing was changed.
        """
        restored = self._checkpoints().load()
        if restored is not None:
            self.memory.resume(restored.step, restored.values)
            self.journal.event("resumed", restored.step, world_size=restored.world_size)
        self._apply_remedies()
        if restored is not None:
            self.contained(self._first_snapshot)
        return self.training.step

    def _apply_remedies(self) -> None:
        """Avoid the step that stopped this run when it was last started."""
        for remedy in self._checkpoints().remedies(self.training.step):
            self.stream.leave_out(remedy.batches)
            if remedy.micro.get("pieces", 0) > self.training.micro_batches:
                self.micro.load_state(remedy.micro)
            done = "its batch is left out" if remedy.batches else "batches are cut finer"
            self.note(
                f"rank {remedy.rank} could not take step {remedy.step} when the run was last "
                f"started ({remedy.error}): {done}"
            )

    @property
    def failed_checkpoints(self) -> int | None:
        """How many saves failed; None without a ``checkpoint_dir``."""
        return None if self.durable is None else self.durable.failures

    def save_checkpoint(self) -> None:
        """Save now, and return when it is on the disk; every rank has to call this.

        Raises:
            ValueError: no ``checkpoint_dir`` was given.
            SaveFailed: nothing was saved; older checkpoints are untouched.
        """
        self._checkpoints().save(self.training.step, self.memory.values)

    def _checkpoints(self) -> Durable:
        if self.durable is None:
            raise ValueError("there is no checkpoint_dir; give one to the Healer")
        return self.durable

    def recompute(
        self,
        train_step: TrainStep,
        batches: Sequence[Any],
        losses: Sequence[Tensor] | None = None,
        *,
        accumulate: int = 1,
    ) -> Recomputation:
        """Compute the last steps again, to distinguish a transient fault from data and model.

        There must be a snapshot of the first of them: see :meth:`request_snapshot`. Every byte of
        the run is put back. Every rank has to call this. The verdict is in the journal too.

        Args:
            train_step: takes a batch and returns its mean loss, as it did.
            batches: of the last steps, in order.
            losses: of these steps, if you kept them: they show which rank it was.
            accumulate: batches per step.

        Raises:
            CannotRecompute: there is no such snapshot, or healing changed the learning rate.
        """
        steps = [batches[i : i + accumulate] for i in range(0, len(batches), accumulate)]
        return recompute(self.training, self.journal, train_step, steps, losses)

    def _open(self, directory: str | Path, group: Any) -> Durable:
        """Open the folder of checkpoints now, because the first save would be too late to fail."""
        try:
            return Durable(
                directory, self.config, self.state, self.stream, self.journal, self._notes, group
            )
        except OSError as error:
            raise OSError(
                error.errno,
                f"checkpoint_dir {str(directory)!r} cannot be made: {error.strerror or error}; "
                "give a folder that this process may write to, or none, to save no checkpoints",
            ) from error

    # What there is to know.

    def metrics(self) -> dict[str, float]:
        """Return the numbers to log; those of the device are ``lag`` steps old."""
        history, latest = self.recovery.history, self.latest
        metrics = {
            "healing/recovery_attempts": float(history.total_attempts),
            "healing/nan_count": float(history.nan_count),
            "healing/snapshot_bytes": float(self.training.ring.held_bytes()),
            "healing/snapshot_disk_bytes": float(self.training.ring.disk_bytes()),
            **self.monitor.watch.metrics(self.monitor.pending),
            **({} if self.probes is None else self.probes.metrics()),
        }
        if latest is not None:
            metrics |= {
                "zclip/raw_grad_norm": latest.norm,
                "zclip/clipped_grad_norm": latest.clipped_norm,
                "zclip/z_score": latest.z,
                "zclip/threshold": latest.threshold,
                "zclip/total_clips": float(latest.clips),
                "zclip/total_skips": float(latest.skips),
            }
        return metrics

    @property
    def last_step(self) -> int:
        """The number of the last step taken, from 0; -1 before the first."""
        return self.training.step - 1

    @property
    def has_others(self) -> bool:
        """Whether there are other ranks to agree with."""
        return self.guarded.ranks.has_others

    @property
    def latest(self) -> Record | None:
        """The newest record that may be read, observed by the detectors or not."""
        return self.monitor.latest

    @property
    def lr_scale(self) -> float:
        """The factor on the learning rate, 1 unless healing lowered it."""
        return self.training.lr_scale

    @property
    def attempts(self) -> int:
        """How often ``run`` tried to take a step, repetitions included."""
        return self.micro.attempts

    @property
    def micro_batches(self) -> int:
        """Into how many pieces to cut batches; :meth:`run` and :meth:`pieces` do it for you."""
        return self.micro.count_for_caller()

    @property
    def history(self) -> Sequence[tuple[int, Diagnosis, Plan]]:
        """Every diagnosis: the step that came next, the diagnosis, and the plan."""
        return self.recovery.log

    @property
    def recoveries(self) -> list[dict[str, Any]]:
        """What was done about trouble, as the postmortem lists it."""
        return self.journal.recoveries

    @property
    def optimizers(self) -> Sequence[ClippedOptimizer]:
        """The optimizers as they are stepped: those that were given, wrapped."""
        return self.guarded.optimizers

    def snapshots(self) -> list[int]:
        """Return the steps that this rank could return to, newest first."""
        self.recovery.catch_up()
        return self.training.ring.good_steps()

    def newest_snapshot(self) -> Snapshot | None:
        """Return the newest good snapshot itself, for drills; None if there is none."""
        self.recovery.catch_up()
        return self.training.ring.newest_good()


def kind_of(value: Any) -> str:
    """Return what a value is, for an error: the name of its type, or that it is a class itself."""
    return f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__


def expect_function(argument: str, value: Any) -> None:
    """Raise a TypeError, which names the argument, if ``value`` cannot be called."""
    if not callable(value):
        raise TypeError(f"{argument}: expected a function, got {kind_of(value)}")


def expect_methods(argument: str, value: Any, *methods: str) -> None:
    """Raise a TypeError, which names the argument, if ``value`` is no object with these methods."""
    if isinstance(value, type) or not all(callable(getattr(value, m, None)) for m in methods):
        names = " and ".join([", ".join(methods[:-1]), methods[-1]])
        raise TypeError(
            f"{argument}: expected an object with the methods {names}, got {kind_of(value)}"
        )


def checked_config(config: HealingConfig | Mapping[str, Any] | None) -> HealingConfig:
    """Return settings; those of a dict are checked.

    Raises:
        ConfigError: a name is unknown or a value is wrong.
        TypeError: neither settings nor a dict.
    """
    if config is None:
        return HealingConfig()
    if isinstance(config, HealingConfig):
        return config
    if isinstance(config, Mapping):
        return HealingConfig.from_dict(config)
    raise TypeError(
        f"config: expected a HealingConfig or a dict, got {type(config).__name__}; "
        "to read a file, use HealingConfig.from_toml(path)"
    )


def checked_optimizers(optimizer: Optimizer | Sequence[Optimizer]) -> list[Optimizer]:
    """Return the optimizers as a list.

    Raises:
        TypeError: one of them is not an optimizer.
        ValueError: there is none, or one is given twice and would be stepped twice.
    """
    if not isinstance(optimizer, Iterable | Optimizer):
        raise TypeError(
            f"optimizer: expected a torch Optimizer or a list of them, got {kind_of(optimizer)}"
        )
    optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
    if not optimizers:
        raise ValueError("optimizer: expected one optimizer or more, got an empty list")
    for i, one in enumerate(optimizers):
        if not isinstance(one, Optimizer):
            raise TypeError(f"optimizer[{i}]: expected a torch Optimizer, got {type(one).__name__}")
        if any(one is other for other in optimizers[:i]):
            raise ValueError(
                f"optimizer[{i}]: expected each optimizer once, got one {type(one).__name__} twice"
            )
    return optimizers
