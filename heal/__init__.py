"""Heals training runs: rolls back, lowers the learning rate or shrinks the batch when needed.

Decides what to do about trouble that :mod:`zclip` reports. Imports zclip, never the reverse.
Everything that a loop, a hook, a detector or an action of your own needs is a name of this package.
"""

from typing import TYPE_CHECKING

from heal.actions import (
    Action,
    AnchorWeights,
    Backoff,
    CheckpointActivations,
    ClearCache,
    Halt,
    HealingError,
    HoldLr,
    PerturbWeights,
    Plan,
    RelearnClip,
    Rollback,
    Run,
    ScaleLr,
    ShrinkBatch,
    Skip,
    SkipBatches,
    TakeSnapshot,
    TightenClip,
    WatchClosely,
)
from heal.causes import Cause, Finding, Severity
from heal.config import ConfigError, HealingConfig
from heal.detectors.watch import Detector
from heal.diagnose import Diagnosis
from heal.exit_codes import ExitCode
from heal.former import install, names_of
from heal.record import Flag, Record

if TYPE_CHECKING:
    from heal.healer import Healer
    from heal.integrations.lightning import SelfHealingLightningCallback
    from heal.integrations.transformers import SelfHealingCallback, SelfHealingTrainer

NEEDS_TORCH: dict[str, str] = {
    "__version__": "zclip.version",
    "Healer": "heal.healer",
    "SelfHealingCallback": "heal.integrations.transformers",
    "SelfHealingLightningCallback": "heal.integrations.lightning",
    "SelfHealingTrainer": "heal.integrations.transformers",
}
"""Public names that need torch, some transformers or Lightning too, and their modules: loaded on
first use, so that the pure half and the command line answer at once."""

__all__ = [
    "Action",
    "AnchorWeights",
    "Backoff",
    "Cause",
    "CheckpointActivations",
    "ClearCache",
    "ConfigError",
    "Detector",
    "Diagnosis",
    "ExitCode",
    "Finding",
    "Flag",
    "Halt",
    "Healer",
    "HealingConfig",
    "HealingError",
    "HoldLr",
    "PerturbWeights",
    "Plan",
    "Record",
    "RelearnClip",
    "Rollback",
    "Run",
    "ScaleLr",
    "SelfHealingCallback",
    "SelfHealingLightningCallback",
    "SelfHealingTrainer",
    "Severity",
    "ShrinkBatch",
    "Skip",
    "SkipBatches",
    "TakeSnapshot",
    "TightenClip",
    "WatchClosely",
]

install()
__getattr__ = names_of(__name__, NEEDS_TORCH)


def __dir__() -> list[str]:
    """Return the public names, those that are loaded on first use too."""
    return sorted({*globals(), *NEEDS_TORCH})
