"""The healing loop: hear what the device said, decide, act, write down.

``step`` and ``batches`` serve a hand-written loop; ``run`` is the whole loop.
"""

import sys
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from heal import attempts
from heal.actions import CannotHeal, Plan
from heal.attempts import Attempts
from heal.buffers import BufferCopies
from heal.cluster.watch import ClusterWatch
from heal.config import HealingConfig
from heal.data.stream import BatchStream, NoMoreBatches, StepBatches
from heal.detect import Detector, Watch
from heal.diagnose import Diagnosis
from heal.dry_run import DryRunReport, dry_run
from heal.durable import Durable, HealingMemory
from heal.exit_codes import ExitCode
from heal.exits import Exits
from heal.experiment import Experiment
from heal.extra_state import note_rewriting, note_stateless
from heal.guarded_step import GuardedStep, judgeable
from heal.integrations.trackers import attach
from heal.journal import LEFT_OUT, Journal, Notes
from heal.lab.attached_probes import AttachedProbe, AttachedProbes
from heal.lr_schedules import LearningRates, Schedules
from heal.maintenance import Bookkeeping, Progress
from heal.micro_batch import MicroBatcher, TrainStep
from heal.monitor import Listener
from heal.postmortem import describe_machine, describe_training
from heal.ranks import HostFacts
from heal.recompute import Recomputation, recompute
from heal.recovery import Hook, Treatment
from heal.run import TorchRun
from heal.snapshots import Snapshot
from heal.training_state import TrainingState
from heal.trials import BodyTrials, Forward
from heal.verdict import Flag, Record
from zclip import ClippedOptimizer

# What a healer is made of, put together.
#
# Its methods work with these parts, and so do integrations that take the place of its loop. A
# hand-written loop needs none of them.


class Owner(attempts.Owner, Protocol):
    """What is needed of the healer."""

    def numbers(self) -> dict[str, Any]: ...


@dataclass(slots=True)
class Given:
    """What a healer was given to work with.

    Attributes:
        schedulers: those that a step steps, and those that the caller does.
        process_group: the ranks that act alike; all if None.
        sleep: waits between retries of what the network refused.
        clock: seconds, for the duration of steps.
        forward: computes the loss of a batch, for experiments; None if only the loop can.
    """

    model: Module
    optimizers: Sequence[Optimizer]
    schedulers: tuple[Any, Any]
    config: HealingConfig
    scaler: Any
    process_group: Any
    sleep: Callable[[float], None]
    clock: Callable[[], float]
    forward: Forward | None = None


class Parts:
    """All parts of a healer; each knows those before it.

    Args:
        given: by the user.
        journal: where all is written down.
        notes: told of what healing itself could not do.
        owner: the healer.

    Attributes:
        notes: what healing itself could not do.
        guarded: clips and steps, unless the device refuses.
        schedules: the schedulers.
        state: all that training changes.
        micro: cuts batches into pieces that fit into memory.
        stream: the batches, and where in them the run is.
        run: the run as plans change it.
        treatment: makes plans and carries them out.
        listener: hears what the device said.
        experiment: tells damaged weights from other data.
        trials: has the body of a hand-written loop run once more, for experiments.
        memory: what healing knows, for checkpoints.
        attempts: tries to take a step, and heals what that raises.
        probes: looks at the run every so many steps.
        books: what is done before and after each step.
    """

    def __init__(self, given: Given, journal: Journal, notes: Notes, owner: Owner) -> None:
        model, config, note, group = given.model, given.config, notes.add, given.process_group
        buffers = BufferCopies(model, note)
        self.notes = notes
        self.guarded = guarded = GuardedStep(
            given.optimizers, config, model.named_parameters(), given.scaler, group, note, buffers
        )
        wrapped, extra = guarded.optimizers, {"loss": guarded.watch.state}
        self.schedules = Schedules(*given.schedulers, wrapped, config.data == "replay", note)
        self.state = state = TrainingState(
            model, wrapped, self.schedules.all, guarded.scaler, extra, buffers, note
        )
        smallest, grow_steps = config.micro_batch_min, config.micro_batch_grow_steps
        self.micro = MicroBatcher(model, state.parameters, smallest, grow_steps, None, buffers)
        self.stream = BatchStream(
            lambda error, epoch, index: self.attempts.loader_failed(error, epoch, index),
            lambda: self.run.step,
            lambda: self.books.begin_epoch(),
            lambda: self.books.between_steps(is_drawing=True),
            keeps_last=guarded.ranks.has_others,
            note=note,
        )
        self.run = run = TorchRun(
            state, guarded, config, self.stream, self.micro, note, given.sleep
        )
        run.schedules, notes.step = self.schedules, lambda: run.step
        self.treatment = Treatment(run, config, journal, note)
        rates = LearningRates(wrapped, self.schedules.wanted, note)
        watch = Watch(config)
        self.experiment = Experiment(
            run,
            state,
            guarded.ranks,
            watch.loss_level,
            watch.held_lr,
            2 * config.loss_spike_patience,
            note,
        )
        self.trials = BodyTrials(self.experiment, guarded, self.schedules, given.forward, note)
        self.listener = Listener(
            run,
            guarded,
            self.treatment,
            config,
            rates,
            watch,
            self.experiment,
            given.clock,
            note,
        )
        self.listener.cluster = ClusterWatch(
            model, config, journal, self.listener.report, note, group
        )
        self.memory = HealingMemory(run, guarded, self.listener, self.treatment)
        self.attempts = Attempts(
            run,
            guarded,
            self.micro,
            self.treatment,
            self.stream,
            journal,
            owner,
            self.experiment,
        )
        self.probes = AttachedProbes(model, guarded.ranks, self.treatment, journal, notes)
        self.books = Bookkeeping(
            run,
            self.listener,
            config,
            journal,
            notes,
            self.probes,
            owner.numbers,
            lambda: self.stream.is_open,
        )


# What a Healer is given, checked before anything is made of it.


def checked_config(config: HealingConfig | Mapping[str, Any] | None) -> HealingConfig:
    """Return settings; plain values are looked through.

    Raises:
        ConfigError: a name is unknown or a value is wrong.
        TypeError: neither settings nor plain values.
    """
    if config is None:
        return HealingConfig()
    if isinstance(config, HealingConfig):
        return config
    if isinstance(config, Mapping):
        return HealingConfig.from_dict(config)
    raise TypeError(f"config is {type(config).__name__}; wanted a HealingConfig or a dict")


def checked_optimizers(optimizer: Optimizer | Sequence[Optimizer]) -> list[Optimizer]:
    """Return the optimizers as a list.

    Raises:
        TypeError: one of them is none.
        ValueError: there is none, or one is given twice and would be stepped twice.
    """
    optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
    if not optimizers:
        raise ValueError("optimizer is an empty list; wanted one optimizer or more")
    for i, one in enumerate(optimizers):
        if not isinstance(one, Optimizer):
            raise TypeError(f"optimizer[{i}] is {type(one).__name__}; wanted a torch Optimizer")
        if any(one is other for other in optimizers[:i]):
            raise ValueError(
                f"optimizer[{i}], {type(one).__name__}, is given twice; wanted each one once"
            )
    return optimizers


def refuse_config_as_scheduler(scheduler: Any) -> None:
    """Find the settings in the wrong place: the third argument is the scheduler.

    Raises:
        TypeError: says where they belong.
    """
    if isinstance(scheduler, HealingConfig):
        raise TypeError(
            "scheduler is a HealingConfig; wanted a scheduler or None there, and the settings as "
            "Healer(model, optimizer, config=...)"
        )


# What a healer knows and tells: numbers to log, what was done, where one could return to.


class Readout:
    """The half of a Healer that only answers."""

    journal: Journal
    parts: Parts

    def metrics(self) -> dict[str, float]:
        """Return the numbers to log; those of the device are ``lag`` steps old."""
        history, listener = self.parts.treatment.history, self.parts.listener
        unheard = listener.unheard
        latest = listener.latest if unheard is None else unheard
        metrics = {
            "healing/recovery_attempts": float(history.total_attempts),
            "healing/nan_count": float(history.nan_count),
            **listener.watch.metrics(unheard),
            **self.parts.probes.metrics(),
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

    def numbers(self) -> dict[str, Any]:
        """Return what a plot needs: the newest record, and the series since the last call."""
        latest = self.latest
        seen = {} if latest is None else {"seen_at": latest.step, "loss": latest.loss}
        series = self.parts.listener.series.take()
        return {**seen, "lr_scale": self.parts.run.lr_scale, **self.metrics(), **series}

    @property
    def last_step(self) -> int:
        """The number of the last step taken, from 0; -1 before the first."""
        return self.parts.run.step - 1

    @property
    def is_in_loop(self) -> bool:
        """Whether a loop over :meth:`batches` is under way."""
        return self.parts.stream.is_open

    @property
    def left_loop_early(self) -> bool:
        """Whether the newest loop over :meth:`batches` was left before its end, or is not over."""
        return self.parts.stream.was_left

    @property
    def has_others(self) -> bool:
        """Whether there are other ranks to agree with."""
        return self.parts.guarded.ranks.has_others

    @property
    def latest(self) -> Record | None:
        """The newest record that may be read, a calm one also before the detectors hear of it."""
        return self.parts.listener.latest

    @property
    def lr_scale(self) -> float:
        """The factor on the learning rate, 1 unless healing lowered it."""
        return self.parts.run.lr_scale

    @property
    def attempts(self) -> int:
        """How often ``run`` tried to take a step, those that were repeated included."""
        return self.parts.micro.attempts

    @property
    def micro_batches(self) -> int:
        """Into how many pieces to cut batches; :meth:`run` and :meth:`pieces` do it for you."""
        return self.parts.micro.count_for_caller()

    @property
    def history(self) -> Sequence[tuple[int, Diagnosis, Plan]]:
        """Every diagnosis: the step that came next, what it was, and what was done."""
        return self.parts.treatment.log

    @property
    def recoveries(self) -> list[dict[str, Any]]:
        """What was done about trouble, as the postmortem lists it."""
        return self.journal.recoveries

    @property
    def optimizers(self) -> Sequence[ClippedOptimizer]:
        """The optimizers as they are stepped: those that were given, wrapped."""
        return self.parts.guarded.optimizers

    def snapshots(self) -> list[int]:
        """Return the steps that this rank could return to, newest first."""
        self.parts.listener.catch_up()
        return self.parts.run.ring.good_steps()

    def newest_snapshot(self) -> Snapshot | None:
        """Return the newest good snapshot itself, for drills; None if there is none."""
        self.parts.listener.catch_up()
        return self.parts.run.ring.newest_good()


# From the first step to the last word: entering, leaving, closing, and being forgotten.


Entered = TypeVar("Entered", bound="Lifetime")


class Lifetime(Readout):
    """The part of a Healer that begins and ends."""

    exits: Exits
    journal: Journal

    def close(self, error: BaseException | None = None) -> None:
        """Hear the last records and write the postmortem; ``run`` and ``with`` do it for you."""
        if self.parts.listener.cluster is not None:
            self.parts.listener.cluster.stop()
        self.parts.trials.close()
        self.exits.close(error)

    def __enter__(self: Entered) -> Entered:
        self.exits.catch_signals()
        if self.parts.listener.cluster is not None:
            self.parts.listener.cluster.start(self.exits.leaving)
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        halt = self.exits.late_stop() if error is None else None
        if halt is None:
            self.close(error)
            return
        self.exits.draft(halt)
        if self.parts.books.durable is not None:
            # Other ranks are past saving: what this one saved last has to do.
            halt = self.parts.books.durable.saved_before(halt, may_save=not self.has_others)
        self.close(halt)
        raise halt

    def __del__(self) -> None:
        exits = vars(self).get("exits")  # none where the arguments were refused
        if exits is not None:
            exits.collected(self)

    def hear_the_rest(self, hurries: bool = False) -> None:
        """Read the last records, when no step is to come that a plan could serve.

        Args:
            hurries: the run ends by an error, perhaps because a rank died: do not wait for others
                to finish a save.
        """
        if self.parts.books.durable is not None:
            if hurries:
                self.parts.books.durable.store.hurry()
            self.parts.notes.contain(self.parts.books.durable.finish)
        self.parts.notes.contain(self.parts.listener.hear_the_rest)
        if len(self.parts.listener.series):
            self.journal.metrics(self.last_step, self.parts.listener.series.take())


# Probes of the user's own, run by the healer every so many steps.


class Probing:
    """The part of a Healer that takes probes."""

    parts: Parts

    def add_probe(
        self,
        name: str,
        look: Callable[[], Any],
        *,
        every: int,
        alarm: Callable[[Any], bool] | None = None,
    ) -> None:
        """Run ``look()`` after every ``every``-th step, write its numbers down, and heed an alarm.

        The numbers are an event ``probe`` of the journal and entries ``probe/<name>`` of
        :meth:`metrics`. Generators, buffers and modes are put back, so that training goes on bit
        by bit as without; weights and gradients are the probe's to leave alone, as those of
        :mod:`heal.lab.probes` do. The step waits for it, and its time counts for no step. One that
        raises is noted once and not run again. With several ranks each adds the same probes.

        Args:
            name: that no other probe has.
            look: returns a number, a mapping or dataclass of numbers, or None if there is nothing
                to tell; what is no number in these is left out.
            every: steps between looks.
            alarm: given what was found, tells whether somebody should know. That is an alert
                ``probe_alarm``, told when it comes on; what ``on_instability`` makes of it is
                yours, by itself it changes nothing.

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
        self.parts.probes.add(AttachedProbe(name, look, every, alarm))


# The part of a healer that outlives the process, and looks back: checkpoints and recomputation.


class Resuming:
    """The half of a Healer that saves, resumes and computes again."""

    config: HealingConfig
    journal: Journal
    parts: Parts

    def resume(self) -> int:
        """Go on from the newest checkpoint that is whole on every rank; return the next step.

        Call it once, before the first step, on every rank; 0 if there is nothing to resume.
        Weights, optimizer, schedules, generators, position in the data and what healing remembers
        are as they were: the run goes on bit by bit as if it had never stopped. A damaged
        checkpoint is passed over and noted.

        Raises:
            ValueError: no ``checkpoint_dir`` was given.
            StateMismatch: the checkpoint is of another model or optimizer; nothing was changed.
        """
        step = self._checkpoints().resume()
        if step:
            self.parts.books.first_snapshot()
        return step

    @property
    def failed_checkpoints(self) -> int | None:
        """How many saves failed; None without a ``checkpoint_dir``."""
        durable = self.parts.books.durable
        return None if durable is None else durable.failures

    def save_checkpoint(self) -> None:
        """Save now, and return when it is on the disk; every rank has to call this.

        Raises:
            ValueError: no ``checkpoint_dir`` was given.
            SaveFailed: nothing was saved; what was saved before is untouched.
        """
        self._checkpoints().save()

    def _checkpoints(self) -> Durable:
        if self.parts.books.durable is None:
            raise ValueError("there is no checkpoint_dir; give one to the Healer")
        return self.parts.books.durable

    def recompute(
        self,
        train_step: TrainStep,
        batches: Sequence[Any],
        losses: Sequence[Tensor] | None = None,
        *,
        accumulate: int = 1,
    ) -> Recomputation:
        """Compute the last steps again, and tell a passing fault from data and model.

        There must be a snapshot of the first of them: see :meth:`request_snapshot`. The run itself
        computes, and every byte is put back. Every rank has to call this. The verdict is in the
        journal too.

        Args:
            train_step: takes a batch and returns its mean loss, as it did.
            batches: of the last steps, in order.
            losses: of these steps, if they were kept: they tell which rank it was.
            accumulate: batches per step.

        Raises:
            CannotRecompute: there is no such snapshot, or healing changed the learning rate.
        """
        steps = [batches[i : i + accumulate] for i in range(0, len(batches), accumulate)]
        parts = self.parts
        computed = parts.state, parts.guarded, parts.micro, parts.run, parts.schedules.stepped
        return recompute(*computed, self.journal, train_step, steps, losses)

    def _save_to(self, directory: str | Path, group: Any) -> None:
        """Save to a folder from now on.

        Raises:
            OSError: it cannot be made. At once, for nothing is trained yet that could be lost; a
                run whose every save will fail would be found out too late.
        """
        try:
            durable = Durable(
                directory,
                self.config,
                self.parts.state,
                self.parts.run,
                self.parts.stream,
                self.parts.memory,
                self.journal,
                self.parts.notes,
                group,
            )
        except OSError as error:
            raise OSError(
                error.errno,
                f"checkpoint_dir {str(directory)!r} cannot be made: {error.strerror or error}; "
                "give a folder that this process may write to, or none, to save no checkpoints",
            ) from error
        self.parts.books.durable = self.parts.run.durable = self.parts.attempts.durable = durable


# The whole loop: epochs, accumulation, attempts and the progress bar.


@dataclass(frozen=True, slots=True)
class WholeLoop:
    """Trains until so many steps are done, over as many epochs as that takes."""

    run: TorchRun
    stream: BatchStream
    attempts: Attempts
    train_step: TrainStep
    loader: Any
    steps: int
    accumulate: int
    bar: Progress
    on_step: Callable[[int], None] | None

    def train(self) -> str | None:
        """Train to the end; return why not all steps could be done, None if they were."""
        with closing(self._all_epochs()) as source:
            while self.run.step < self.steps:
                try:
                    self._step(StepBatches(source, self.accumulate))
                except NoMoreBatches:
                    return self._shortfall()
        return None

    def _shortfall(self) -> str:
        done = f"{self.run.step} of {self.steps} steps were done"
        if not self.stream.ordinal:
            return f"the loader has no batches; {done}"
        return (
            f"the loader gave {self.stream.ordinal} batches and then none; {done}. Iterables that "
            "can be passed over once, such as generators, end a run with their first epoch: wanted "
            "a loader that begins anew, or fewer steps"
        )

    def _step(self, batches: StepBatches) -> None:
        before = self.run.step
        if self.attempts.take_step(self.train_step, batches):
            self.bar.update(self.run.step)
            if self.on_step is not None and self.run.step > before:  # else it was taken back
                self.on_step(self.run.step - 1)

    def _all_epochs(self) -> Generator[Any, None, None]:
        """Yield batches without end, unless an epoch has none: a step may begin in one epoch."""
        before = -1
        while self.stream.ordinal != before:
            before = self.stream.ordinal
            yield from self.stream.epoch(self.loader, tells_epoch=True)


class Healer(Resuming, Lifetime, Probing):
    """Watches a training run, and heals it.

    A healthy run is bit by bit what it would be without (clipping apart, see ``zclip_enabled``),
    and nothing waits for the device. The optimizer object that was given goes on working:
    gradients, state and parameter groups are shared.

    Args:
        model: the module that is trained.
        optimizer: one, or several that step together; best built with ``fused=True``.
        scheduler: one, several or None: stepped by ``step``, once per step, be it refused or not.
            A ReduceLROnPlateau is left to you, who have its metric.
        config: how patient to be, and how hard to push back; a dict is read by
            :meth:`HealingConfig.from_dict`.
        own_schedulers: those that you step yourself, say once per epoch: saved, never stepped. They
            go with your loop: see :class:`heal.lr_schedules.Schedules`.
        scaler: a GradScaler; ``step`` then steps and updates it.
        run_dir: where the journal goes; without it only the postmortem of a failure is written.
        checkpoint_dir: where checkpoints go, seen by all ranks; without it none are saved. See
            :meth:`resume` and ``checkpoint_interval``.
        rank: of this process; the environment's ``RANK`` if None.
        process_group: the ranks that act alike, where ``torch.distributed`` is in use; all if None.
        trackers: names such as "trackio,tensorboard", or objects; see
            :func:`heal.integrations.trackers.make_trackers`.
        forward: computes the loss of a batch without a backward pass. Experiments use it to tell
            damaged weights from other data; without it they let the body of your loop over
            :meth:`batches` run once more. Give it if that body does what must not be done twice.
        sleep: waits between retries of what the network refused.
        clock: seconds, for the duration of steps.

    Attributes:
        notes: what healing itself could not do; also in the journal.
        parts: what it is made of, for integrations that take the place of its loop.

    Raises:
        TypeError: an argument is not what it should be.
        ValueError: there is no optimizer, one is given twice, or a setting is wrong.
        OSError: ``checkpoint_dir`` cannot be made; a ``run_dir`` that cannot is only told of.

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
            raise TypeError(f"model is {type(model).__name__}; wanted a torch Module")
        refuse_config_as_scheduler(scheduler)
        self.config = checked_config(config)
        optimizers = checked_optimizers(optimizer)
        self.model = model
        self.journal = Journal(run_dir, rank)
        notes = Notes(self.journal)
        self.notes = notes.texts
        attach(self.journal, trackers, self.config.to_dict(), notes.add)
        schedulers = scheduler, own_schedulers
        given = Given(
            model,
            optimizers,
            schedulers,
            self.config,
            scaler,
            process_group,
            sleep,
            clock,
            forward,
        )
        self.parts = Parts(given, self.journal, notes, self)
        note_stateless(self.parts.schedules.given, notes.add)
        note_rewriting(optimizers, notes.add)
        if checkpoint_dir is not None:
            self._save_to(checkpoint_dir, process_group)
        self.exits = Exits(self, self.journal, clock)
        trained = describe_training(model, self.parts.guarded.optimizers, self.config)
        self.journal.event("started", self.parts.run.step, **describe_machine(), **trained)

    # What a hand-written loop calls.

    def batches(self, loader: Any) -> Iterator[Any]:
        """Yield the batches of one epoch; skips bad ones, moves on or rewinds after a rollback.

        For training only, and one loop at a time: a loader for evaluation is iterated by itself.
        """
        return self.parts.trials.batches(self.parts.stream.epoch(loader))

    def attempt(self) -> AbstractContextManager[None]:
        """Heal what the body raises, from forward to ``step``, as :meth:`run` does.

        Out of memory, a batch that cannot be used, a network that is away: gradients, buffers and
        generators are put back, the plan is carried out, and the loop goes on with the next batch.
        Out of memory is healed by smaller pieces, so the loop has to ask for them. Without that the
        run halts when recomputing activations does not help either. What has no cure is raised.

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
        return self._attempt()

    @contextmanager
    def _attempt(self) -> Iterator[None]:
        trials = self.parts.trials
        with self.parts.attempts.attempt():
            try:
                yield
            except CannotHeal:
                raise
            except Exception:
                if not trials.is_open:
                    raise
                trials.abandon()  # an experiment only: the same batch comes again, for real

    def pieces(self, batch: Any) -> list[tuple[Any, float]]:
        """Cut a batch into pieces that fit into memory, with the share of each in the mean loss.

        One piece with the share 1 until memory runs out in :meth:`attempt`. Add up the gradients of
        ``share * loss``, then call :meth:`step` once: the gradient is that of the whole batch.
        """
        return self.parts.micro.pieces_of(batch)

    def step(self, loss: Tensor | float | None = None) -> None:
        """Clip, step the optimizer unless the device refuses, step the scheduler, and listen.

        Call it once per optimizer step, after ``backward``; ``zero_grad`` is yours. Where there are
        other ranks each calls it, with a loss of its own; all refuse, heal or stop alike.

        Args:
            loss: of this step, 0-dim, not scaled by a GradScaler; None if there is none to watch.

        Raises:
            TypeError: the loss is neither a number nor a tensor.
            CannotHeal: healing is at its end; its ``exit_code`` says why. The postmortem is
                written.
        """
        parts, facts = self.parts, HostFacts()
        if loss is not None:
            loss = judgeable(loss, parts.notes.add)
        if parts.trials.is_open:  # an experiment: the body ran with old weights, nothing is taken
            parts.trials.finish(loss)
            return
        books, attempts = parts.books, parts.attempts
        try:
            if not self.exits.is_watching:
                self.exits.watch()
            parts.schedules.before_step(parts.run.step)
            books.before_step()
            facts = parts.listener.facts()
            parts.run.apply_lr_limit()
        except Exception as error:
            parts.notes.add(f"{LEFT_OUT}: {error!r}")
        attempts.is_stepping = True
        posted = self._take(loss, facts)
        parts.schedules.step()
        attempts.is_stepping = False
        try:
            books.after_step(facts, posted, loss is not None)
        except CannotHeal as halt:
            with self.exits.halting():
                halt = attempts.explained(halt)
                if halt.exit_code == ExitCode.PREEMPTED and books.durable is not None:
                    self.exits.draft(halt)
                    raise books.durable.saved_before(halt) from None
                raise halt from halt.__cause__
        except Exception as error:
            parts.notes.add(f"{LEFT_OUT}: {error!r}")

    def _take(self, loss: Tensor | None, facts: HostFacts) -> bool:
        parts = self.parts
        try:
            return parts.guarded.step(parts.run.step, loss, facts)
        except Exception as error:
            if not parts.guarded.ranks.has_others:
                parts.listener.not_sent(facts)
                raise
            parts.attempts.step_failed(error)
            return True

    def on_instability(self, hook: Hook) -> Hook:
        """Have ``hook(diagnosis, plan)`` see every plan; what it returns, if not None, is done.

        With several ranks it must answer alike on each. A halt because a limit is reached (exit
        codes 41 and 43 to 46) is shown to it and cannot be replaced: healing always ends. What was
        raised and gets a plan without a cure costs the batch, ``max_consecutive_data_errors`` times
        in a row at most. If it throws, or returns what is no plan (or one with NaN in it), the plan
        is kept and :attr:`notes` says so.
        """
        self.parts.treatment.hook = hook
        return hook

    def add_detector(self, name: str, detector: Detector) -> None:
        """Have ``detector.observe(record)`` see every record from now on.

        What it returns is treated like a finding of ours; one with ``wants_proof`` is settled by an
        experiment first. Its state is saved in snapshots and checkpoints under ``name``.

        Raises:
            ValueError: there is a detector of this name.
        """
        detectors = self.parts.listener.watch.detectors
        if name in detectors:
            taken = ", ".join(detectors)
            raise ValueError(
                f"detector name: expected one that is not taken ({taken}), got {name!r}"
            )
        detectors[name] = detector

    def expect_change(self, reason: str) -> None:
        """Say that something was changed on purpose, so that it is not taken for trouble.

        Call it right after you reset the optimizer, replace a head, insert a layer, change the
        loss, the task or the learning rate by hand. What loss, gradients, weights and learning
        rate are from now on counts as usual, a suspicion that is being looked into is dropped, and
        a snapshot of the new state is taken at the end of the next step. Every rank has to call it.

        Args:
            reason: what was changed, for the journal.

        Example:
            >>> model.head = torch.nn.Linear(64, 20)
            >>> optimizer.add_param_group({"params": model.head.parameters()})
            >>> healer.expect_change("new head for 20 classes")
        """
        parts = self.parts
        parts.listener.catch_up()
        parts.experiment.clear()
        parts.listener.watch.start_over()
        parts.run.ring.note_settled()
        parts.books.want_snapshot()
        self.journal.event("expected_change", parts.run.step, reason=str(reason))

    def observe_eval(self, eval_loss: float, train_loss: float | None = None) -> None:
        """Tell of an evaluation, to be warned of overfitting."""
        self.parts.listener.catch_up()
        watch, step = self.parts.listener.watch, self.parts.run.step
        findings = watch.observe_eval(step, eval_loss, train_loss)
        with self.exits.halting():
            self.parts.treatment.treat(findings)

    def add_state(self, name: str, save: Callable[[], Any], load: Callable[[Any], None]) -> None:
        """Have rollbacks and checkpoints hold a state that is outside of model and optimizer.

        A moving average of the weights, a reference model, a replay buffer: what is not added stays
        as it is in a rollback. Call this before the first step. A state that the loop updates after
        :meth:`step` is exact too: it is saved, and given back, before the next batch is drawn.

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
        self.parts.state.added.add(name, save, load)

    def report(self, flag: Flag) -> None:
        """Send news of this host with the record of the next step, so that all ranks act on it.

        Safe in a signal handler and from other threads. What each flag leads to is in
        :class:`heal.detectors.pace.HostNews`.
        """
        self.parts.listener.report(flag)

    def add_source(self, source: Callable[[], Flag]) -> None:
        """Ask ``source`` before every step for flags to send; it must be quick and not wait."""
        self.parts.listener.sources.append(source)

    def request_stop(self) -> None:
        """Stop all ranks at the end of a coming step, the same one, as after SIGTERM."""
        self.report(Flag.PREEMPTED)

    def request_snapshot(self) -> None:
        """Take a snapshot at the end of a coming step, on all ranks at the same one."""
        self.report(Flag.SNAPSHOT_WANTED)

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
            loader: passed over again and again; its samplers and dataset are told of each new epoch
                by their ``set_epoch``, unless somebody else does. If nothing comes any more, as
                from a generator in a second epoch, the run ends early, and a note and standard
                error say so.
            steps: optimizer steps in all, those already done included.
            accumulate: batches per step.
            weigh: how much a piece of a batch counts, if not by its samples; see MicroBatcher.
            progress: show a bar with loss, norm, clips and heals.
            on_step: called with its number after every step that was not taken back.

        Raises:
            CannotHeal: healing is at its end; ``exit_code`` says why.
        """
        parts = self.parts
        parts.micro.weigh, parts.schedules.caller_repeats = weigh, True
        self.journal.event("goal", parts.run.step, steps=steps, accumulate=accumulate)
        with self, Progress(self, steps, progress) as bar:
            parts.treatment.tell = bar.tell
            loop = WholeLoop(
                parts.run,
                parts.stream,
                parts.attempts,
                train_step,
                loader,
                steps,
                accumulate,
                bar,
                on_step,
            )
            shortfall = loop.train()
            if shortfall is not None:
                parts.notes.add(shortfall)
                print(f"heal: {shortfall}", file=sys.stderr)
            elif parts.books.durable is not None:
                parts.books.durable.save_last()

    def dry_run(
        self, train_step: TrainStep, loader: Any, steps: int = 2, *, accumulate: int = 1
    ) -> DryRunReport:
        """Try ``steps`` steps and take them back: all of the model, optimizer, generators, loader.

        What ``train_step`` changes elsewhere, as a teacher that is no part of the model, stays so.

        Raises:
            ValueError: ``steps`` or ``accumulate`` is less than 1: nothing would be tried.
        """
        return dry_run(self.parts.state, self.parts.guarded, train_step, loader, steps, accumulate)
