"""One incident: the events that belong together, what they cost and how it ended."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from heal.journal.json_lines import number
from heal.report import words
from heal.report.read import seconds_of, whole

NEAR_STEPS = 5
"""Trouble that begins this close to the last belongs to it: records arrive a few steps late."""

KINDS = {
    "halt": "run stopped",
    "rollback": "rolled back",
    "soften": "softer steps",
    "memory": "memory",
    "wait": "waited",
    "data": "data skipped",
    "refused": "step refused",
    "alert": "noted",
    "start": "started",
    "note": "note",
}
"""Kinds of events, the gravest first, and what they are called."""

KIND_OF_ACTION = {
    "Halt": "halt",
    "Rollback": "rollback",
    "PerturbWeights": "rollback",
    "TightenClip": "soften",
    "AnchorWeights": "soften",
    "ScaleLr": "soften",
    "HoldLr": "soften",
    "ShrinkBatch": "memory",
    "CheckpointActivations": "memory",
    "ClearCache": "memory",
    "Backoff": "wait",
    "SkipBatches": "data",
    "Refuse": "refused",
}
GRAVITY = {kind: -i for i, kind in enumerate(KINDS)}
INCIDENT_EVENTS = ("recovery", "alert")


@dataclass(slots=True)
class Event:
    """A line of the journal, with what a reader needs made safe to use."""

    rank: int
    step: int
    time: float | None
    name: str
    line: Mapping[str, Any]
    failure: str = ""
    bad_step: int = 0
    noticed_at: int = 0
    resumed_at: int | None = None
    plan: list[Mapping[str, Any]] = field(default_factory=list)

    @classmethod
    def of_line(cls, rank: int, line: Mapping[str, Any]) -> "Event":
        """Read a line, whatever is in it."""
        step = whole(line.get("step")) or 0
        plan = line.get("plan")
        bad_step, noticed_at = whole(line.get("bad_step")), whole(line.get("noticed_at"))
        return cls(
            rank,
            step,
            seconds_of(line.get("time")),
            words.shorten(str(line.get("event", "note")), 60),
            line,
            words.shorten(str(line.get("failure", "")), 60),
            step if bad_step is None or bad_step < 0 else min(bad_step, step),
            step + 1 if noticed_at is None else noticed_at,
            whole(line.get("resumed_at")),
            [a for a in plan if isinstance(a, Mapping)] if isinstance(plan, list) else [],
        )

    @property
    def is_trouble(self) -> bool:
        return self.name in INCIDENT_EVENTS and bool(self.failure)

    @property
    def kind(self) -> str:
        """The gravest thing that was done."""
        if not self.is_trouble:
            return "start" if self.name == "started" else "note"
        done = [KIND_OF_ACTION.get(str(a.get("action")), "note") for a in self.plan]
        return max(done, key=lambda kind: GRAVITY[kind], default="alert")

    @property
    def rolled_back(self) -> bool:
        return any(a.get("action") == "Rollback" and a.get("effect") for a in self.plan)

    def evidence(self) -> Mapping[str, Any]:
        """What was measured."""
        found = self.line.get("evidence")
        return found if isinstance(found, Mapping) else {}

    def key(self) -> str:
        """The same on every rank that did the same."""
        return json.dumps([self.failure, self.step, self.resumed_at, self.plan], default=str)


@dataclass(slots=True)
class Incident:
    """Events that belong together; those of other ranks that say the same are counted once."""

    first: Event
    decisive: Event
    last_step: int
    first_step: int
    ranks: set[int] = field(default_factory=set)
    failures: dict[str, Event] = field(default_factory=dict)
    seen: dict[str, set[int]] = field(default_factory=dict)
    actions: dict[str, int] = field(default_factory=dict)
    refused: set[int] = field(default_factory=set)
    undone: list[tuple[int, int]] = field(default_factory=list)
    skipped_batches: int = 0
    action_seconds: float = 0.0
    came_back: int = 0
    is_closed: bool = False
    is_recovered: bool | None = None
    """Whether the loss came back; None if the journal does not say."""
    losses: tuple[float, float] = (0.0, 0.0)
    """The loss afterwards, and before the trouble."""

    @classmethod
    def of_event(cls, event: Event) -> "Incident":
        """Open an incident."""
        incident = cls(event, event, event.step, event.bad_step)
        incident.add(event)
        return incident

    def takes(self, event: Event) -> bool:
        """Tell whether an event belongs to this incident."""
        if self.is_closed:
            return False
        both_numeric = words.is_numeric(event.failure) and words.is_numeric(self.first.failure)
        if not both_numeric and event.failure != self.first.failure:
            return False
        reaches_back = bool(self.undone) or event.step >= self.first_step - NEAR_STEPS
        return event.bad_step <= self.last_step + NEAR_STEPS and reaches_back

    def add(self, event: Event) -> None:
        """Take an event in."""
        self.ranks.add(event.rank)
        ranks = self.seen.setdefault(event.key(), set())
        is_echo = bool(ranks) and event.rank not in ranks
        ranks.add(event.rank)
        if is_echo:
            return
        if self.undone and event.rank == self.first.rank:
            self.came_back += 1
        self.first_step = min(self.first_step, event.bad_step)
        self.last_step = max(self.last_step, event.step)
        self.failures.setdefault(event.failure, event)
        if GRAVITY[event.kind] >= GRAVITY[self.decisive.kind]:
            self.decisive = event
            self.failures[event.failure] = event
        self._add_costs(event)

    def note_outcome(self, line: Mapping[str, Any]) -> None:
        """Take in what the journal says of the loss some time after the last rollback."""
        self.is_recovered = bool(line.get("healed"))
        self.losses = _finite(line.get("loss")), _finite(line.get("loss_before"))

    def has(self, event: Event) -> bool:
        """Tell whether another rank has told of this."""
        ranks = self.seen.get(event.key())
        return ranks is not None and event.rank not in ranks

    def _add_costs(self, event: Event) -> None:
        self.action_seconds += max(0.0, _finite(event.line.get("seconds")))
        for action in event.plan:
            name = action.get("action")
            phrase = words.action_words(action, event.resumed_at if name == "Rollback" else None)
            self.actions[phrase] = self.actions.get(phrase, 0) + 1
            if name == "Refuse":
                self.refused.add(event.step)
            elif name == "SkipBatches" and not event.rolled_back:
                first, last = whole(action.get("first_step")), whole(action.get("last_step"))
                self.skipped_batches += max(0, (last or 0) - (first or 0) + 1)
        if event.rolled_back and event.resumed_at is not None:
            self.undone.append((event.resumed_at, max(event.resumed_at, event.noticed_at)))

    @property
    def lost_steps(self) -> int:
        """Steps done again, and refused ones that were not done again anyhow."""
        again = sum(end - start for start, end in self.undone)
        alone = [s for s in self.refused if not any(a <= s < b for a, b in self.undone)]
        return again + len(alone)

    @property
    def kind(self) -> str:
        return self.decisive.kind


def _finite(value: Any) -> float:
    seconds = number(value)
    return seconds if abs(seconds) < 1e12 else 0.0  # also if it is NaN
