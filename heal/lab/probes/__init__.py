"""Looks at a run more closely than every step could afford: on demand, or every so many steps.

A probe leaves training bit by bit as it was: gradients, buffers, generators and modes. It waits for
the device, so it is for now and then. What each is good for, and what it costs: docs/probes.md.
"""

from heal.lab.probes.batch import (
    Anchor,
    AnchoredRecovery,
    NoiseScale,
    Sharpness,
    every,
    fisher_diagonal,
    importance,
    noise_scale,
    sharpness,
    undisturbed,
)
from heal.lab.probes.state import (
    LyapunovMeter,
    OptimizerHealth,
    Oscillation,
    optimizer_health,
    oscillation,
)

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
