"""Puts the detectors together that read a trainer's log: its lines in, findings out. Pure.

Which of them have anything to say follows from the names in the log, so that any trainer that
logs them is watched, whatever its class.
"""

import math
from collections.abc import Mapping
from typing import Any, Protocol

from heal.causes import Finding
from heal.config import HealingConfig
from heal.detectors.likelihood import LikelihoodCollapse
from heal.detectors.preference import ChancePlateau, PreferenceInversion
from heal.detectors.rewards import KlBlowUp, RewardCollapse


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
