"""Finds learning rates that no schedule explains."""

import math
from typing import Any

from heal.causes import Cause, Finding, Severity
from heal.config import HealingConfig
from heal.detectors.robust import BLOCK, FAR, FEWEST, SAME
from heal.record import Record

PUT_BACK = (
    "the first time a rate leaves its schedule, it is put back before the step; call "
    "healer.expect_change after a change on purpose"
)


class LrChange:
    """Reports a learning rate that nothing known explains; never acts.

    Where the schedule is known, a rate that is not the scheduled one is reported whatever its
    factor; :class:`heal.lr_schedules.Schedules` has put it back before the step. Where none is
    known a leap or a fall from one step to the next is reported, and what it does to the weights is
    for the experiment to say. A rate of zero or less is reported at once, and one of zero that a
    schedule holds as soon as that is no coincidence.

    Attributes:
        held: the highest rate that is explained: the scheduled one if the rate has left its
            schedule, without one the highest that the run has held for ``BLOCK`` steps; 0 if there
            is none. A rate above it is a suspect when damage is found.
        held_until: the last step whose rate was explained.
    """

    def __init__(self, config: HealingConfig) -> None:
        self.last = math.nan
        self.same = self.idle = 0
        self.held = 0.0
        self.held_until = -1
        self.is_off = self.has_schedule = False
        self.first_step = 0

    def observe(self, record: Record) -> Finding | None:
        lr, scheduled = record.lr, record.scheduled_lr
        if not math.isfinite(lr) or record.step < self.first_step:
            return None
        last, self.last = self.last, lr
        was_off, is_first = self.is_off, last != last
        self.idle = self.idle + 1 if lr == 0.0 else 0
        self.has_schedule = math.isfinite(scheduled)
        if self.has_schedule:
            self.is_off = abs(lr - scheduled) > SAME * abs(scheduled)
            self._follow(record.step, lr, scheduled)
            # A schedule may begin or end at zero, but it should not stay there or go below.
            is_wrong = self.idle == FEWEST or (lr < 0.0 and not last < 0.0)
            is_found = not was_off if self.is_off else is_wrong
            return self._found(record, scheduled, True) if is_found else None
        self.same = self.same + 1 if abs(lr - last) <= SAME * abs(last) else 0
        if self.same >= BLOCK:
            self.held = max(self.held, lr)
        if 0.0 < lr <= (1 + SAME) * self.held:
            self.held_until = record.step
        has_leapt = last > 0.0 and not last / FAR <= lr <= last * FAR
        # The first rate of a warm-up may be zero; the second is not.
        self.is_off = lr < 0.0 or (lr == 0.0 and not is_first)
        is_found = has_leapt or (self.is_off and not was_off)
        return self._found(record, last, False) if is_found else None

    def _follow(self, step: int, lr: float, scheduled: float) -> None:
        """Note which rate is explained, beside a schedule.

        Schedules of torch multiply the rate that they find: one that has left its schedule and is
        not put back seems to be on it again a step later. So it must stay there for a while.
        """
        self.same = 0 if self.is_off else self.same + 1
        is_back = 0.0 < lr <= (1 + SAME) * self.held
        if is_back or self.same >= BLOCK:
            self.held = 0.0
        if not self.is_off and not self.held:
            self.held_until = step
        # A loop that sets rates of its own from the start, or says that it does, means it.
        if self.is_off and not self.held and self.held_until >= 0:
            self.held = scheduled

    def _found(self, record: Record, usual: float, has_schedule: bool) -> Finding:
        lr = record.lr
        evidence: dict[str, object] = {"lr": lr, "measured": has_schedule}
        if usual == usual:
            evidence["usual_lr"] = usual
        if self.is_off and has_schedule:
            evidence["advice"] = PUT_BACK
        elif lr < 0.0:
            evidence["advice"] = "updates with a negative learning rate raise the loss"
        elif lr == 0.0:
            evidence["advice"] = "nothing is learned with this learning rate"
        return Finding(
            cause=Cause.LR_SPIKE if lr > max(usual, 0.0) else Cause.LR_DROP,
            step=record.step,
            bad_step=record.step,
            severity=Severity.WARN,
            evidence=evidence,
        )

    def start_over(self, step: int) -> None:
        """Take the rate of ``step`` as the run's own; those before it may be known only later."""
        self.last, self.same, self.idle, self.held, self.is_off = math.nan, 0, 0, 0.0, True
        self.held_until, self.first_step = -1, step

    def state(self) -> dict[str, Any]:
        names = ("same", "idle", "held", "held_until", "is_off")
        last = None if self.last != self.last else self.last
        return {"last": last, **{name: getattr(self, name) for name in names}}

    def load_state(self, state: dict[str, Any]) -> None:
        if "held" not in state:
            return  # of version 0.1: learned again
        self.last = math.nan if state["last"] is None else state["last"]
        self.same, self.held, self.is_off = state["same"], state["held"], state["is_off"]
        self.idle, self.held_until = state.get("idle", 0), state.get("held_until", -1)
