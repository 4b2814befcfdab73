"""The healing loop: hear what the device said, decide, act, write down.

``step`` and ``batches`` serve a hand-written loop; ``run`` is the whole loop.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from heal.actions import CannotHeal, Plan
from heal.attempts import Attempts
from heal.config import HealingConfig
from heal.data import BatchStream
from heal.diagnose import Diagnosis
from heal.dry_run import DryRunReport, dry_run
from heal.exits import Exits
from heal.guarded_step import GuardedStep
from heal.integrations.trackers import attach
from heal.journal import Journal
from heal.listener import Listener
from heal.micro_batch import MicroBatcher, TrainStep
from heal.progress import Progress
from heal.run import TorchRun
from heal.snapshots import Snapshot
from heal.training_state import TrainingState
from heal.treatment import Hook, Treatment
from heal.verdict import Record
from zclip import ClippedOptimizer

METRICS_INTERVAL = 10  # steps between lines of metrics.jsonl
MAX_NOTES = 100  # different things that may go wrong with healing itself before we fall silent


class Healer:
    """Watches a training run, and heals it.

    A healthy run is bit by bit what it would be without (clipping apart, see ``zclip_enabled``),
    and nothing waits for the device. The optimizer object that was given goes on working:
    gradients, state and parameter groups are shared. ``scheduler`` is stepped once per step, be
    it refused or not; a ReduceLROnPlateau is left to the caller, who has its metric.

    Args:
        model: the module that is trained.
        optimizer: one, or several that step together; best built with ``fused=True``.
        scheduler: one, several or None.
        config: how patient to be, and how hard to push back.
        scaler: a GradScaler; ``step`` then steps and updates it.
        run_dir: where the journal goes; without it only the postmortem of a failure is written.
        rank: of this process; the environment's ``RANK`` if None.
        trackers: names such as "trackio,tensorboard", or objects; see
            :func:`heal.integrations.trackers.make_trackers`.
        sleep: waits between retries of what the network refused.
        clock: seconds, for the duration of steps.

    Attributes:
        notes: what healing itself could not do; also in the journal.

    Raises:
        TypeError: an argument is not what it should be.

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
        scaler: Any = None,
        run_dir: str | Path | None = None,
        rank: int | None = None,
        trackers: Any = None,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not isinstance(model, Module):
            raise TypeError(f"model is {type(model).__name__}; wanted a torch Module")
        self.config = config if config is not None else HealingConfig()
        self.model = model
        optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
        self._schedulers = _listed(scheduler)
        self.journal = Journal(run_dir, rank)
        attach(self.journal, trackers, self.config.to_dict(), lambda text: self._note(text))
        self._guarded = GuardedStep(optimizers, self.config, model.named_parameters(), scaler)
        state = TrainingState(
            model,
            self._guarded.optimizers,
            self._schedulers,
            self._guarded.scaler,
            {"loss": self._guarded.watch.state},
        )
        micro = MicroBatcher(
            model,
            state.parameters,
            self.config.micro_batch_min,
            self.config.micro_batch_grow_steps,
        )
        self._stream = BatchStream(
            self._loader_failed, lambda: self._run.step, self._first_snapshot
        )
        self._micro = micro
        self._run = TorchRun(
            state, self._guarded, self.config, self._stream, micro, self._note, sleep
        )
        self._state = state
        self._treatment = Treatment(self._run, self.config, self.journal)
        names = {id(p): name for name, p in model.named_parameters()}
        self._listener = Listener(
            self._run, self._guarded, self._treatment, self.config, names, clock
        )
        self._wants_snapshot = False
        self.notes: list[str] = []
        self.exits = Exits(self, self.journal, clock)
        if not self._guarded.watches_loss:
            self._note("several ranks: each has a loss of its own, so that none is judged")
        self._attempts = Attempts(self._run, self._guarded, micro, self._treatment, self)

    # What a hand-written loop calls.

    def batches(self, loader: Any) -> Iterator[Any]:
        """Yield the batches of one epoch; skips bad ones, moves on or rewinds after a rollback."""
        return self._stream.epoch(loader)

    def step(self, loss: Tensor | float | None = None) -> None:
        """Clip, step the optimizer unless the device refuses, step the scheduler, and listen.

        Call it once per optimizer step, after ``backward``; ``zero_grad`` is yours.

        Args:
            loss: of this step, 0-dim, not scaled by a GradScaler; None if there is none to watch.

        Raises:
            CannotHeal: healing is at its end; its ``exit_code`` says why. The postmortem is
                written.
        """
        if loss is not None and not isinstance(loss, Tensor):
            loss = torch.tensor(float(loss))
        self._contained(self._before_step)
        posted = self._guarded.step(self._run.step, loss)
        for scheduler in self._schedulers:
            if not isinstance(scheduler, ReduceLROnPlateau):
                scheduler.step()
        with self.exits.halting():
            judged = loss is not None and self._guarded.watches_loss
            self._contained(lambda: self._after_step(posted, judged))

    def on_instability(self, hook: Hook) -> Hook:
        """Have ``hook(diagnosis, plan)`` see every plan; what it returns, if not None, is done."""
        self._treatment.hook = hook
        return hook

    def observe_eval(self, eval_loss: float, train_loss: float | None = None) -> None:
        """Tell of an evaluation, to be warned of overfitting."""
        findings = self._listener.watch.observe_eval(self._run.step, eval_loss, train_loss)
        with self.exits.halting():
            self._treatment.treat(findings)

    def metrics(self) -> dict[str, float]:
        """Return the numbers to log; those of the device are ``lag`` steps old."""
        history, latest = self._treatment.history, self._listener.latest
        metrics = {
            "healing/recovery_attempts": float(history.total_attempts),
            "healing/nan_count": float(history.nan_count),
            **self._listener.watch.metrics(),
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

    def _numbers(self) -> dict[str, float]:
        """What a plot of the run needs, from the newest record."""
        latest = self.latest
        seen = {} if latest is None else {"seen_at": latest.step, "loss": latest.loss}
        return {**seen, "lr_scale": self._run.lr_scale, **self.metrics()}

    @property
    def last_step(self) -> int:
        """The number of the last step taken, from 0; -1 before the first."""
        return self._run.step - 1

    @property
    def latest(self) -> Record | None:
        """The newest record that was heard."""
        return self._listener.latest

    @property
    def lr_scale(self) -> float:
        """The factor on the learning rate, 1 unless healing lowered it."""
        return self._run.lr_scale

    @property
    def attempts(self) -> int:
        """How often ``run`` tried to take a step, those that were repeated included."""
        return self._micro.attempts

    @property
    def history(self) -> Sequence[tuple[int, Diagnosis, Plan]]:
        """Every diagnosis: the step that came next, what it was, and what was done."""
        return self._treatment.log

    @property
    def recoveries(self) -> list[dict[str, Any]]:
        """What was done about trouble, as the postmortem lists it."""
        return self.journal.recoveries

    @property
    def optimizers(self) -> Sequence[ClippedOptimizer]:
        """The optimizers as they are stepped: those that were given, wrapped."""
        return self._guarded.optimizers

    def snapshots(self) -> list[int]:
        """Return the steps that could be returned to, newest first."""
        return self._run.snapshots()

    def newest_snapshot(self) -> Snapshot | None:
        """Return the newest good snapshot itself, for drills; None if there is none."""
        return self._run.ring.newest_good()

    def request_stop(self) -> None:
        """Stop at the end of a coming step, as after SIGTERM; safe in a signal handler."""
        self._listener.request_stop()

    def close(self, error: BaseException | None = None) -> None:
        """Hear the last records and write the postmortem; ``run`` and ``with`` do it for you."""
        self.exits.close(error)

    def __enter__(self) -> "Healer":
        self.exits.catch_signals()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        self.close(error)

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
        self._micro.weigh = weigh
        with self, Progress(self, steps, progress) as bar:
            self._treatment.tell = bar.tell
            waiting: list[Any] = []  # batches of a step that an epoch ended in go into the next
            while self._run.step < steps:
                before = self._stream.ordinal
                self._run_epoch(train_step, loader, steps, accumulate, waiting, bar, on_step)
                if self._stream.ordinal == before:
                    self._note("the loader has no batches; stopped before all steps were done")
                    return

    def dry_run(
        self, train_step: TrainStep, loader: Any, steps: int = 2, *, accumulate: int = 1
    ) -> DryRunReport:
        """Try ``steps`` steps and take them back: weights, optimizer, generators and loader."""
        return dry_run(self._state, self._guarded, train_step, loader, steps, accumulate)

    def _run_epoch(
        self,
        train_step: TrainStep,
        loader: Any,
        steps: int,
        accumulate: int,
        waiting: list[Any],
        bar: Progress,
        on_step: Callable[[int], None] | None,
    ) -> None:
        for batch in self.batches(loader):
            waiting.append(batch)
            if len(waiting) < accumulate:
                continue
            batches = waiting.copy()
            waiting.clear()
            if self._attempts.take_step(train_step, batches):
                bar.update(self._run.step)
                if on_step is not None:
                    on_step(self.last_step)
            if self._run.step >= steps:
                return

    def _loader_failed(self, error: Exception, epoch: int, index: int) -> None:
        self._attempts.treat(error, "data", epoch=epoch, batch=index)

    # Before and after each step.

    def _first_snapshot(self) -> None:
        if self._run.ring.newest_step() is None:
            self._contained(self._capture)

    def _before_step(self) -> None:
        self._run.ring.before_step()
        if self._run.has_changed_shape():
            self._wants_snapshot = True
        if self._run.step == 0:
            self._first_snapshot()

    def _after_step(self, posted: bool, has_loss: bool) -> None:
        if posted:
            self._listener.note_step(has_loss)
        self._run.advance()
        self._listener.check_health()
        if self._wants_snapshot or self._run.step % self.config.snapshot_interval == 0:
            self._wants_snapshot = False
            self._capture()
        self._listener.listen()
        if self._run.step % METRICS_INTERVAL == 0:
            self.journal.metrics(self.last_step, self._numbers())

    def _capture(self) -> None:
        if not self._run.capture() and self._run.ring.degraded:
            self._note(self._run.ring.degraded)

    def hear_the_rest(self) -> None:
        """Read the last records, when no step is to come that a plan could serve."""
        self._contained(self._listener.hear_the_rest)

    def _contained(self, action: Callable[[], None]) -> None:
        """Run our own code. If it fails, training goes on without what it was for, and hears so."""
        try:
            action()
        except CannotHeal:
            raise
        except Exception as error:
            self._note(f"healing failed and was left out: {error!r}")

    def _note(self, text: str) -> None:
        if text not in self.notes and len(self.notes) < MAX_NOTES:
            self.notes.append(text)
            self.journal.event("note", self._run.step, text=text)


def _listed(scheduler: Any) -> list[Any]:
    if scheduler is None:
        return []
    return list(scheduler) if isinstance(scheduler, (list, tuple)) else [scheduler]
