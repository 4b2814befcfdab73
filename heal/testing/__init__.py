"""Breaks a run on purpose: faults by step or by rate, seeded, for drills and tests."""

from heal.testing.chaos import Chaos
from heal.testing.faults import KINDS, Fault, Strike

__all__ = ["KINDS", "Chaos", "Fault", "Strike"]
