"""The healing loop: hear what the device said, decide, act, write down.

``step`` and ``batches`` serve a hand-written loop; ``run`` is the whole loop.
"""

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from heal.actions import CannotHeal
from heal.config import HealingConfig
from heal.detect import Detector
from heal.exit_codes import ExitCode
from heal.healer.arguments import (
    checked_config,
    checked_optimizers,
    refuse_config_as_scheduler,
)
from heal.healer.dry_run import DryRunReport, dry_run
from heal.healer.exits import Exits
from heal.healer.lifetime import Lifetime
from heal.healer.parts import Given, Parts
from heal.healer.probing import Probing
from heal.healer.progress import Progress
from heal.healer.resuming import Resuming
from heal.healer.whole_loop import WholeLoop
from heal.integrations.trackers import attach
from heal.journal.environment import describe_machine, describe_training
from heal.journal.journal import Journal
from heal.journal.notes import LEFT_OUT, Notes
from heal.state.scheduler_state import note_rewriting, note_stateless
from heal.step.loss_watch import judgeable
from heal.step.micro_batch import TrainStep
from heal.step.ranks import HostFacts
from heal.treatment import Hook
from heal.verdict import Flag


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
            go with your loop: see :class:`heal.step.schedules.Schedules`.
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
