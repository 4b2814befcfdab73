"""Puts the detectors together: records, health checks and evaluations in, findings out.

Host-side and pure. The state of all detectors is plain values; it is part of every snapshot and
returns with it, so that after a rollback nothing is remembered of steps that did not happen.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from heal.causes import Cause, Finding, Severity
from heal.config import ConfigError, HealingConfig
from heal.detectors.foreign_writes import ForeignWrites
from heal.detectors.gradients import GradientExplosion, SkippedSteps
from heal.detectors.host import HostNews, ThroughputCollapse
from heal.detectors.learning_rate import LrChange
from heal.detectors.loss import LossChange
from heal.detectors.plateau import NotLearning, OverfittingGap, Plateau
from heal.detectors.preference import ChancePlateau, LikelihoodCollapse, PreferenceInversion
from heal.detectors.rewards import KlBlowUp, RewardCollapse
from heal.detectors.weights import StateHealth
from heal.record import HealthRow, Record

if TYPE_CHECKING:
    from heal.lab.forecast.forecast_watch import ForecastWatch

__all__ = ["CalmLimits", "Detector", "Finding", "LogWatch", "Watch"]


def names_of(text: str) -> set[str]:
    """Return the names in a list that is separated by commas."""
    return {name.strip() for name in text.split(",") if name.strip()}


class CalmLimits(NamedTuple):
    """The highest loss and gradient norm that no detector counts; as it stands, none is known."""

    loss: float = math.nan
    norm: float = 0.0


class Detector(Protocol):
    """Looks for one kind of symptom in the stream of records."""

    def observe(self, record: Record) -> Finding | None:
        """Take in a step, in order; return what is wrong, if anything."""
        ...

    def state(self) -> dict[str, Any]:
        """Return all that is remembered, as values that JSON has."""
        ...

    def load_state(self, state: dict[str, Any]) -> None:
        """Remember what :meth:`state` returned, and nothing else."""
        ...


class Watch:
    """All detectors of a run.

    Args:
        has_others: whether records are shared with other ranks.

    Attributes:
        detectors: by name. More may be added before the first step; they are saved like ours.
    """

    def __init__(self, config: HealingConfig, has_others: bool = False) -> None:
        self._loss = LossChange(config)
        self._skipped = SkippedSteps(config)
        self._lr = LrChange(config)
        self._explosion = GradientExplosion(config)
        self._gap = OverfittingGap(config)
        self._errors: list[Exception] = []
        self._not_learning = NotLearning(config)
        self._health = StateHealth(config)
        self._writes = ForeignWrites(config, delay=int(has_others))
        self.detectors: dict[str, Detector] = {
            "host_news": HostNews(config),
            "skipped_steps": self._skipped,
            "gradient_explosion": self._explosion,
            "loss": self._loss,
            "lr": self._lr,
            "plateau": Plateau(config),
            "not_learning": self._not_learning,
            "overfitting_gap": self._gap,
            "throughput_collapse": ThroughputCollapse(config),
            "foreign_writes": self._writes,
        }
        self._disabled = names_of(config.disabled_detectors)
        self._alert_only = names_of(config.alert_only_detectors)
        for name in self._disabled | self._alert_only:
            if name not in {*self.detectors, "health"}:
                known = ", ".join([*self.detectors, "health"])
                raise ConfigError(f"expected detectors among {known}, got {name!r}")
        self.forecast: ForecastWatch | None = None
        if config.forecast:
            from heal.lab.forecast import forecast_watch  # the laboratory is imported when used

            self.detectors["forecast"] = self.forecast = forecast_watch.ForecastWatch()

    def observe(self, record: Record) -> list[Finding]:
        """Return what the detectors find in the record of a step; records come in order."""
        (found,) = self.observe_all([record])
        for error in self.take_errors():
            raise error
        return found

    def observe_all(self, records: Sequence[Record]) -> list[list[Finding]]:
        """As :meth:`observe`, for each of several: one detector after the other, which is quicker.

        What is found in one record must not depend on what is done about one before it.
        """
        found: list[list[Finding]] = [[] for _ in records]
        for name, detector in self.detectors.items():
            if name in self._disabled:
                continue
            try:
                for findings, record in zip(found, records, strict=True):
                    finding = detector.observe(record)
                    if finding is not None:
                        findings.append(self._muted(name, finding))
            except Exception as error:  # the others go on
                self._errors.append(error)
        return found

    def _muted(self, name: str, finding: Finding) -> Finding:
        """Return a finding of a detector that is set to alert only as an alert."""
        if name not in self._alert_only or finding.severity < Severity.WARN:
            return finding
        return replace(finding, severity=Severity.WARN, wants_proof=False)

    def take_errors(self) -> list[Exception]:
        """Return what detectors have raised since the last call."""
        errors, self._errors = self._errors, []
        return errors

    def calm_limits(self) -> CalmLimits:
        """Return up to where losses and norms are no sign of trouble, as far as it is known."""
        level, noise = self._loss.level()
        return CalmLimits(level + LossChange.SLACK * noise, self._explosion.limit())

    def latest_loss(self) -> float:
        """Return the median of the last few losses, whether they fit the level or not."""
        return median(self._loss.latest) if self._loss.latest else math.nan

    def loss_level(self) -> tuple[float, float]:
        """Return the level of the loss and its noise; NaN while they are not known."""
        return self._loss.level()

    @property
    def knows_noise(self) -> bool:
        """Whether the noise of the loss was measured; else it is a guess that allows for much."""
        return self._loss.knows_noise

    def held_lr(self) -> tuple[float, int]:
        """Return the highest learning rate that is explained, and the last step with such a rate.

        The rate is 0 if there is none, or if the rate is the scheduled one.
        """
        return self._lr.held, self._lr.held_until

    def has_schedule(self) -> bool:
        """Return whether a schedule that is known sets the rate."""
        return self._lr.has_schedule

    def first_loss(self) -> float:
        """Return the loss that the run began with; NaN if there was none yet."""
        return min(self._loss.first, default=math.nan)

    @property
    def has_learned_nothing(self) -> bool:
        """Whether there was time to learn something, and the loss is that of the start."""
        return self._not_learning.has_learned_nothing

    def expect_write(self, step: int) -> None:
        """Note that a rollback or the user wrote weights before ``step``."""
        self._writes.expect(step)

    def start_over(self, step: int) -> None:
        """Take all that comes from now on as usual: something was changed before ``step``."""
        self._loss.rebase()
        self._explosion.rebase()
        self._lr.start_over(step)
        self._health.start_over()

    def rebase(self, cause: Cause) -> None:
        """Take the present level as the new baseline: an experiment has cleared the weights.

        The level of the loss only if that was suspected. An answer about weights or gradients says
        nothing about the loss, and a slow climb is measured against the best level of the run.

        Args:
            cause: of the suspicion. NaN has no level: the batches that come are the reason.
        """
        if cause.about.is_nonfinite:
            self._skipped.note_bad_data()
            return
        if self._loss.is_suspected:
            self._loss.rebase()
        self._explosion.rebase()

    def observe_health(self, row: HealthRow) -> list[Finding]:
        """Return what is wrong with weights or optimizer state."""
        if self.forecast is not None:
            self.forecast.observe_health(row)
        found = []
        for name, detector in (("health", self._health), ("not_learning", self._not_learning)):
            if name not in self._disabled:
                finding = detector.observe_health(row)
                if finding is not None:
                    found.append(self._muted(name, finding))
        return found

    def observe_eval(
        self, step: int, eval_loss: float, train_loss: float | None = None
    ) -> list[Finding]:
        """Return what an evaluation shows; ``train_loss`` if measured in evaluation mode too."""
        finding = self._gap.observe_eval(step, eval_loss, train_loss)
        return [] if finding is None else [finding]

    def take_moves(self, step: int, findings: Sequence[Finding]) -> list[tuple[int, str, str]]:
        """Return how the forecast's view of the run changed with a step: step, before, after."""
        if self.forecast is None:
            return []
        if any(finding.severity >= Severity.ERROR for finding in findings):
            self.forecast.note_failure(step)
        return [(at, old.value, new.value) for at, old, new in self.forecast.take_moves()]

    def roll_back(self, step: int, state: dict[str, Any]) -> None:
        """Return to the state of a snapshot, because the run goes back to ``step``."""
        if self.forecast is not None:
            self.forecast.note_failure(step)
        first = self._not_learning.first
        self.load_state(state)
        self._not_learning.keep_first(first)

    def metrics(self, pending: Record | None = None) -> dict[str, float]:
        """Return what is worth a plot.

        Args:
            pending: the newest record, if it was not observed yet.
        """
        ratio = self._loss.ratio if pending is None else self._loss.ratio_of(pending.loss)
        metrics = {"healing/loss_spike_ratio": ratio}
        if math.isfinite(self._gap.gap):
            metrics["healing/eval_gap"] = self._gap.gap
        if self.forecast is not None and math.isfinite(self.forecast.probability):
            metrics["healing/forecast"] = self.forecast.probability
        return metrics

    def state(self) -> dict[str, Any]:
        """Return the state of every detector, as values that JSON has."""
        state = {name: detector.state() for name, detector in self.detectors.items()}
        return {**state, "health": self._health.state()}

    def load_state(self, state: dict[str, Any]) -> None:
        """Return every detector to a state; one that the state does not know stays as it is."""
        for name, detector in self.detectors.items():
            if name in state:
                detector.load_state(state[name])
        if "health" in state:
            self._health.load_state(state["health"])


class LogDetector(Protocol):
    """Looks for one kind of symptom in the lines of a trainer's log.

    As :class:`heal.Detector`, for lines instead of records.
    """

    def observe(self, step: int, logs: Mapping[str, Any]) -> Finding | None: ...
    def state(self) -> dict[str, Any]: ...
    def load_state(self, state: dict[str, Any]) -> None: ...


class LogWatch:
    """All detectors that read a trainer's log. Pure.

    The names in the log decide which of them find anything, whatever the class of the trainer.

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
        """Return what the detectors find in a line; only its finite numbers are read."""
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
