"""Hears what the device said about past steps, and has it treated."""

import math
from collections.abc import Callable
from typing import Any

from torch import Tensor

from heal.causes import Finding
from heal.config import HealingConfig
from heal.detect import Watch
from heal.guarded_step import NO_LOSS_SCALE, GuardedStep
from heal.health import HealthCheck
from heal.run import TorchRun
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
        clock: seconds, for the duration of steps.

    Attributes:
        watch: the detectors.
        latest: the newest record, None before the first.
        news: flags of the host, sent with the record of the next step.
    """

    def __init__(
        self,
        run: TorchRun,
        guarded: GuardedStep,
        treatment: Treatment,
        config: HealingConfig,
        names: dict[int, str],
        clock: Callable[[], float],
    ) -> None:
        self.watch = Watch(config)
        self.latest: Record | None = None
        self.news = NO_FLAG
        self._run = run
        self._guarded = guarded
        self._treatment = treatment
        self._config = config
        self._health = HealthCheck(guarded.optimizers, names, config.lag)
        self._clock = clock
        self._step_began = clock()
        self._host: dict[int, dict[str, Any]] = {}
        self._rolled_back = False
        run.healing_state = self.watch.state
        run.on_restore = self._returned

    def note_step(self, has_loss: bool) -> None:
        """Keep what the host knows of the step just posted until its record arrives."""
        now = self._clock()
        fields: dict[str, Any] = {
            "seconds": now - self._step_began,
            "micro_batches": self._run.micro_batches,
        }
        self._step_began = now
        lr = self._guarded.optimizers[0].param_groups[0].get("lr")
        if lr is not None and (not isinstance(lr, Tensor) or lr.device.type == "cpu"):
            fields["lr"] = float(lr)
        if not has_loss:
            fields["loss"] = math.nan
        if self.news:
            fields["flags"], self.news = self.news, NO_FLAG
        self._host[self._run.step] = fields

    def check_health(self) -> None:
        """Have weights and optimizer state measured, if it is time."""
        interval = self._config.check_interval
        if self._run.step < self._run.close_watch_until:
            interval = math.ceil(interval / CLOSE_WATCH)
        if interval and self._run.step % interval == 0:
            self._health.post(self._run.step)

    def listen(self) -> None:
        """Hear of all steps that are ``lag`` old, and treat what was wrong with them."""
        self._rolled_back = False
        for step, row in self._guarded.mailbox.poll():
            record = self._decode(step, row)
            findings = self.watch.observe(record)
            self._judge_snapshots(record, findings)
            self._treatment.treat(findings)
            self._treatment.note_moves(self.watch.take_moves(record.step, findings))
            if self._rolled_back:
                return  # the rest of the mail is of steps that did not happen
        for health in self._health.read(self._run.step):
            findings = self.watch.observe_health(health)
            if is_suspect(findings):
                self._run.ring.note_suspect()
            self._treatment.treat(findings)
            if self._rolled_back:
                return

    def hear_the_rest(self) -> None:
        """Read the last records, when no step is to come that a plan could serve."""
        mailbox = self._guarded.mailbox
        lag, mailbox.lag = mailbox.lag, 0
        for step, row in mailbox.poll():
            findings = self.watch.observe(self._decode(step, row))
            self._treatment.history.note_findings(findings)
        mailbox.lag = lag

    def request_stop(self) -> None:
        """Pass on that the run was told to stop."""
        self.news |= Flag.PREEMPTED

    def _decode(self, step: int, row: list[float]) -> Record:
        host = self._host.pop(step, {})
        if row[NUM_VERDICT] != NO_LOSS_SCALE:
            host["loss_scale"] = row[NUM_VERDICT]
        record = Record.decode(step, row[:NUM_VERDICT], **host)
        if record.blocked:
            host["worst_name"] = self._guarded.name_of(record.worst)
            record = Record.decode(step, row[:NUM_VERDICT], **host)
        self.latest = record
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
        self.watch.load_state(saved)
