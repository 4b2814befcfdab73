"""Probes that a healer runs every so many steps: it logs their numbers and reports an alarm.

What a probe measures is its own affair (see :mod:`heal.lab.probes`); nothing here changes training.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from heal.causes import Cause, Finding, Severity
from heal.journal import Journal, Notes
from heal.lab.probes.batch import undisturbed
from heal.ranks import Ranks


@dataclass(slots=True)
class AttachedProbe:
    """One probe, what it measured last, and whether its alarm is on."""

    name: str
    look: Callable[[], Any]
    every: int
    alarm: Callable[[Any], bool] | None
    numbers: dict[str, float] = field(default_factory=dict)
    is_alarmed: bool = False


class AttachedProbes:
    """All probes of a run; one that fails on a rank ends on all, and an alarm of one is one of all.

    A probe leaves the buffers and modes of ``model``, and all generators, as they were.
    """

    def __init__(self, model: Module, ranks: Ranks, journal: Journal, notes: Notes) -> None:
        self._model = model
        self._ranks = ranks
        self._journal = journal
        self._notes = notes
        self._probes: dict[str, AttachedProbe] = {}

    def add(self, probe: AttachedProbe) -> None:
        """Run a probe from now on.

        Raises:
            ValueError: the name is taken or empty, or ``every`` is below 1.
        """
        if not probe.name or probe.name in self._probes:
            raise ValueError(f"probe: expected a name that no other probe has, got {probe.name!r}")
        if probe.every < 1:
            raise ValueError(f"every: expected at least 1 step, got {probe.every}")
        self._probes[probe.name] = probe

    def are_due(self, steps_done: int) -> bool:
        """Return whether a probe is to look after so many steps."""
        return any(steps_done % probe.every == 0 for probe in self._probes.values())

    def next_due(self, steps_done: int) -> list[int]:
        """Return for each probe after how many steps it looks next."""
        return [(steps_done // probe.every + 1) * probe.every for probe in self._probes.values()]

    def look(self, steps_done: int) -> list[Finding]:
        """Run the probes that are due after so many steps; return the alarms that have come on."""
        due = [probe for probe in self._probes.values() if steps_done % probe.every == 0]
        found = [self._run(probe, steps_done - 1) for probe in due]
        return [alert for alert in found if alert is not None]

    def metrics(self) -> dict[str, float]:
        """Return what each probe found last, as ``probe/<name>`` or ``probe/<name>/<number>``."""
        return {
            f"probe/{probe.name}/{key}" if key else f"probe/{probe.name}": value
            for probe in self._probes.values()
            for key, value in probe.numbers.items()
        }

    def _run(self, probe: AttachedProbe, step: int) -> Finding | None:
        began = time.monotonic()
        failure, is_alarmed, numbers = "", False, None
        try:
            with undisturbed(self._model, hides_gradients=False), torch.enable_grad():
                found = probe.look()
                if found is not None:
                    numbers = numbers_of(found)
                    is_alarmed = probe.alarm is not None and bool(probe.alarm(found))
        except Exception as error:  # a probe must not end the run
            failure = repr(error)
        if self._ranks.any_has(bool(failure)):
            del self._probes[probe.name]
            why = failure or "it failed on another rank"
            self._notes.add(f"the probe {probe.name!r} failed and is not run again: {why}")
            return None
        is_alarmed = self._ranks.any_has(is_alarmed)
        if numbers is not None:
            probe.numbers = numbers
            seconds = round(time.monotonic() - began, 6)
            found = numbers.get("", numbers)
            self._journal.event("probe", step, probe=probe.name, found=found, seconds=seconds)
        was_alarmed, probe.is_alarmed = probe.is_alarmed, is_alarmed
        if not is_alarmed or was_alarmed:  # once, until it has been off again
            return None
        return Finding(
            cause=Cause.PROBE_ALARM,
            step=step,
            bad_step=step,
            severity=Severity.WARN,
            evidence={"probe": probe.name, "found": probe.numbers.get("", probe.numbers)},
        )


def numbers_of(found: Any) -> dict[str, float]:
    """Return the plain numbers in what a probe found; one that has no name is under "".

    Of a dataclass these are its fields and its properties. Tensors of one element are read.

    Raises:
        TypeError: it is neither a number nor has names for some.
    """
    if _is_number(found):
        return {"": float(found)}
    if isinstance(found, Mapping):
        named = {str(key): value for key, value in found.items()}
    elif is_dataclass(found) and not isinstance(found, type):
        properties = [k for k, v in vars(type(found)).items() if isinstance(v, property)]
        named = {k: getattr(found, k) for k in (*(f.name for f in fields(found)), *properties)}
    else:
        raise TypeError(
            f"look(): expected a number, a mapping or a dataclass, got {type(found).__name__}"
        )
    return {name: float(value) for name, value in named.items() if _is_number(value)}


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.numel() == 1)
