"""Looks at a run more closely than every step could afford: on demand, or every so many steps.

A probe leaves training bit by bit as it was: gradients, buffers, generators and modes. It waits for
the device, so it is for now and then. What each is good for, and what it costs: docs/probes.md.
"""

from heal.lab.probes.consolidation import Anchor, AnchoredRecovery, fisher_diagonal, importance
from heal.lab.probes.optimizer_state import OptimizerHealth, optimizer_health
from heal.lab.probes.series import LyapunovMeter, NoiseScale, Oscillation, noise_scale, oscillation
from heal.lab.probes.sharpness import Sharpness, sharpness
from heal.lab.probes.undisturbed import every, undisturbed

__all__ = [
    "Anchor",
    "AnchoredRecovery",
    "LyapunovMeter",
    "NoiseScale",
    "OptimizerHealth",
    "Oscillation",
    "Sharpness",
    "every",
    "fisher_diagonal",
    "importance",
    "noise_scale",
    "optimizer_health",
    "oscillation",
    "sharpness",
    "undisturbed",
]
