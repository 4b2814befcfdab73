"""Breaks a run on purpose: faults by step or by rate, seeded, for drills and tests."""

from heal.testing.faults import KINDS, Chaos, Fault, Strike

__all__ = ["KINDS", "Chaos", "Fault", "Strike"]
