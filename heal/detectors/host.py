"""Detectors over what the host knows of a step: its duration, and flags of the host."""

import math
from typing import Any

from heal.causes import Cause, Finding, Severity
from heal.config import HealingConfig
from heal.detectors.robust import UpperRange
from heal.record import Flag, Record


class ThroughputCollapse:
    """Reports once that steps have become much slower than their upper range; never acts.

    Seconds are counted per micro-batch: after a split for lack of memory steps are slower by
    design.
    """

    def __init__(self, config: HealingConfig) -> None:
        self.seconds = UpperRange(config.throughput_factor, config.throughput_patience)

    def observe(self, record: Record) -> Finding | None:
        seconds = record.seconds
        if not -math.inf < seconds < math.inf:
            return None
        if record.micro_batches > 1:
            seconds /= record.micro_batches
        if self.seconds.push(seconds) != self.seconds.patience:
            return None
        return Finding(
            cause=Cause.THROUGHPUT_COLLAPSE,
            step=record.step,
            bad_step=record.step,
            severity=Severity.WARN,
            evidence={"seconds": seconds, "usual_seconds": self.seconds.usual},
            streak=self.seconds.streak,
        )

    def state(self) -> dict[str, Any]:
        return {"seconds": self.seconds.values.values(), "streak": self.seconds.streak}

    def load_state(self, state: dict[str, Any]) -> None:
        self.seconds.load(state["seconds"], state["streak"])


class HostNews:
    """Passes on what the host wrote into the record, so that every rank acts in the same step."""

    NEWS = (
        (Flag.PREEMPTED, Cause.PREEMPTED),
        (Flag.DEVICE_ERROR, Cause.DEVICE_ERROR),
        (Flag.UNKNOWN_ERROR, Cause.UNKNOWN),
        (Flag.OUT_OF_MEMORY, Cause.OUT_OF_MEMORY),
        (Flag.WEIGHTS_BAD, Cause.WEIGHT_CORRUPTION),
        (Flag.OPTIMIZER_STATE_BAD, Cause.OPTIMIZER_CORRUPTION),
        (Flag.DATA_ERROR, Cause.DATA_ERROR),
        (Flag.NETWORK_ERROR, Cause.NETWORK_ERROR),
        (Flag.DESYNC, Cause.DESYNC),
        (Flag.MEMORY_PRESSURE, Cause.MEMORY_PRESSURE),
    )
    DAMAGE = Flag.WEIGHTS_BAD | Flag.OPTIMIZER_STATE_BAD

    def __init__(self, config: HealingConfig) -> None:
        compared = (
            config.nccl_health_check_interval + config.lag
            if config.nccl_health_check_interval
            else 0
        )
        self.interval = max(config.check_interval, compared, 1)

    def observe(self, record: Record) -> Finding | None:
        if record.flags < Flag.DESYNC:
            return None  # what the device says of gradients and losses is below
        for flag, cause in self.NEWS:
            if record.has(flag):
                evidence: dict[str, object] = {"flag": flag.name, "measured": True}
                # Damage was done after the last check that found none.
                since = self.interval if flag & self.DAMAGE else 0
                if record.has(Flag.STEP_FAILED):
                    evidence["phase"], since = "step", 1  # it is in the record after
                return Finding(
                    cause=cause,
                    step=record.step,
                    bad_step=max(record.step - since, 0),
                    severity=cause.about.severity,
                    evidence=evidence,
                )
        return None

    def state(self) -> dict[str, Any]:
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        """Nothing is kept."""
