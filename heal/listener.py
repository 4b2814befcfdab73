"""Hears what the device said about past steps, and has it treated."""

import math
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from heal.causes import Finding
from heal.cluster.watch import ClusterWatch
from heal.config import HealingConfig
from heal.detect import Watch
from heal.forecast.features import CHECK_INTERVAL
from heal.guarded_step import NO_LOSS_SCALE, GuardedStep
from heal.health import HealthCheck
from heal.learning_rate import LearningRates
from heal.ranks import HostFacts
from heal.run import TorchRun
from heal.series import Series
from heal.treatment import Treatment, is_suspect
from heal.verdict import NO_FLAG, Flag, Record
from zclip.layout import NUM_VERDICT

CLOSE_WATCH = 10  # times as often as usual, weights are checked after a warning


class Listener:
    """Turns rows of the mailbox into records, records into findings, and passes these on.

    Args:
        run: its snapshots are promoted by clean steps; a rollback of it clears the mail.
        guarded: whose mailbox is read.
        treatment: told of what was found.
        config: intervals and limits.
        names: of the parameters, by identity.
        rates: the learning rates, and what the schedules want them to be.
        clock: seconds, for the duration of steps.

    Attributes:
        watch: the detectors.
        latest: the newest record, None before the first.
        series: every record since the last line of metrics.
        sources: asked before every step for flags of the host; quick functions that do not wait.
        wants_snapshot: whether a record asked for one; alike on every rank.
        cluster: looks after other ranks and the hardware; None where nobody is to.
    """

    def __init__(
        self,
        run: TorchRun,
        guarded: GuardedStep,
        treatment: Treatment,
        config: HealingConfig,
        names: dict[int, str],
        rates: LearningRates,
        clock: Callable[[], float],
    ) -> None:
        self.watch = Watch(config)
        self.latest: Record | None = None
        self.series = Series()
        self.sources: list[Callable[[], Flag]] = []
        self.wants_snapshot = False
        self.cluster: ClusterWatch | None = None
        # A deque, because signal handlers and threads append to it while a step reads it.
        self._reported: deque[Flag] = deque()
        self._rates = rates
        self._run = run
        self._guarded = guarded
        self._treatment = treatment
        self._config = config
        self._health = HealthCheck(guarded.optimizers, names, config.lag, guarded.ranks)
        self._clock = clock
        self._step_began = clock()
        self._host: dict[int, dict[str, Any]] = {}
        self._rolled_back = False
        run.healing_state = self.watch.state
        run.on_restore = self._returned

    def facts(self) -> HostFacts:
        """Return what the host knows of the step that is about to be taken."""
        now = self._clock()
        seconds, self._step_began = now - self._step_began, now
        lr, scheduled = self._rates.now()
        flags = NO_FLAG
        while self._reported:
            flags |= self._reported.popleft()
        for source in self.sources:
            flags |= source()
        return HostFacts(seconds, lr, scheduled, flags, self._run.micro_batches)

    def note_step(self, facts: HostFacts, has_loss: bool) -> None:
        """Keep what the host knows of the step just posted until its record arrives."""
        fields: dict[str, Any] = {
            "micro_batches": facts.micro_batches,
            "lr_scale": self._run.lr_scale,
            "own_seconds": facts.seconds,
        }
        if not self._guarded.ranks.has_others:
            fields |= {
                "seconds": facts.seconds,
                "lr": facts.lr,
                "scheduled_lr": facts.scheduled_lr,
            }
            if not has_loss:
                fields["loss"] = math.nan
            if facts.flags:
                fields["flags"] = facts.flags
        self._host[self._run.step] = fields

    def not_sent(self, facts: HostFacts) -> None:
        """Keep the news of a step that had no gradients, and so no record, for the next."""
        if facts.flags:
            self._reported.append(facts.flags)

    def check_health(self) -> None:
        """Have weights and optimizer state measured, if it is time."""
        interval = self._config.check_interval
        if self.watch.forecast is not None:
            interval = min(interval, CHECK_INTERVAL)
        if self._run.step < self._run.close_watch_until:
            interval = math.ceil(interval / CLOSE_WATCH)
        if interval and self._run.step % interval == 0 and not self._guarded.has_stages:
            self._health.post(self._run.step)

    def listen(self) -> None:
        """Hear of all steps that are ``lag`` old, and treat what was wrong with them."""
        self._rolled_back = False
        for step, row in self._guarded.mailbox.poll():
            record = self._decode(step, row)
            findings = self.watch.observe(record)
            self._judge_snapshots(record, findings)
            self._treat(record.step, findings)
            if self._rolled_back:
                return  # the rest of the mail is of steps that did not happen
        for health in self._health.read(self._run.step):
            findings = self.watch.observe_health(health)
            if is_suspect(findings):
                self._run.ring.note_suspect()
            self._treat(health.step, findings)
            if self._rolled_back:
                return
        if self.cluster is not None:
            self._treat(self._run.step, self.cluster.look(self._run.step))

    def hear_the_rest(self) -> None:
        """Read the last records, when no step is to come that a plan could serve."""
        mailbox = self._guarded.mailbox
        lag, mailbox.lag = mailbox.lag, 0
        for step, row in mailbox.poll():
            findings = self.watch.observe(self._decode(step, row))
            self._treatment.history.note_findings(findings)
            self._treatment.note_moves(self.watch.take_moves(step, findings))
        mailbox.lag = lag

    def report(self, flag: Flag) -> None:
        """Send a flag of the host with the record of the next step; safe in a signal handler."""
        self._reported.append(flag)

    def _treat(self, step: int, findings: list[Finding]) -> None:
        # Written down first: a rollback forgets what led to it, and a halt ends the run.
        self._treatment.note_moves(self.watch.take_moves(step, findings))
        self._treatment.treat(findings)

    def _decode(self, step: int, row: list[float]) -> Record:
        host = self._host.pop(step, {})
        ranks = self._guarded.ranks
        if ranks.has_others:
            host |= ranks.facts(row[NUM_VERDICT + 1 :])
        if row[NUM_VERDICT] != NO_LOSS_SCALE:
            host["loss_scale"] = row[NUM_VERDICT]
        record = Record.decode(step, row, **host)
        if record.blocked or record.has(Flag.SPIKE):
            record = replace(record, worst_name=self._guarded.name_of(record.worst))
        self.latest = record
        self.series.note(record)
        if record.has(Flag.SNAPSHOT_WANTED):
            self.wants_snapshot = True
        return record

    def _judge_snapshots(self, record: Record, findings: list[Finding]) -> None:
        """Let a clean step speak for the snapshots before it.

        A refused one says nothing about them, for it changed nothing.
        """
        if is_suspect(findings):
            self._run.ring.note_suspect()
        elif not record.blocked:
            self._run.note_norm(record.norm)
            self._run.ring.note_clean(record.step)
            if not findings:
                self._treatment.history.note_step(record.step, self._config)

    def _returned(self, saved: dict[str, Any]) -> None:
        """After a rollback: forget the mail and the memories of the time that was undone."""
        self._rolled_back = True
        self._host.clear()
        self._health.clear()
        self.watch.note_rollback(self._run.step)
        self.watch.load_state(saved)
        if self.cluster is not None:
            self.cluster.clear()
