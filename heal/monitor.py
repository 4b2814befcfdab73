"""What the device reported about past steps: polled, decoded, shown to the detectors."""

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from heal.causes import Cause, Finding, Severity
from heal.cluster.watch import ClusterWatch
from heal.cluster.watchdog import HangWatchdog
from heal.config import HealingConfig
from heal.detect import Usual, Watch
from heal.detectors.likelihood import LikelihoodCollapse
from heal.detectors.preference import ChancePlateau, PreferenceInversion
from heal.detectors.rewards import KlBlowUp, RewardCollapse
from heal.experiment import NO_FORWARD, NOT_LEARNING, Answer, Experiment, Settled
from heal.guarded_step import NO_LOSS_SCALE, TOGETHER, GuardedStep
from heal.journal import LEFT_OUT
from heal.lab.forecast.features import CHECK_INTERVAL
from heal.lr_schedules import LearningRates
from heal.ranks import HostFacts
from heal.run import TorchRun
from heal.snapshots import NEVER, is_due, next_due
from heal.verdict import NO_FLAG, Flag, Record
from heal.weight_checks import HealthCheck
from zclip.layout import BLOCKED, CLIPPED, FLAGS, LOSS, LOSS_RATIO, NORM, NUM_VERDICT, SPIKE

# Lets the records of calm steps wait for each other, so that several are heard at once.


FOLLOWED = 1.05  # times per hearing: a leap by a thousand takes 140 steps to become the usual

ORDINARY = (0.0, CLIPPED, SPIKE, CLIPPED | SPIKE)
"""Flags that no detector acts upon: a clip rule that finds a norm out of the ordinary has dealt
with it, and noise as real data has it brings one such step in twenty."""


class Calm:
    """Tells when to hear of steps, by the numbers as they are posted, before they are judged.

    Whatever could be trouble is heard as soon as it may be read: a refused step, any flag but those
    of clipping, a norm, a loss or a learning rate that leaps, news of the host. So a detector that
    needs none of these, such as that of a slow climb, hears of a step ``TOGETHER - 1`` steps later
    at most; and whoever makes a plan or takes a snapshot has all heard that there is.

    After a rollback a new one is made, for what was usual may have been the trouble: until the
    first record is heard, no step is calm.

    Args:
        config: a leap is no more than what a detector may find fault with.
        step: with which it begins.
    """

    NORM_LEAP = 4.0  # times the usual ones
    LR_LEAP = 2.0  # times that which was heard of last
    LOSS_LEAP, LOSS_FALL = 1.5, -1.0  # between these its ratio to its mean may be, see watch_loss_

    def __init__(self, config: HealingConfig, step: int = 0) -> None:
        self._norm_leap = min(self.NORM_LEAP, config.grad_norm_limit)
        self._lr_leap = min(self.LR_LEAP, config.lr_spike_factor)
        self._loss_leap = min(self.LOSS_LEAP, config.loss_spike_factor)
        self._norm = self._lr = 0.0  # posted last
        self._known_norm = self._known_lr = 0.0  # when somebody heard last
        self._highest_norm = 0.0  # that is calm
        self._usual_loss = self._loss_margin = math.nan
        self._heard_at = step
        self._heard_of = self._troubled = step - 1

    def note(self, step: int, row: Sequence[float] | None, facts: HostFacts) -> None:
        """Hear of what was posted; of a row that is not in host memory nothing is known."""
        if row is None:
            self._troubled = step
            return
        self._norm, self._lr = norm, lr = row[NORM], facts.lr
        # By comparisons that are false for NaN, so that it is not calm.
        is_calm = (
            facts.flags is NO_FLAG
            and row[BLOCKED] == 0.0
            and row[FLAGS] in ORDINARY
            and norm <= self._highest_norm
            and self.LOSS_FALL <= row[LOSS_RATIO] <= self._loss_leap
            and not row[LOSS] - self._usual_loss > self._loss_margin
            and (lr <= self._lr_leap * self._known_lr or lr != lr)
        )
        if not is_calm:
            self._troubled = step

    def is_time(self, step: int) -> bool:
        """Return whether to hear now, after ``step`` steps, what has arrived."""
        return self._troubled > self._heard_of or step - self._heard_at >= TOGETHER

    def heard(self, step: int, newest: int, usual: Usual) -> None:
        """Note that all was heard that there was after ``step`` steps, up to that of ``newest``.

        What leapt and stays is followed slowly, so that it is heard of for as long as it may take a
        detector to make up its mind.

        Args:
            step: steps done.
            newest: whose record was the last.
            usual: what to measure the next ones against.
        """
        self._heard_at, self._heard_of = step, max(newest, self._heard_of)
        self._known_norm = _followed(self._known_norm, self._norm, self._norm_leap)
        self._known_lr = _followed(self._known_lr, self._lr, self._lr_leap)
        self._usual_loss, self._loss_margin = usual.loss, usual.loss_margin
        self._highest_norm = self._norm_leap * (usual.norm or self._known_norm)


def _followed(known: float, now: float, leap: float) -> float:
    """Return what to measure the next ones against; what is no number changes nothing."""
    if known > 0.0 and now > leap * known:
        return known * FOLLOWED
    return now if 0.0 <= now < math.inf else known


# Every record between two lines of metrics, so that no spike falls between them.
#
# One line of ``metrics.jsonl`` has all of them as short columns: a write per step would cost more
# than it tells.


MAX_RECORDS = 128  # kept if nobody takes them; more than may come between two lines
DIGITS = 6  # significant ones, enough for any plot

COLUMNS = {
    "step": "step",
    "loss": "loss",
    "norm": "norm",
    "lr": "lr",
    "lr_scale": "lr_scale",
    "micro_batches": "micro_batches",
    "seconds": "own_seconds",
}
"""What may change from step to step, and where a record has it. The rest is told once a line, as it
was at the last record."""


SLOW = ("threshold", "mean", "std")
"""What is told once a line."""


class Series:
    """Collects records until they are taken."""

    def __init__(self) -> None:
        self._records: deque[Record] = deque(maxlen=MAX_RECORDS)

    def __len__(self) -> int:
        return len(self._records)

    def note(self, record: Record) -> None:
        """Keep a record."""
        self._records.append(record)

    def take(self) -> dict[str, Any]:
        """Return what came since the last call, as entries of a line; nothing if nothing came."""
        records = list(self._records)
        self._records.clear()
        if not records:
            return {}
        newest = records[-1]
        series = {name: _column(records, field) for name, field in COLUMNS.items()}
        slow: dict[str, Any] = {name: _short(getattr(newest, name)) for name in SLOW}
        if slow["threshold"] == math.inf:
            slow["threshold"] = None  # no limit yet: nothing to draw
        return {"series": {**series, **slow}}


def _column(records: list[Record], field: str) -> Any:
    """Return the values of a column; one that is the same throughout is told once."""
    values = [_short(getattr(record, field)) for record in records]
    is_same = field != "step" and all(value == values[0] for value in values)
    return values[0] if is_same else values


def _short(value: float) -> float:
    if isinstance(value, int) or not math.isfinite(value):
        return value
    return float(f"{value:.{DIGITS}g}")


WISHES = Flag.PREEMPTED | Flag.SNAPSHOT_WANTED
"""What somebody asked for, whatever becomes of the step it was sent with; sent again if undone."""

NOTHING_KNOWN = HostFacts(), 1.0, True

CLOSE_WATCH = 10  # times as often as usual, weights are checked after a warning


class Seen(NamedTuple):
    """One step that was polled: what the detectors found in its record.

    Attributes:
        step: its number.
        findings: what is known to be wrong; suspicions are left to the experiment.
        is_clean: whether it was taken and nothing was found.
        settled: what an experiment has shown with this step, if anything.
    """

    step: int
    findings: list[Finding]
    is_clean: bool = False
    settled: Settled | None = None


class Monitor:
    """Turns rows of the mailbox into records, and records into findings.

    Args:
        run: its snapshots are promoted by clean steps; a rollback of it clears the mail.
        guarded: whose mailbox is read.
        config: intervals and limits.
        rates: the learning rates, and what the schedules want them to be.
        watch: the detectors.
        experiment: settles what they suspect.
        cluster: looks after other ranks and the hardware.
        reported: flags of this host for the next record; signal handlers and threads append.
        clock: seconds, for the duration of steps.
        note: told of sources that fail.

    Attributes:
        watch: the detectors.
        series: every record since the last line of metrics.
        sources: asked before every step for flags of the host; quick functions that do not wait.
    """

    def __init__(
        self,
        run: TorchRun,
        guarded: GuardedStep,
        config: HealingConfig,
        rates: LearningRates,
        watch: Watch,
        experiment: Experiment,
        cluster: ClusterWatch,
        reported: deque[Flag],
        clock: Callable[[], float],
        note: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.watch = watch
        self._experiment = experiment
        self._wants_check = False
        self._unprovable: set[Cause] = set()  # reported once for lack of a forward pass
        self._latest: Record | None = None
        self.series = Series()
        self.sources: list[Callable[[], Flag]] = []
        self._wants_snapshot = False
        self._callbacks: list[Callable[[Record], None]] = []
        self.cluster = cluster
        self._reported = reported
        self._unheard: dict[int, Flag] = {}  # wishes that were sent with a step, until it is heard
        self._note = note
        self._rates = rates
        self._run = run
        self._guarded = guarded
        self._config = config
        self._health = HealthCheck(
            guarded.optimizers,
            guarded.names,
            guarded.buffers,
            config.lag,
            guarded.ranks,
            waits=self.watch.forecast is not None,
        )
        self._moments: list[tuple[int, int]] | None = None  # as the last step left them
        self._next_look = 0
        self._clock = clock
        self._step_began = clock()
        self._host: dict[int, tuple[HostFacts, float, bool]] = {}
        self._calm = Calm(config)
        run.hold("healing", self.watch.state, self._returned)

    def facts(self) -> HostFacts:
        """Return what the host knows of the step that is about to be taken."""
        if self._moments is not None and self._moments != self._moment_versions():
            self._check_moments(self._run.step)
        now = self._clock()
        seconds, self._step_began = now - self._step_began, now
        lr, scheduled = self._rates.now()
        flags = NO_FLAG
        while self._reported:
            flags |= self._reported.popleft()
        for source in self.sources:
            flags |= self._asked(source)
        return HostFacts(seconds, lr, scheduled, flags, self._run.micro_batches)

    def _moment_versions(self) -> list[tuple[int, int]]:
        """Return which are the first moments and how often each was written, without a wait."""
        firsts = [next(iter(o.inner.state.values()), None) for o in self._guarded.optimizers]
        states = [first for first in firsts if isinstance(first, dict)]
        moments = [m for state in states for m in state.values() if isinstance(m, Tensor)]
        return [(id(m), 0 if m.is_inference() else m._version) for m in moments]

    def _check_moments(self, step: int) -> None:
        """Check the state before ``step``: something other than the optimizer wrote its moments.

        Moments that were lost are back within a few steps. Where such writes are a habit, few lead
        to a check: after one in step n the next is in step 2 n. Other ranks would have to check in
        the same step, and may know of no write: there the regular checks have to do.
        """
        is_allowed = self._config.check_interval > 0 and not self._guarded.ranks.has_others
        if is_allowed and step >= self._next_look:
            self._next_look = 2 * step
            self._health.post(step)

    def take_snapshot_wish(self) -> bool:
        """Return whether a record asked for a snapshot since last asked; alike on every rank."""
        wish, self._wants_snapshot = self._wants_snapshot, False
        return wish

    def add_listener(self, callback: Callable[[Record], None]) -> None:
        """Call ``callback`` with every record that is polled."""
        self._callbacks.append(callback)

    @contextmanager
    def clock_stopped(self) -> Iterator[None]:
        """Leave out of the duration of the next step what the body takes."""
        began = self._clock()
        try:
            yield
        finally:
            self._step_began += self._clock() - began

    def _asked(self, source: Callable[[], Flag]) -> Flag:
        """Contained: what others have reported must be sent whatever this one does."""
        try:
            return Flag(source())
        except Exception as error:
            name = getattr(source, "__qualname__", type(source).__name__)
            self._note(f"the source {name} failed and was not heard: {error!r}")
            return NO_FLAG

    def note_step(self, done: int, facts: HostFacts, posted: bool, has_loss: bool) -> bool:
        """Keep what the host knows of the step just taken until its record arrives.

        Args:
            done: how many steps are done, this one included.
            facts: what the host knows of it.
            posted: whether it has a record.
            has_loss: whether a loss is in it.

        Returns:
            Whether all is calm, so that records may wait for each other.
        """
        self._moments = self._moment_versions()
        watchdog = self.cluster.watchdog
        if watchdog is not None:
            watchdog.beat(done)
        if not posted:
            self.not_sent(facts)
            return not self._calm.is_time(done)
        step, flags = done - 1, facts.flags
        self._host[step] = facts, self._run.lr_scale, has_loss
        if flags is not NO_FLAG and flags & WISHES:
            self._unheard[step] = flags & WISHES
        # Ranks hear of each other by records only, and a forecast counts its lead in steps.
        hurries = self._guarded.ranks.has_others or self.watch.forecast is not None
        self._calm.note(step, None if hurries else self._guarded.posted, facts)
        return not self._calm.is_time(done)

    def not_sent(self, facts: HostFacts) -> None:
        """Keep the news of a step that has no record, as it had no gradients, for the next."""
        if facts.flags:
            self._reported.append(facts.flags)

    def next_due(self, step: int) -> int:
        """Return after which step weights or other ranks are to be looked at, or a trial is on."""
        if self._experiment.is_open or self._wants_check:
            return step + 1
        return min(self._next_check(step), self.cluster.next_due(step))

    @property
    def watchdog(self) -> HangWatchdog | None:
        """Notices a run that hangs, if that is asked for."""
        return self.cluster.watchdog

    def check_health(self) -> None:
        """Have weights and optimizer state measured, if it is time."""
        if self._is_check_due(self._run.step) and not self._guarded.has_stages:
            self._wants_check = False
            self._health.post(self._run.step)

    def _check_interval(self, step: int) -> int:
        interval = self._config.check_interval
        if self.watch.forecast is not None:
            interval = min(interval, CHECK_INTERVAL)
        if step < self._run.close_watch_until:
            interval = math.ceil(interval / CLOSE_WATCH)
        return interval

    def _is_check_due(self, step: int) -> bool:
        interval = self._check_interval(step)
        if interval <= 0:
            return False
        is_dense = self.watch.forecast is None  # it learned from regular checks
        return self._wants_check or is_due(step, interval, is_dense)

    def _next_check(self, step: int) -> int:
        interval = self._check_interval(step)
        return NEVER if interval <= 0 else next_due(step, interval, self.watch.forecast is None)

    @property
    def is_checking(self) -> bool:
        """Whether weights were measured and nobody has heard yet of what was found."""
        return self._health.is_under_way

    def poll(self) -> Iterator[Seen]:
        """Yield all steps that are ``lag`` old, with what the detectors find in their records."""
        records = [self._decode(step, row) for step, row in self._guarded.mailbox.poll()]
        found = self.watch.observe_all(records)
        for error in self.watch.take_errors():
            self._note(f"{LEFT_OUT}: {error!r}")
        for record, findings in zip(records, found, strict=True):
            yield self._seen(record, findings)
        newest = records[-1].step if records else -1
        self._calm.heard(self._run.step, newest, self.watch.usual())

    def _seen(self, record: Record, findings: list[Finding]) -> Seen:
        for callback in self._callbacks:
            self._call(callback, record)
        if record.flags is not NO_FLAG and record.has(Flag.STATE_NONFINITE):
            self._wants_check = True
        settled = self._experiment.observe(record)
        findings = self._without_doubts(findings)
        if settled is not None:
            findings += self._answered(settled)
        is_clean = self._judge_snapshots(record, findings)
        return Seen(record.step, findings, is_clean, settled)

    def _call(self, callback: Callable[[Record], None], record: Record) -> None:
        try:
            callback(record)
        except Exception as error:
            name = getattr(callback, "__qualname__", type(callback).__name__)
            self._note(f"the callback {name} of on_record failed: {error!r}")

    def poll_checks(self) -> Iterator[Seen]:
        """Yield what checks of weights, optimizer state, other ranks and the hardware found."""
        for health in self._health.read(self._run.step):
            findings = self._without_doubts(self.watch.observe_health(health))
            if not is_suspect(findings):
                self._run.ring.note_checked(health.step)
            yield Seen(health.step, findings)
        yield Seen(self._run.step, self.cluster.look(self._run.step))

    def poll_last(self) -> Iterator[Seen]:
        """Yield what the last records show, when no step is to come that a plan could serve."""
        for step, row in self._guarded.mailbox.poll(lag=0):
            (findings,) = self.watch.observe_all([self._decode(step, row)])
            known = [f for f in findings if not f.wants_proof or f.cause.about.is_nonfinite]
            yield Seen(step, known)

    def _without_doubts(self, findings: list[Finding]) -> list[Finding]:
        """Have suspicions looked into, and return the rest: what is known."""
        known = []
        for finding in findings:
            if finding.wants_proof:
                is_asked = self._experiment.ask(finding)
                if is_asked and finding.cause is not Cause.NOT_LEARNING:  # no state is in doubt
                    self._run.ring.note_suspect(finding.bad_step)
                    self._wants_check = True
                if not finding.cause.about.is_nonfinite:
                    continue
                finding = replace(finding, wants_proof=False)  # the step was skipped all the same
            known.append(finding)
        return known

    def _answered(self, settled: Settled) -> list[Finding]:
        """Act on the answer to a suspicion: return what is proven, or take the new level."""
        if settled.answer is Answer.DAMAGED:
            return [settled.finding]
        self._run.ring.note_settled()
        if settled.finding.cause is Cause.NOT_LEARNING:
            is_shown = settled.why is NOT_LEARNING
            return [replace(settled.finding, wants_proof=False)] if is_shown else []
        if settled.answer is Answer.OTHER_DATA:
            self.watch.rebase()
            if settled.finding.cause.about.is_nonfinite:
                self.watch.note_nan_data()
            return []
        found = replace(settled.finding, wants_proof=False)
        if settled.why is not NO_FORWARD:
            return []
        self.watch.rebase()  # the level stays unexplained; later ones are measured against it
        if found.cause in self._unprovable:
            return []
        self._unprovable.add(found.cause)
        self._note(settled.why)
        # Each skipped step was reported already.
        return [] if found.cause.about.is_nonfinite else [found]

    def report(self, flag: Flag) -> None:
        """Send a flag of the host with the record of the next step; safe in a signal handler."""
        self._reported.append(flag)

    def _decode(self, step: int, row: list[float]) -> Record:
        if self._unheard:
            self._unheard.pop(step, None)
        self._latest = record = self._decoded(step, row)
        self._host.pop(step, None)
        self.series.note(record)
        if record.flags is not NO_FLAG and record.has(Flag.SNAPSHOT_WANTED):
            self._wants_snapshot = True
        return record

    @property
    def unheard(self) -> Record | None:
        """The newest record that may be read, while the detectors have not heard of it."""
        waiting = self._guarded.mailbox.peek()
        return None if waiting is None else self._decoded(*waiting)

    @property
    def latest(self) -> Record | None:
        """The newest record that may be read, if calm before the detectors hear of it."""
        unheard = self.unheard
        return self._latest if unheard is None else unheard

    def _decoded(self, step: int, row: list[float]) -> Record:
        """Read a row together with what the host knew when the step was posted."""
        ranks = self._guarded.ranks
        scale = row[NUM_VERDICT]
        loss_scale = None if scale == NO_LOSS_SCALE else scale
        facts, lr_scale, has_loss = self._host.get(step, NOTHING_KNOWN)
        if ranks.has_others:
            record = Record.decode(
                step,
                row,
                micro_batches=facts.micro_batches,
                loss_scale=loss_scale,
                lr_scale=lr_scale,
                own_seconds=facts.seconds,
                **ranks.facts(row[NUM_VERDICT + 1 :]),
            )
            return self._named(record)
        record = Record.decode(
            step,
            row,
            flags=facts.flags,
            loss=None if has_loss else math.nan,
            lr=facts.lr,
            scheduled_lr=facts.scheduled_lr,
            seconds=facts.seconds,
            micro_batches=facts.micro_batches,
            loss_scale=loss_scale,
            lr_scale=lr_scale,
            own_seconds=facts.seconds,
        )
        return self._named(record)

    def _named(self, record: Record) -> Record:
        """Tell the name of the tensor to blame, if there is anything to blame it for."""
        if record.blocked or (record.flags is not NO_FLAG and record.has(Flag.SPIKE)):
            return record._replace(worst_name=self._guarded.name_of(record.worst))
        return record

    def _judge_snapshots(self, record: Record, findings: list[Finding]) -> bool:
        """Let a clean step prove the snapshots before it; return whether it was clean.

        A skipped step says nothing about them because it changed nothing.
        """
        if findings and is_suspect(findings):
            self._run.ring.note_suspect(min(finding.bad_step for finding in findings))
        elif not record.blocked:
            self._run.clip_limits.note_norm(record.norm, record.clipped_norm)
            self._run.ring.note_clean(record.step)
            return not findings
        return False

    def forget(self) -> None:
        """Let go of all that is of steps that did not happen, or of another run."""
        self._host.clear()
        self._health.clear()
        self._moments = None
        self._experiment.clear()
        self._calm = Calm(self._config, self._run.step)

    def _returned(self, saved: dict[str, Any]) -> None:
        """After a rollback: forget the mail and the memories of the time that was undone."""
        self.forget()
        self._reported.extend(self._unheard.values())
        self._unheard.clear()
        self.watch.note_rollback(self._run.step)
        self.watch.load_state(saved)
        self.watch.expect_write(self._run.step)
        self.cluster.clear()


def is_suspect(findings: Sequence[Finding]) -> bool:
    """Return whether snapshots taken lately may already hold the trouble."""
    if not findings:
        return False
    return any(f.cause.about.may_be_in_snapshots and f.severity >= Severity.ERROR for f in findings)


# Puts the detectors together that read a trainer's log: its lines in, findings out. Pure.
#
# Which of them have anything to say follows from the names in the log, so that any trainer that
# logs them is watched, whatever its class.


class LogDetector(Protocol):
    """Looks for one kind of symptom in the lines of a log."""

    def observe(self, step: int, logs: Mapping[str, Any]) -> Finding | None:
        """Hear of a line, in order; return what is wrong, if anything."""
        ...

    def state(self) -> dict[str, Any]:
        """Return all that is remembered, as values that JSON has."""
        ...

    def load_state(self, state: dict[str, Any]) -> None:
        """Remember what :meth:`state` returned, and nothing else."""
        ...


class LogWatch:
    """All detectors that read logs.

    Attributes:
        detectors: by name. More may be added before the first line; they are saved like ours.
    """

    def __init__(self, config: HealingConfig) -> None:
        self.detectors: dict[str, LogDetector] = {
            "chance_plateau": ChancePlateau(config),
            "preference_inversion": PreferenceInversion(config),
            "likelihood_collapse": LikelihoodCollapse(config),
            "reward_collapse": RewardCollapse(config),
            "kl_blowup": KlBlowUp(config),
        }

    def observe(self, step: int, logs: Mapping[str, Any]) -> list[Finding]:
        """Return what the detectors find in a line; NaN, Inf and words are left out of it."""
        numbers = {
            name: float(value)
            for name, value in logs.items()
            if isinstance(value, (int, float)) and math.isfinite(value)
        }
        findings = [detector.observe(step, numbers) for detector in self.detectors.values()]
        return [finding for finding in findings if finding is not None]

    def state(self) -> dict[str, Any]:
        """Return the state of every detector, as values that JSON has."""
        return {name: detector.state() for name, detector in self.detectors.items()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Return every detector to a state; one that the state does not know stays as it is."""
        for name, detector in self.detectors.items():
            if name in state:
                detector.load_state(state[name])
