"""The healing loop: hear what the device said, decide, act, write down.

``step`` and ``batches`` serve a hand-written loop; ``run`` is the whole loop.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from heal.actions import CannotHeal
from heal.attached_probes import AttachedProbes, Probing
from heal.attempts import Attempts
from heal.bookkeeping import Bookkeeping
from heal.buffer_copies import BufferCopies
from heal.cluster.watch import ClusterWatch
from heal.config import HealingConfig
from heal.data import BatchStream
from heal.dry_run import DryRunReport, dry_run
from heal.environment import describe_machine, describe_training
from heal.exit_codes import ExitCode
from heal.exits import Exits
from heal.guarded_step import GuardedStep
from heal.healing_memory import HealingMemory
from heal.integrations.trackers import attach
from heal.journal import Journal
from heal.learning_rate import LearningRates
from heal.lifetime import Lifetime
from heal.listener import Listener
from heal.micro_batch import MicroBatcher, TrainStep
from heal.notes import LEFT_OUT, Notes
from heal.progress import Progress
from heal.ranks import HostFacts
from heal.resuming import Resuming
from heal.run import TorchRun
from heal.scheduler_state import note_stateless
from heal.schedules import Schedules
from heal.training_state import TrainingState
from heal.treatment import Hook, Treatment
from heal.verdict import Flag
from heal.whole_loop import WholeLoop


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
        config: how patient to be, and how hard to push back.
        own_schedulers: those that you step yourself, say once per epoch: saved, never stepped. They
            go with your loop: see :class:`heal.schedules.Schedules`.
        scaler: a GradScaler; ``step`` then steps and updates it.
        run_dir: where the journal goes; without it only the postmortem of a failure is written.
        checkpoint_dir: where checkpoints go, seen by all ranks; without it none are saved. See
            :meth:`resume` and ``checkpoint_interval``.
        rank: of this process; the environment's ``RANK`` if None.
        process_group: the ranks that act alike, where ``torch.distributed`` is in use; all if None.
        trackers: names such as "trackio,tensorboard", or objects; see
            :func:`heal.integrations.trackers.make_trackers`.
        sleep: waits between retries of what the network refused.
        clock: seconds, for the duration of steps.

    Attributes:
        notes: what healing itself could not do; also in the journal.

    Raises:
        TypeError: an argument is not what it should be.
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
        config: HealingConfig | None = None,
        *,
        own_schedulers: Any = None,
        scaler: Any = None,
        run_dir: str | Path | None = None,
        checkpoint_dir: str | Path | None = None,
        rank: int | None = None,
        process_group: Any = None,
        trackers: Any = None,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not isinstance(model, Module):
            raise TypeError(f"model is {type(model).__name__}; wanted a torch Module")
        self.config = config if config is not None else HealingConfig()
        self.model = model
        self.journal = Journal(run_dir, rank)
        self._notes = Notes(self.journal, lambda: self._run.step)
        self.notes = self._notes.texts
        attach(self.journal, trackers, self.config.to_dict(), self._note)
        self._build(
            model, optimizer, (scheduler, own_schedulers), scaler, process_group, sleep, clock
        )
        note_stateless(self._schedules.given, self._note)
        if checkpoint_dir is not None:
            self._save_to(checkpoint_dir, process_group)
        self.exits = Exits(self, self.journal, clock)
        trained = describe_training(model, self._guarded.optimizers, self.config)
        self.journal.event("started", self._run.step, **describe_machine(), **trained)

    def _build(
        self,
        model: Module,
        optimizer: Optimizer | Sequence[Optimizer],
        schedulers: tuple[Any, Any],
        scaler: Any,
        process_group: Any,
        sleep: Callable[[float], None],
        clock: Callable[[], float],
    ) -> None:
        """Put the parts together; each knows those before it."""
        config, note = self.config, self._note
        optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
        named, buffers = model.named_parameters(), BufferCopies(model, note)
        guarded = GuardedStep(optimizers, config, named, scaler, process_group, note, buffers)
        wrapped, extra = guarded.optimizers, {"loss": guarded.watch.state}
        schedules = Schedules(*schedulers, wrapped, config.data == "replay", note)
        state = TrainingState(model, wrapped, schedules.all, guarded.scaler, extra, buffers)
        smallest, grow_steps = config.micro_batch_min, config.micro_batch_grow_steps
        micro = MicroBatcher(model, state.parameters, smallest, grow_steps, None, buffers)
        stream = BatchStream(
            lambda error, epoch, index: self._attempts.loader_failed(error, epoch, index),
            lambda: self._run.step,
            lambda: self._books.begin_epoch(),
            keeps_last=guarded.ranks.has_others,
            note=note,
        )
        run = TorchRun(state, guarded, config, stream, micro, note, sleep)
        treatment = Treatment(run, config, self.journal)
        rates = LearningRates(wrapped, schedules.all, note)
        listener = Listener(run, guarded, treatment, config, rates, clock, note)
        listener.cluster = ClusterWatch(
            model, config, self.journal, listener.report, note, process_group
        )
        self._guarded, self._state, self._micro, self._stream = guarded, state, micro, stream
        self._run, self._treatment, self._listener = run, treatment, listener
        self._schedules = run.schedules = schedules
        self._memory = HealingMemory(run, guarded, listener.watch, treatment)
        self._attempts = Attempts(run, guarded, micro, treatment, stream, self.journal, self)
        self._books = Bookkeeping(run, listener, config, self.journal, self._notes, self)
        self._probes = AttachedProbes(model, guarded.ranks, treatment, self.journal, self._notes)

    # What a hand-written loop calls.

    def batches(self, loader: Any) -> Iterator[Any]:
        """Yield the batches of one epoch; skips bad ones, moves on or rewinds after a rollback."""
        return self._stream.epoch(loader)

    def attempt(self) -> AbstractContextManager[None]:
        """Heal what the body raises, from forward to ``step``, as :meth:`run` does.

        Out of memory, a batch that cannot be used, a network that is away: gradients, buffers and
        generators are put back, the plan is carried out, and the loop goes on with the next batch.
        After OOM cut your batches into :attr:`micro_batches` pieces. What has no cure is raised.

        Example:
            >>> for batch in healer.batches(loader):
            ...     with healer.attempt():
            ...         loss = model(batch)
            ...         loss.backward()
            ...         healer.step(loss)
            ...     optimizer.zero_grad()
        """
        return self._attempts.attempt()

    def step(self, loss: Tensor | float | None = None) -> None:
        """Clip, step the optimizer unless the device refuses, step the scheduler, and listen.

        Call it once per optimizer step, after ``backward``; ``zero_grad`` is yours. Where there are
        other ranks each calls it, with a loss of its own; all refuse, heal or stop alike.

        Args:
            loss: of this step, 0-dim, not scaled by a GradScaler; None if there is none to watch.

        Raises:
            CannotHeal: healing is at its end; its ``exit_code`` says why. The postmortem is
                written.
        """
        if loss is not None and not isinstance(loss, Tensor):
            loss = torch.tensor(float(loss))
        facts = HostFacts()
        try:
            if not self.exits.is_watching:
                self.exits.watch()
            self._schedules.before_step(self._run.step)
            self._books.before_step()
            facts = self._listener.facts()
        except Exception as error:
            self._note(f"{LEFT_OUT}: {error!r}")
        self._attempts.is_stepping = True
        posted = self._take(loss, facts)
        self._schedules.step()
        self._attempts.is_stepping = False
        try:
            self._books.after_step(facts, posted, loss is not None)
        except CannotHeal as halt:
            with self.exits.halting():
                self._attempts.raise_own_error(halt)
                if halt.exit_code == ExitCode.PREEMPTED and self._books.durable is not None:
                    self._books.durable.save_last()
                raise
        except Exception as error:
            self._note(f"{LEFT_OUT}: {error!r}")

    def _take(self, loss: Tensor | None, facts: HostFacts) -> bool:
        try:
            return self._guarded.step(self._run.step, loss, facts)
        except Exception as error:
            if not self._guarded.ranks.has_others:
                self._listener.not_sent(facts)
                raise
            self._attempts.step_failed(error)
            return True

    def on_instability(self, hook: Hook) -> Hook:
        """Have ``hook(diagnosis, plan)`` see every plan; what it returns, if not None, is done.

        With several ranks it must answer alike on each.
        """
        self._treatment.hook = hook
        return hook

    def observe_eval(self, eval_loss: float, train_loss: float | None = None) -> None:
        """Tell of an evaluation, to be warned of overfitting."""
        self._listener.catch_up()
        findings = self._listener.watch.observe_eval(self._run.step, eval_loss, train_loss)
        with self.exits.halting():
            self._treatment.treat(findings)

    def report(self, flag: Flag) -> None:
        """Send news of this host with the record of the next step, so that all ranks act on it.

        Safe in a signal handler and from other threads. What each flag leads to is in
        :class:`heal.detectors.pace.HostNews`.
        """
        self._listener.report(flag)

    def add_source(self, source: Callable[[], Flag]) -> None:
        """Ask ``source`` before every step for flags to send; it must be quick and not wait."""
        self._listener.sources.append(source)

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
            loader: passed over again and again.
            steps: optimizer steps in all, those already done included.
            accumulate: batches per step.
            weigh: how much a piece of a batch counts, if not by its samples; see MicroBatcher.
            progress: show a bar with loss, norm, clips and heals.
            on_step: called after every step with its number.

        Raises:
            CannotHeal: healing is at its end; ``exit_code`` says why.
        """
        self._micro.weigh, self._schedules.caller_repeats = weigh, True
        self.journal.event("goal", self._run.step, steps=steps, accumulate=accumulate)
        with self, Progress(self, steps, progress) as bar:
            self._treatment.tell = bar.tell
            loop = WholeLoop(
                self._run,
                self._stream,
                self._attempts,
                train_step,
                loader,
                steps,
                accumulate,
                bar,
                on_step,
            )
            if not loop.train():
                self._note("the loader has no batches; stopped before all steps were done")
            elif self._books.durable is not None:
                self._books.durable.save_last()

    def dry_run(
        self, train_step: TrainStep, loader: Any, steps: int = 2, *, accumulate: int = 1
    ) -> DryRunReport:
        """Try ``steps`` steps and take them back: all of the model, optimizer, generators, loader.

        What ``train_step`` changes elsewhere, as a teacher that is no part of the model, stays so.
        """
        return dry_run(self._state, self._guarded, train_step, loader, steps, accumulate)

    def _note(self, text: str) -> None:
        self._notes.add(text)
