"""What the device reported about past steps: polled, decoded, shown to the detectors."""

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor
from torch.optim import Optimizer

from heal.causes import Cause, Finding, Severity
from heal.cluster.checks import ClusterWatch
from heal.config import HealingConfig
from heal.detectors.robust import FAR
from heal.detectors.watch import CalmLimits, Watch
from heal.experiment import Answer, Experiment, Settled, as_report
from heal.guarded_step import NO_LOSS_SCALE, TOGETHER
from heal.journal import LEFT_OUT
from heal.ranks import NO_FACTS, HostFacts
from heal.record import NO_FLAG, Flag, Record
from heal.snapshots import NEVER, is_due, next_due
from heal.state_checks import HealthCheck
from heal.training_run import TorchRun
from heal.training_state import optimized
from zclip.layout import BLOCKED, CLIPPED, FLAGS, LOSS, NORM, NUM_VERDICT, SPIKE

if TYPE_CHECKING:
    from heal.diagnose import Diagnosis

ORDINARY = (0.0, CLIPPED, SPIKE, CLIPPED | SPIKE)
"""Flags that no detector acts upon: the clip rule has dealt with a large norm, and on real data one
step in twenty has one."""


class Calm:
    """Decides when to poll, from the numbers as they are posted, before a detector sees them.

    A record that a detector could act upon is polled as soon as it may be read: a skipped step, a
    flag that is not ordinary, a flag of the host, a loss or norm above the limits of the detectors,
    a learning rate that has leapt or fallen. Other records wait for each other, up to
    ``TOGETHER - 1`` steps. Plans and snapshots poll first, so that they miss nothing.

    After a rollback make a new one, because the old limits may come from the trouble. No step is
    calm while there are none.

    Attributes:
        polled_at: how many steps were done when records were last polled.
    """

    def __init__(self, config: HealingConfig, step: int = 0) -> None:
        self._limits = CalmLimits()
        self._lr = self._polled_lr = 0.0  # of the newest step, now and when last polled
        self.polled_at = step
        self._polled = self._troubled = step - 1  # steps whose records were read, or must be

    def note(self, step: int, row: Sequence[float] | None, facts: HostFacts) -> bool:
        """Look at a row that was posted; return whether to poll now, as :meth:`is_time` does.

        A row that is not in host memory may hold anything.
        """
        self._lr = lr = facts.lr
        # By comparisons that are false for NaN; losses that are NaN have a flag.
        is_calm = (
            row is not None
            and facts.flags is NO_FLAG
            and row[BLOCKED] == 0.0
            and row[FLAGS] in ORDINARY
            and row[NORM] <= self._limits.norm
            and not row[LOSS] > self._limits.loss
            and (self._polled_lr / FAR <= lr <= self._polled_lr * FAR or lr != lr)
        )
        if not is_calm:
            self._troubled = step
        return self._troubled > self._polled or step + 1 - self.polled_at >= TOGETHER

    def is_time(self, step: int) -> bool:
        """Return whether to poll now, after ``step`` steps."""
        return self._troubled > self._polled or step - self.polled_at >= TOGETHER

    def polled(self, step: int, newest: int, limits: CalmLimits) -> None:
        """Note that all records up to that of ``newest`` were read after ``step`` steps."""
        self.polled_at, self._polled = step, max(newest, self._polled)
        self._polled_lr, self._limits = self._lr, limits


MAX_RECORDS = 128  # kept if nothing takes them; more than may come between two lines
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
"""What may change from step to step, and the field of the record that has it."""

SLOW = ("threshold", "mean", "std")
"""Written once a line, as of its last record."""


class Series:
    """Collects every record between two lines of metrics, so that no spike is lost between them.

    One line of ``metrics.jsonl`` has all of them as short columns: a write per step would cost more
    than it is worth.
    """

    def __init__(self) -> None:
        self._records: deque[Record] = deque(maxlen=MAX_RECORDS)

    def __len__(self) -> int:
        return len(self._records)

    def note(self, records: Iterable[Record]) -> None:
        """Keep records."""
        self._records.extend(records)

    def take(self) -> dict[str, Any]:
        """Return the records since the last call as an entry of a line; empty if none came."""
        records = list(self._records)
        self._records.clear()
        if not records:
            return {}
        series = {name: _column(records, field) for name, field in COLUMNS.items()}
        series |= {name: _short(getattr(records[-1], name)) for name in SLOW}
        if series["threshold"] == math.inf:
            series["threshold"] = None  # no limit yet: nothing to draw
        return {"series": series}


def _column(records: list[Record], field: str) -> Any:
    """Return the values of a column, or one value if it is the same throughout."""
    values = [_short(getattr(record, field)) for record in records]
    is_same = field != "step" and all(value == values[0] for value in values)
    return values[0] if is_same else values


def _short(value: float) -> float:
    if isinstance(value, int) or not math.isfinite(value):
        return value
    return float(f"{value:.{DIGITS}g}")


REQUESTS = Flag.PREEMPTED | Flag.SNAPSHOT_REQUESTED
"""Flags that do not depend on the step they were sent with; sent again if that is undone."""

NOTHING_KNOWN = NO_FACTS, 1.0, True

CLOSE_WATCH = 10  # times more often, weights are checked after a warning


class Moments(NamedTuple):
    """What an optimizer keeps of its first parameter, and how often that was written."""

    optimizer: Optimizer
    ids: list[int]
    tensors: list[Tensor]
    versions: list[int]


VERSION = attrgetter("_version")

YOUNG = 32
"""Steps in which writes of weights are watched for: later a leap of the loss shows the damage, but
a young run has no level yet, and its loss may come down from that of the damage."""


class Seen(NamedTuple):
    """What was seen of one step, in its record, by a check or as an exception.

    Attributes:
        step: its number.
        findings: of the detectors; after :meth:`Monitor.settle` what is known to be wrong.
        record: of the step; None if there is none, or if it was taken in already.
        is_check: whether a check of the weights found it.
        raised: what an exception was diagnosed as; None if there was none.
        is_clean: whether the step was taken and nothing was found.
        settled: the answer of an experiment that this step completed, if any.
    """

    step: int
    findings: Sequence[Finding] = ()
    record: Record | None = None
    is_check: bool = False
    raised: "Diagnosis | None" = None
    is_clean: bool = False
    settled: Settled | None = None

    @property
    def is_suspect(self) -> bool:
        """Whether snapshots taken lately may already hold the trouble."""
        return are_suspect(self.findings)


def are_suspect(findings: Sequence[Finding]) -> bool:
    """Return whether snapshots taken lately may already hold what was found."""
    return any(f.cause.about.may_be_in_snapshots and f.severity >= Severity.ERROR for f in findings)


class Monitor:
    """Turns rows of the mailbox into records, and records into findings.

    The detectors find or suspect; :meth:`settle` leaves what they suspect to the experiment, and
    lets clean steps prove the snapshots of the run before them.

    Args:
        reported: flags of this host for the next record; signal handlers and threads append.

    Attributes:
        watch: the detectors.
        health: checks of weights and optimizer state.
        series: every record since the last line of metrics.
        sources: called before every step for flags of the host; quick functions that do not wait.
    """

    def __init__(
        self,
        run: TorchRun,
        watch: Watch,
        experiment: Experiment,
        cluster: ClusterWatch,
        reported: deque[Flag],
        clock: Callable[[], float],
    ) -> None:
        guarded, config = run.guarded, run.config
        self.watch = watch
        self.series = Series()
        self.sources: list[Callable[[], Flag]] = []
        self.cluster = cluster
        self._has_forecast = watch.forecast is not None
        self._run = run
        self._guarded = guarded
        self._config = config
        self._schedules = run.schedules
        self._experiment = experiment
        self._reported = reported
        self._clock = clock
        self._note = run.note
        self._callbacks: list[Callable[[Record], None]] = []
        self._latest: Record | None = None
        self._needs_check = self._needs_snapshot = False
        self._step_began = clock()
        self._host: dict[int, tuple[HostFacts, float, bool]] = {}  # of steps not polled yet
        self._calm = Calm(config)
        self.health = HealthCheck(
            guarded.optimizers,
            guarded.names,
            guarded.buffers,
            config.lag,
            guarded.ranks,
            waits=self._has_forecast,
        )
        # Other ranks would have to check in the same step, and may know of no write.
        self._watches_moments = config.check_interval > 0 and not guarded.ranks.has_others
        self._moments: list[Moments] = []  # as the last step left them
        self._next_look = 0
        self._weights: tuple[list[Tensor], list[int]] = [], []  # as the last step left them
        self._were_written = True  # running statistics, in the last step; before the first: unknown
        self._next_suspicion = 0
        run.hold("healing", watch.state, self._rolled_back)

    # Before and after a step.

    def facts(self) -> HostFacts:
        """Return what the host knows of the step that is about to be taken."""
        for optimizer, ids, tensors, versions in self._moments:
            first: dict[str, Any] = next(iter(optimizer.state.values()), {})
            if versions != [*map(VERSION, tensors)] or ids != [*map(id, first.values())]:
                self._check_moments(self._run.step)
        now = self._clock()
        seconds, self._step_began = now - self._step_began, now
        lr, scheduled = self._guarded.optimizers[0].inner.param_groups[0].get("lr"), math.nan
        if type(lr) is not float or self._schedules.are_followed:
            lr, scheduled = self._schedules.rates()
            if lr != scheduled == scheduled:
                self._schedules.put_back()
        flags = NO_FLAG
        if self._weights[0] and self.were_weights_written():
            flags = Flag.FOREIGN_WRITE
        if self._guarded.buffers.are_there:
            flags |= self._look_at_statistics(self._run.step)
        while self._reported:
            flags |= self._reported.popleft()
        for source in self.sources:
            flags |= self._flags_of(source)
        return HostFacts(seconds, lr, scheduled, flags, self._run.micro.pieces)

    def _seen_moments(self) -> list[Moments]:
        """Return how often the moments of each first parameter were written; nothing waits."""
        seen = []
        for optimizer in self._guarded.optimizers:
            first = next(iter(optimizer.inner.state.values()), None)
            if isinstance(first, dict):
                values = first.values()
                tensors = [m for m in values if isinstance(m, Tensor) and not m.is_inference()]
                versions = [*map(VERSION, tensors)]
                seen.append(Moments(optimizer.inner, [*map(id, values)], tensors, versions))
        return seen

    def note_weights(self) -> None:
        """Note how often each weight was written, after a step and with the first snapshot."""
        params = (p for optimizer in self._guarded.optimizers for p in optimized(optimizer))
        weights = [p for p in params if not p.is_inference()]
        self._weights = weights, [*map(VERSION, weights)]

    def were_weights_written(self) -> bool:
        """Return whether weights were written since :meth:`note_weights`, without a wait."""
        weights, versions = self._weights
        self._weights = [], []
        return versions != [*map(VERSION, weights)]

    def _check_moments(self, step: int) -> None:
        """Check the state before ``step``: something other than the optimizer wrote its moments."""
        if step >= self._next_look:
            self._next_look = 2 * step  # where such writes are a habit, few lead to a check
            self.health.post(step)

    def _look_at_statistics(self, step: int) -> Flag:
        """Report that something other than forward wrote running statistics, without a wait."""
        were, self._were_written = self._were_written, self._guarded.buffers.were_written()
        if were or not self._were_written or step < self._next_suspicion:
            return NO_FLAG  # those that are written with a trace in every step say nothing
        self._next_suspicion = 2 * step  # where that is a habit, few are reported
        return Flag.STATISTICS_WRITTEN

    def _flags_of(self, source: Callable[[], Flag]) -> Flag:
        try:
            return Flag(source())
        except Exception as error:  # the flags of others must be sent
            self._note(f"the source {_name_of(source)} failed and was left out: {error!r}")
            return NO_FLAG

    def report(self, flag: Flag) -> None:
        """Send a flag of the host with the record of the next step; safe in a signal handler."""
        self._reported.append(flag)

    def note_step(self, done: int, facts: HostFacts, posted: bool, has_loss: bool) -> bool:
        """Keep what the host knows of the step just taken until its record arrives.

        ``done`` steps are done, this one included; ``posted`` says whether it has a record. Returns
        whether all is calm, so that records may wait for each other.
        """
        if self._watches_moments:
            for moments in self._moments:
                first: dict[str, Any] = next(iter(moments.optimizer.state.values()), {})
                if moments.ids != [*map(id, first.values())]:
                    self._moments = []  # other tensors: made again below
                    break
                moments.versions[:] = map(VERSION, moments.tensors)
            if len(self._moments) < len(self._guarded.optimizers):
                self._moments = self._seen_moments()
        if done < YOUNG:
            self.note_weights()
        watchdog = self.cluster.watchdog
        if watchdog is not None:
            watchdog.beat(done)
        if not posted:
            self.not_sent(facts)
            return not self._calm.is_time(done)
        self._host[done - 1] = facts, self._guarded.optimizers[0].lr_scale, has_loss
        # Ranks learn of each other by records only, and a forecast counts its lead in steps.
        hurries = self._guarded.ranks.has_others or self._has_forecast
        row = None if hurries else self._guarded.posted
        return not self._calm.note(done - 1, row, facts)

    def not_sent(self, facts: HostFacts) -> None:
        """Keep the flags of a step without a record, as it had no gradients, for the next one."""
        if facts.flags:
            self._reported.append(facts.flags)

    @contextmanager
    def clock_stopped(self) -> Iterator[None]:
        """Leave the duration of the body out of that of the next step."""
        began = self._clock()
        try:
            yield
        finally:
            self._step_began += self._clock() - began

    # What is due.

    def next_due(self, step: int) -> int:
        """Return the step after which there is something to check."""
        if self._experiment.is_open or self._needs_check:
            return step + 1
        interval = self._check_interval(step)
        check = NEVER if interval <= 0 else next_due(step, interval, not self._has_forecast)
        return min(check, self.cluster.next_due(step))

    def check_health(self) -> None:
        """Measure weights and optimizer state, if it is time."""
        step = self._run.step
        interval = self._check_interval(step)
        if interval <= 0 or self._guarded.has_stages:
            return
        # A forecast has learned from checks at regular intervals.
        if self._needs_check or is_due(step, interval, not self._has_forecast):
            self._needs_check = False
            self.health.post(step)

    def _check_interval(self, step: int) -> int:
        interval = self._config.check_interval
        if self.watch.forecast is not None:
            interval = min(interval, self.watch.forecast.check_interval)
        if step < self._run.close_watch_until:
            interval = math.ceil(interval / CLOSE_WATCH)
        return interval

    def take_snapshot_request(self) -> bool:
        """Return whether a record has requested a snapshot since the last call, on any rank."""
        request, self._needs_snapshot = self._needs_snapshot, False
        return request

    # From rows to records to findings.

    def poll(self, lag: int | None = None) -> Iterator[Seen]:
        """Yield all steps that are ``lag`` old, with what the detectors find in their records."""
        records = self._read(self._guarded.mailbox.poll(lag))
        found = self.watch.observe_all(records)
        for error in self.watch.take_errors():
            self._note(f"{LEFT_OUT}: {error!r}")
        for record, findings in zip(records, found, strict=True):
            yield self._seen(record, findings)
        newest = records[-1].step if records else -1
        self._calm.polled(self._run.step, newest, self.watch.calm_limits())

    def poll_checks(self, is_last: bool = False) -> Iterator[Seen]:
        """Yield what checks of state, ranks and hardware found; if last, check once more."""
        if is_last:
            self._check_last()
        for health in self.health.read(NEVER if is_last else self._run.step):
            yield Seen(health.step, self.watch.observe_health(health), is_check=True)
        yield Seen(self._run.step, self.cluster.look(self._run.step))

    def _check_last(self) -> None:
        """Measure once more, where no other rank has to."""
        if self._config.check_interval > 0 and not self._guarded.ranks.has_others:
            self.health.post(self._run.step)

    def poll_last(self) -> Iterator[Seen]:
        """Yield what the last records show, when no more steps will be taken.

        Also NaN and Inf in the state; all else may be the caller's work on a model that is trained.
        """
        for record in self._read(self._guarded.mailbox.poll(lag=0)):
            (found,) = self.watch.observe_all([record])
            findings = self._seen(record, found).findings
            known = [f for f in findings if not f.wants_proof or f.cause.about.is_nonfinite]
            reports = [r for f in findings if (r := as_report(f)) is not None]
            yield Seen(record.step, known + reports)
        self._check_last()
        for health in self.health.read(NEVER):
            found = [f for f in self.watch.observe_health(health) if f.severity >= Severity.ERROR]
            yield Seen(health.step, found, is_check=True)
        left = self._experiment.unanswered()
        if left is not None:
            yield Seen(self._run.step, [left])

    def on_record(self, callback: Callable[[Record], None]) -> None:
        """Call ``callback`` with every record that is polled."""
        self._callbacks.append(callback)

    def _seen(self, record: Record, findings: list[Finding]) -> Seen:
        for callback in self._callbacks:
            try:
                callback(record)
            except Exception as error:
                name = _name_of(callback)
                self._note(f"the callback {name} of on_record failed: {error!r}")
        if record.flags is not NO_FLAG and record.has(Flag.STATE_NONFINITE):
            self._needs_check = True
        return Seen(record.step, [self._named(finding) for finding in findings], record)

    def _named(self, finding: Finding) -> Finding:
        """Name a tensor that a record has by its number: few records are worth the search."""
        index = finding.evidence.get("tensor_index")
        if not isinstance(index, int) or finding.evidence.get("tensor") != f"tensor {index}":
            return finding
        name = self._guarded.name_of(index) or f"tensor {index}"
        return replace(finding, evidence={**finding.evidence, "tensor": name})

    def settle(self, seen: Seen) -> Seen:
        """Leave suspicions to the experiment; return what is known, its answers included.

        An experiment takes some steps, and its answer comes with the record of the last of them.
        """
        record = seen.record
        settled = seen.settled if record is None else self._experiment.observe(record)
        findings = self._known(seen.findings) if seen.findings else []
        if settled is not None:
            if settled.answer is not Answer.DAMAGED:
                self._run.ring.note_settled()
            if settled.takes_level:
                self.watch.rebase(settled.finding.cause)
            findings += settled.findings
        is_clean = record is not None and self._judge_snapshots(record, findings)
        if seen.is_check and not are_suspect(findings):
            self._run.ring.note_checked(seen.step)
        return Seen(seen.step, findings, None, seen.is_check, seen.raised, is_clean, settled)

    def note_kept(self, seen: Seen) -> None:
        """Note that a plan has undone nothing: the next snapshots prove themselves.

        Damage that was proven and stays is the level that comes next.
        """
        if seen.is_suspect:
            self._run.ring.note_settled()
        if seen.settled is not None and seen.settled.answer is Answer.DAMAGED:
            self.watch.rebase(seen.settled.finding.cause)

    def expect_change(self) -> None:
        """Take what was changed for meant: new baselines, and a snapshot of the new state."""
        step = self._run.step
        self._experiment.clear()
        self.watch.start_over(step)
        self.watch.expect_write(step)
        self._schedules.expect_change()
        self._run.ring.note_settled()
        self._needs_snapshot = True

    def suspect(self, finding: Finding) -> None:
        """Have an experiment settle a suspicion, unless another one is under way."""
        is_asked = self._experiment.ask(finding)
        if is_asked and finding.cause is not Cause.NOT_LEARNING:  # that doubts no state
            self._run.ring.note_suspect(finding.bad_step)
            self._needs_check = True

    def _known(self, findings: Sequence[Finding]) -> list[Finding]:
        """Leave suspicions to the experiment, and return the rest."""
        known = []
        for finding in findings:
            if finding.wants_proof:
                self.suspect(finding)
                if not finding.cause.about.is_nonfinite:
                    continue
                finding = replace(finding, wants_proof=False)  # the step was skipped all the same
            known.append(finding)
        return known

    def _judge_snapshots(self, record: Record, findings: Sequence[Finding]) -> bool:
        """Let a clean step prove the snapshots before it; return whether it was clean."""
        if findings and are_suspect(findings):
            self._run.ring.note_suspect(min(finding.bad_step for finding in findings))
        elif not record.blocked:  # a skipped step changed nothing, and so proves nothing
            self._run.clip_limits.note_norm(record.norm, record.clipped_norm)
            self._run.ring.note_clean(record.step)
            return not findings
        return False

    def _read(self, rows: Sequence[tuple[int, list[float]]]) -> list[Record]:
        """Decode rows for good; what the host knew of their steps is not needed again."""
        records = [self._decoded(step, row) for step, row in rows]
        for record in records:
            self._latest = record
            self._host.pop(record.step, None)
            if record.flags is not NO_FLAG and record.has(Flag.SNAPSHOT_REQUESTED):
                self._needs_snapshot = True
        self.series.note(records)
        return records

    def _decoded(self, step: int, row: list[float]) -> Record:
        """Combine a row with what the host knew when the step was posted."""
        facts, lr_scale, has_loss = self._host.get(step, NOTHING_KNOWN)
        ranks, scale = self._guarded.ranks, row[NUM_VERDICT]
        shared: dict[str, Any]
        if ranks.has_others:
            shared = ranks.facts(row[NUM_VERDICT + 1 :])
        else:
            shared = {
                "flags": facts.flags,
                "loss": None if has_loss else math.nan,
                "lr": facts.lr,
                "scheduled_lr": facts.scheduled_lr,
                "seconds": facts.seconds,
            }
        record = Record.decode(
            step,
            row,
            micro_batches=facts.micro_batches,
            loss_scale=None if scale == NO_LOSS_SCALE else scale,
            lr_scale=lr_scale,
            own_seconds=facts.seconds,
            **shared,
        )
        if record.blocked or (record.flags is not NO_FLAG and record.has(Flag.SPIKE)):
            return record._replace(worst_name=self._guarded.name_of(record.worst))
        return record

    @property
    def pending(self) -> Record | None:
        """The newest record that may be read, if the detectors have not observed it yet."""
        waiting = self._guarded.mailbox.peek()
        return None if waiting is None else self._decoded(*waiting)

    @property
    def latest(self) -> Record | None:
        """The newest record that may be read."""
        return self.pending or self._latest

    # After a rollback or a resume.

    def forget(self) -> None:
        """Drop all that is of steps that did not happen, or of another run."""
        self._host.clear()
        self.health.clear()
        self._moments, self._weights = [], ([], [])
        self._were_written, self._next_suspicion = True, 0
        self._experiment.clear()
        self._calm = Calm(self._config, self._run.step)

    def _rolled_back(self, saved: dict[str, Any]) -> None:
        self._reported.extend(
            facts.flags & REQUESTS for facts, _, _ in self._host.values() if facts.flags & REQUESTS
        )
        self.forget()
        self.watch.roll_back(self._run.step, saved)
        self.watch.expect_write(self._run.step)
        self.cluster.clear()


def _name_of(function: Any) -> str:
    return getattr(function, "__qualname__", type(function).__name__)
