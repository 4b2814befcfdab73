"""Detectors over what the host knows of a step: learning rate, duration, news of the host."""

import math
from typing import Any

from heal.causes import Cause, Finding, Severity
from heal.config import HealingConfig
from heal.detectors.robust import Window
from heal.verdict import Flag, Record


class LrSpike:
    """Finds a learning rate that is not what the schedule says.

    If the record tells the scheduled rate, one above ``lr_spike_factor`` times it is a fact, and
    its update was damage. If not, a rate above that many times the highest one so far is only
    told: a new phase of training may want it. Warm restarts return to a rate already seen.
    """

    FEWEST = 50  # steps: at the start of a warm-up each rate is a new peak

    def __init__(self, config: HealingConfig) -> None:
        self.factor = config.lr_spike_factor
        self.peak = 0.0
        self.seen = 0
        self.is_high = False

    def observe(self, record: Record) -> Finding | None:
        lr, scheduled = record.lr, record.scheduled_lr
        if not math.isfinite(lr):
            return None
        self.seen += 1
        knows_schedule = math.isfinite(scheduled)
        usual = scheduled if knows_schedule else self.peak
        was_high, self.is_high = self.is_high, usual > 0.0 and lr > self.factor * usual
        if not self.is_high:
            self.peak = max(self.peak, lr)
            return None
        if not knows_schedule:
            self.peak = lr
            if self.seen <= self.FEWEST:
                return None
        if was_high and not knows_schedule:
            return None
        return Finding(
            cause=Cause.LR_SPIKE,
            step=record.step,
            bad_step=record.step,
            severity=Severity.ERROR if knows_schedule else Severity.WARN,
            evidence={"lr": lr, "usual_lr": usual, "measured": knows_schedule},
        )

    def state(self) -> dict[str, Any]:
        return {"peak": self.peak, "seen": self.seen, "is_high": self.is_high}

    def load_state(self, state: dict[str, Any]) -> None:
        self.peak, self.seen, self.is_high = state["peak"], state["seen"], state["is_high"]


class ThroughputCollapse:
    """Tells once that steps have become much slower than their median; never acts.

    Seconds are counted per micro-batch: after a split for lack of memory steps are slower by
    design.
    """

    STEPS, FEWEST = 200, 50

    def __init__(self, config: HealingConfig) -> None:
        self.factor = config.throughput_factor
        self.patience = config.throughput_patience
        self.seconds = Window(self.STEPS)
        self.streak = 0

    def observe(self, record: Record) -> Finding | None:
        seconds = record.seconds
        if not -math.inf < seconds < math.inf:
            return None
        if record.micro_batches > 1:
            seconds /= record.micro_batches
        usual = self.seconds.quantile(0.5)
        is_slow = len(self.seconds) >= self.FEWEST and seconds > self.factor * usual
        if not is_slow:
            self.streak = 0
            self.seconds.push(seconds)
            return None
        self.streak += 1
        if self.streak > self.patience:
            self.seconds.push(seconds)
        if self.streak != self.patience:
            return None
        return Finding(
            cause=Cause.THROUGHPUT_COLLAPSE,
            step=record.step,
            bad_step=record.step,
            severity=Severity.WARN,
            evidence={"seconds": seconds, "usual_seconds": usual},
            streak=self.streak,
        )

    def state(self) -> dict[str, Any]:
        return {"seconds": self.seconds.values(), "streak": self.streak}

    def load_state(self, state: dict[str, Any]) -> None:
        self.seconds, self.streak = Window(self.STEPS, state["seconds"]), state["streak"]


class HostNews:
    """Passes on what the host wrote into the record, so that every rank acts in the same step."""

    NEWS = (
        (Flag.PREEMPTED, Cause.PREEMPTED, Severity.FATAL),
        (Flag.DEVICE_ERROR, Cause.DEVICE_ERROR, Severity.FATAL),
        (Flag.UNKNOWN_ERROR, Cause.UNKNOWN, Severity.FATAL),
        (Flag.OUT_OF_MEMORY, Cause.OUT_OF_MEMORY, Severity.ERROR),
        (Flag.WEIGHTS_BAD, Cause.WEIGHT_CORRUPTION, Severity.ERROR),
        (Flag.OPTIMIZER_STATE_BAD, Cause.OPTIMIZER_CORRUPTION, Severity.ERROR),
        (Flag.DATA_ERROR, Cause.DATA_ERROR, Severity.ERROR),
        (Flag.NETWORK_ERROR, Cause.NETWORK_ERROR, Severity.ERROR),
        (Flag.DESYNC, Cause.DESYNC, Severity.ERROR),
        (Flag.MEMORY_PRESSURE, Cause.MEMORY_PRESSURE, Severity.WARN),
    )
    DAMAGE = Flag.WEIGHTS_BAD | Flag.OPTIMIZER_STATE_BAD

    def __init__(self, config: HealingConfig) -> None:
        compared = config.fingerprint_interval + config.lag if config.fingerprint_interval else 0
        self.interval = max(config.check_interval, compared, 1)

    def observe(self, record: Record) -> Finding | None:
        if record.flags < Flag.DESYNC:
            return None  # what the device says of gradients and losses is below
        for flag, cause, severity in self.NEWS:
            if record.has(flag):
                evidence: dict[str, object] = {"flag": flag.name, "measured": True}
                # Damage was done after the last check that found none.
                since = self.interval if flag & self.DAMAGE else 0
                if record.has(Flag.STEP_FAILED):
                    evidence["phase"], since = "step", 1  # it was told in the record after
                return Finding(
                    cause=cause,
                    step=record.step,
                    bad_step=max(record.step - since, 0),
                    severity=severity,
                    evidence=evidence,
                )
        return None

    def state(self) -> dict[str, Any]:
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        """Nothing is kept."""
