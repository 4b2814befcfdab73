"""Heals training runs: rolls back, lowers the learning rate or shrinks the batch when needed.

Decides what to do about trouble that :mod:`zclip` reports. Imports zclip, never the reverse.
"""

from importlib import import_module
from typing import Any

from heal.config import HealingConfig

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
    "Healer",
    "HealingConfig",
    "SelfHealingCallback",
    "SelfHealingLightningCallback",
    "SelfHealingTrainer",
]


def __getattr__(name: str) -> Any:
    """Load on first use what needs torch."""
    if name in NEEDS_TORCH:
        return getattr(import_module(NEEDS_TORCH[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
