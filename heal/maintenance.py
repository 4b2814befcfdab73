"""What happens before and after each step: snapshots, checks, mail and metrics, when due."""

import logging
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from heal.actions import CannotHeal, Plan, changes_training
from heal.config import HealingConfig
from heal.diagnose import Diagnosis
from heal.durable import Durable
from heal.journal import LEFT_OUT, LOG, Journal, Notes
from heal.lab.attached_probes import AttachedProbes
from heal.lab.forecast.watch import SILENT
from heal.monitor import Listener
from heal.ranks import HostFacts
from heal.run import TorchRun

if TYPE_CHECKING:
    from heal.healer import Healer


METRICS_INTERVAL = 10  # steps between lines of metrics.jsonl


class Bookkeeping:
    """Keeps the books of a run.

    Args:
        run: whose steps are counted and whose snapshots are taken.
        listener: hears of what the device said.
        config: intervals.
        journal: gets the metrics.
        notes: told of what could not be done.
        probes: run when they are due.
        numbers: returns what goes into a line of metrics.
        is_drawing: returns whether a loop draws batches, so that another draw tells of its end.

    Attributes:
        durable: saves to disk when it is time; None if nothing is saved.
    """

    def __init__(
        self,
        run: TorchRun,
        listener: Listener,
        config: HealingConfig,
        journal: Journal,
        notes: Notes,
        probes: AttachedProbes,
        numbers: Callable[[], dict[str, Any]],
        is_drawing: Callable[[], bool],
    ) -> None:
        self._run = run
        self._listener = listener
        self._lag = config.lag
        self._num_waited = 0
        self._journal = journal
        self._notes = notes
        self._probes = probes
        self._numbers = numbers
        self._is_drawing = is_drawing
        self._wants_snapshot = self._owes_checkpoint = False
        self.durable: Durable | None = None

    def first_snapshot(self) -> None:
        """Take one before anything happens, unless there is one.

        That of step 0 is good at once: nothing has happened that it would have to be proven
        against, and trouble in the first steps would have nowhere to return to.
        """
        if self._run.ring.newest_step() is None:
            self._notes.contain(lambda: self._capture(is_proven=self._run.step == 0))

    def want_snapshot(self) -> None:
        """Take a snapshot at the end of the next step."""
        self._wants_snapshot = True

    def begin_epoch(self) -> None:
        """Take the first snapshot; what was loaded since the healer was made is no step's doing."""
        if self._run.step == 0 and self._run.ring.newest_step() is None:
            self._notes.contain(self._run.buffers.restored)
        self.first_snapshot()

    def before_step(self) -> None:
        """Let copies finish that the step would overtake; before the first, take a snapshot.

        Contained: what the host has to tell must go with the step whatever fails here.
        """
        run = self._run
        self.between_steps(is_drawing=False)
        try:
            run.ring.before_step()
            if run.step == 0:  # what has changed since an epoch began must be in the first one
                if run.has_changed_shape():
                    self._wants_snapshot = True
                self.first_snapshot()
        except CannotHeal:
            raise
        except Exception as error:
            self._notes.add(f"{LEFT_OUT}: {error!r}")

    def between_steps(self, is_drawing: bool) -> None:
        """Do what had to wait until the user's loop was through with the last step."""
        self._notes.contain(lambda: self._run.between_steps(is_drawing))
        if self._owes_checkpoint and self.durable is not None:
            self._owes_checkpoint = False
            self.durable.after_step()

    def after_step(self, facts: HostFacts, posted: bool, has_loss: bool) -> None:
        """Count the step, notice a changed model, do what is due, and hear of the steps before."""
        if posted:
            self._listener.note_step(facts, has_loss)
        else:
            self._listener.not_sent(facts)
        self._run.advance()
        try:
            if self._run.has_changed_shape():
                self._wants_snapshot = True
        except Exception as error:  # the detectors must hear all the same
            self._notes.add(f"{LEFT_OUT}: {error!r}")
        step, watchdog = self._run.step, self._listener.watchdog
        if watchdog is not None:
            watchdog.beat(step)
        if self._is_uneventful(step):
            return
        self._notes.contain(self._listener.check_health)
        self._listener.listen()
        if self._run.step == step:  # else the step was taken back
            self._capture_if_due()
            if self.durable is not None:
                # States that the user updates after ``step`` are in a checkpoint only if it waits.
                self._owes_checkpoint = self._run.has_added_states and self._is_drawing()
                if not self._owes_checkpoint:
                    self.durable.after_step()
            self._probe(step)
        if self._listener.wants_snapshot:
            self._listener.wants_snapshot = False
            self._wants_snapshot = True
        if self._run.step % METRICS_INTERVAL:
            return
        forecast = self._listener.watch.forecast
        if forecast is not None and forecast.is_silent:
            self._notes.add(SILENT)
        if self._journal.is_heard:
            self._journal.metrics(self._run.step - 1, self._numbers())

    def _is_uneventful(self, step: int) -> bool:
        """Whether the books need not be opened: after most steps there is nothing to do.

        Our code has left the caches by then, and looking into every corner of it would take longer
        than a small model takes to be clipped.
        """
        return (
            not self._wants_snapshot
            and not self._run.ring.is_due(step)
            and (step % METRICS_INTERVAL != 0 or not self._journal.is_heard)
            and not (self.durable is not None and self.durable.is_due(step))
            and not self._probes.are_due(step)
            and self._listener.is_idle()
        )

    def _probe(self, step: int) -> None:
        """Run the probes that are due; their time counts for no step, or it would seem slow."""
        if self._probes.are_due(step):
            with self._listener.clock_stopped():
                self._probes.look(step)

    def _capture_if_due(self) -> None:
        """Take a snapshot; if a check or a suspicion is open, once it is settled.

        A new snapshot takes the place of another, which the check or the experiment may need.
        """
        if self._wants_snapshot or self._run.ring.is_due(self._run.step):
            self._wants_snapshot = True
            if self._run.ring.is_suspect:
                return
            if self._listener.is_checking and self._num_waited < self._lag:
                self._num_waited += 1
                return
            self._wants_snapshot = False
            self._num_waited = 0
            if self._run.ring.is_starved:
                self._notes.add(
                    "the last snapshots held NaN or Inf and were dropped: a rollback can only "
                    "return to an older one; look at buffers and optimizer state"
                )
            if not self._run.capture_after_step() and self._run.ring.degraded:
                self._notes.add(self._run.ring.degraded)

    def _capture(self, is_proven: bool = False) -> None:
        if not self._run.capture(is_proven) and self._run.ring.degraded:
            self._notes.add(self._run.ring.degraded)


# The progress bar of ``Healer.run``: loss, norm, clips and heals, as late as the records are.


class _AboveBar(logging.Handler):
    """Prints lines of the log above the bar; as the log does by itself, warnings and errors."""

    def __init__(self, bar: Any) -> None:
        super().__init__(logging.WARNING)
        self._bar = bar

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._bar.write(self.format(record), sys.stderr)
        except Exception:
            self.handleError(record)


class Progress:
    """A tqdm bar, and a line above it for everything that was healed.

    Args:
        healer: whose records are shown.
        steps: the length of the bar.
        shown: nothing is printed if False.
    """

    def __init__(self, healer: "Healer", steps: int, shown: bool) -> None:
        self._healer = healer
        self._steps = steps
        self._shown = shown
        self._heals = 0
        self._bar: Any = None
        self._lines: _AboveBar | None = None

    def __enter__(self) -> "Progress":
        if self._shown:
            from tqdm import tqdm

            begun = self._healer.last_step + 1
            self._bar = tqdm(total=self._steps, initial=begun, unit="step", file=sys.stderr)
            if not LOG.hasHandlers():  # else the lines go where the program wants them
                self._lines = _AboveBar(self._bar)
                LOG.addHandler(self._lines)
        return self

    def __exit__(self, *raised: object) -> None:
        if self._lines is not None:
            LOG.removeHandler(self._lines)
        if self._bar is not None:
            self._bar.close()

    def update(self, step: int) -> None:
        """Show where the run is; after a rollback that is further back."""
        if self._bar is None:
            return
        latest = self._healer.latest
        if latest is not None:
            self._bar.set_postfix(
                loss=f"{latest.loss:.3f}",
                norm=f"{latest.norm:.2f}",
                clips=latest.clips,
                heals=self._heals,
                refresh=False,
            )
        self._bar.update(step - self._bar.n)

    def tell(self, diagnosis: Diagnosis, plan: Plan) -> None:
        """Count what was done; the log has a line for it."""
        self._heals += changes_training(plan)
