"""From events to incidents: what happened, evidence, cause, action, cost and outcome."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from heal.json_lines import number
from heal.report import words
from heal.report.read import seconds_of, whole

NEAR_STEPS = 5
"""Trouble that begins this close to the last belongs to it: records arrive a few steps late."""

KINDS = {
    "halt": "run stopped",
    "rollback": "rolled back",
    "soften": "smaller steps",
    "memory": "memory",
    "wait": "waited",
    "data": "data dropped",
    "refused": "step skipped",
    "alert": "logged",
    "start": "started",
    "note": "note",
}
"""Kinds of events, the most severe first, and what they are called."""

OUTCOMES = {
    "healed": "healed",
    "unhealed": "not recovered",
    "undone": "rolled back (loss not checked)",
    "contained": "skipped on the device",
    "dropped": "bad data dropped",
    "passed": "worked around",
    "noted": "logged only",
    "resumed": "continued by a new start",
    "ended": "stopped the run",
    "open": "still open",
}
"""How an incident may end, and what that is called. "healed" needs a loss that came back."""

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
    "Skip": "refused",
    "Refuse": "refused",  # its name in journals of version 0.1
}
SEVERITY = {kind: -i for i, kind in enumerate(KINDS)}
INCIDENT_EVENTS = ("recovery", "alert")
MAX_INCIDENTS = 500  # rows of the table; the mildest are left out first
MAX_MARKS = 4000  # marks on the charts
MAX_SESSIONS = 100
RECENT = 8  # incidents that an event of another rank may still belong to


class Event:
    """A line of the journal, with what a reader needs made safe to use."""

    def __init__(self, rank: int, line: Mapping[str, Any]) -> None:
        plan, bad_step = line.get("plan"), whole(line.get("bad_step"))
        self.rank = rank
        self.line = line
        self.step = whole(line.get("step")) or 0
        self.time = seconds_of(line.get("time"))
        self.name = words.shorten(str(line.get("event", "note")), 60)
        self.failure = words.shorten(str(line.get("failure", "")), 60)
        is_known = bad_step is not None and bad_step >= 0
        self.bad_step = min(bad_step or 0, self.step) if is_known else self.step
        noticed_at = whole(line.get("noticed_at"))
        self.noticed_at = self.step + 1 if noticed_at is None else noticed_at
        self.resumed_at = whole(line.get("resumed_at"))
        self.plan = [a for a in plan if isinstance(a, Mapping)] if isinstance(plan, list) else []

    @property
    def is_trouble(self) -> bool:
        return self.name in INCIDENT_EVENTS and bool(self.failure)

    @property
    def kind(self) -> str:
        """The most severe thing that was done."""
        if not self.is_trouble:
            return "start" if self.name == "started" else "note"
        done = [KIND_OF_ACTION.get(str(a.get("action")), "note") for a in self.plan]
        return max(done, key=lambda kind: SEVERITY[kind], default="alert")

    @property
    def rolled_back(self) -> bool:
        return any(a.get("action") == "Rollback" and a.get("effect") for a in self.plan)

    @property
    def evidence(self) -> Mapping[str, Any]:
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
    skipped: set[int] = field(default_factory=set)
    undone: list[tuple[int, int]] = field(default_factory=list)
    skipped_batches: int = 0
    action_seconds: float = 0.0
    came_back: int = 0
    is_closed: bool = False
    outcome: Mapping[str, Any] | None = None
    """The event that says whether the loss came back; None if the journal has none."""
    experiments: list[str] = field(default_factory=list)

    def takes(self, event: Event) -> bool:
        """Return whether an event belongs to this incident."""
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
        is_decisive = SEVERITY[event.kind] >= SEVERITY[self.decisive.kind]
        if is_decisive:
            self.decisive = event
        if is_decisive or event.failure not in self.failures:
            self.failures[event.failure] = event
        self._add_costs(event)

    def has(self, event: Event) -> bool:
        """Return whether another rank has logged this too."""
        ranks = self.seen.get(event.key())
        return ranks is not None and event.rank not in ranks

    def _add_costs(self, event: Event) -> None:
        seconds = number(event.line.get("seconds"))
        self.action_seconds += seconds if 0.0 < seconds < 1e12 else 0.0  # not NaN either
        for action in event.plan:
            name = action.get("action")
            phrase = words.action_words(action, event.resumed_at if name == "Rollback" else None)
            self.actions[phrase] = self.actions.get(phrase, 0) + 1
            if name in ("Skip", "Refuse"):
                self.skipped.add(event.step)
            elif name == "SkipBatches" and not event.rolled_back:
                first, last = whole(action.get("first_step")), whole(action.get("last_step"))
                self.skipped_batches += max(0, (last or 0) - (first or 0) + 1)
        if event.rolled_back and event.resumed_at is not None:
            self.undone.append((event.resumed_at, max(event.resumed_at, event.noticed_at)))

    @property
    def lost_steps(self) -> int:
        """Steps done again, and skipped ones that were not done again anyway."""
        again = sum(end - start for start, end in self.undone)
        alone = [s for s in self.skipped if not any(a <= s < b for a, b in self.undone)]
        return again + len(alone)

    @property
    def kind(self) -> str:
        return self.decisive.kind


@dataclass(slots=True)
class Story:
    """What the events of all ranks say.

    Attributes:
        incidents: in the order in which they began.
        sessions: the events ``started``, of all ranks.
        marks: events for the charts, each with its incident.
        experiments: what each showed, by step and suspicion; those of several ranks are one.
    """

    incidents: list[Incident] = field(default_factory=list)
    marks: list[tuple[Event, Incident | None]] = field(default_factory=list)
    sessions: list[Event] = field(default_factory=list)
    experiments: dict[tuple[int, str], Event] = field(default_factory=dict)
    ranks: set[int] = field(default_factory=set)
    goal: int | None = None
    events: int = 0
    left_out: int = 0
    marks_left_out: int = 0
    first_time: float | None = None
    last_time: float | None = None
    last_step: int = -1
    tensors: dict[str, dict[str, int]] = field(default_factory=dict)
    _pending: dict[str, str] = field(default_factory=dict)

    def add(self, rank: int, line: dict[str, Any]) -> None:
        """Take in one event, in the order of time."""
        event = Event(rank, line)
        self.events += 1
        self.ranks.add(rank)
        if event.time is not None:
            self.first_time = event.time if self.first_time is None else self.first_time
            self.last_time = event.time
        self.last_step = max(self.last_step, event.step)
        if event.name == "goal":
            self.goal = whole(line.get("steps"))
            return
        if event.name == "outcome":
            self._note_outcome(event)
            return
        if event.name == "started":
            self._start(event)
        elif event.name == "experiment" and len(self.experiments) < MAX_SESSIONS:
            self._note_experiment(event)
        self.marks.append((event, self._place(event) if event.is_trouble else None))
        if len(self.marks) > 2 * MAX_MARKS:
            self._thin_marks()

    def finish(self) -> "Story":
        """Call after the last event."""
        self._thin_marks()
        kept = most_severe([i.kind for i in self.incidents][::-1], MAX_INCIDENTS)
        self.left_out = len(self.incidents) - len(kept)
        self.incidents = [self.incidents[::-1][i] for i in kept][::-1]
        return self

    def _place(self, event: Event) -> Incident:
        recent = self.incidents[-RECENT:]
        known = [i for i in recent if i.has(event)] or [i for i in recent if i.takes(event)]
        if not known:
            known = [Incident(event, event, event.step, event.bad_step)]
            self.incidents += known
        incident = known[-1]
        incident.add(event)
        if event.failure in self._pending:
            incident.experiments.append(self._pending.pop(event.failure))
        evidence = event.evidence
        # Old versions named the first gradient of a NaN loss, which makes every gradient NaN.
        is_first = event.failure == "nonfinite_loss" and "tensor_index" in evidence
        tensor = evidence.get("tensor")
        if tensor and not is_first:
            counts = self.tensors.setdefault(words.shorten(str(tensor), 200), {})
            counts[event.failure] = counts.get(event.failure, 0) + 1
        return incident

    def _note_outcome(self, event: Event) -> None:
        """Add it to the newest rollback, or to the one that began nearest to its first step."""
        undone = [i for i in self.incidents[-RECENT:] if i.undone and event.rank in i.ranks]
        first = whole(event.line.get("first_step"))
        if undone and first is not None:
            undone.sort(key=lambda i: -abs(i.first_step - first))
        if undone:
            undone[-1].outcome = event.line

    def _note_experiment(self, event: Event) -> None:
        """Add it to the incident that it is about; if there is none yet, to the next such one."""
        suspicion = str(event.line.get("suspicion", ""))
        if (event.step, suspicion) in self.experiments:
            return  # of another rank
        self.experiments[event.step, suspicion] = event
        since = whole(event.line.get("since")) or 0
        near = [i for i in self.incidents[-RECENT:] if suspicion in i.failures]
        if near and near[-1].last_step >= since:
            near[-1].experiments.append(words.experiment_words(event.line))
        else:
            self._pending[suspicion] = words.experiment_words(event.line)

    def _start(self, event: Event) -> None:
        if len(self.sessions) < MAX_SESSIONS:
            self.sessions.append(event)
        if event.rank == 0:  # steps may count from the start again: nothing before belongs here
            for incident in self.incidents[-RECENT:]:
                incident.is_closed = True

    def _thin_marks(self) -> None:
        kept = most_severe([event.kind for event, _ in self.marks], MAX_MARKS)
        self.marks_left_out += len(self.marks) - len(kept)
        self.marks = [self.marks[i] for i in kept]


def most_severe(kinds: Sequence[str], most: int) -> list[int]:
    """Return the places of the most severe kinds, in order; of equal ones the first."""
    return sorted(sorted(range(len(kinds)), key=lambda i: -SEVERITY[kinds[i]])[:most])


def describe(
    incident: Incident, step_seconds: float, last_step: int, is_over: bool
) -> dict[str, Any]:
    """Return an incident as every form of the report shows it.

    ``step_seconds`` prices lost steps; ``last_step`` is the furthest that the run has reached.
    """
    decisive = incident.decisive
    outcome, sentence = _outcome(incident, last_step, is_over)
    chain = list(incident.failures)
    seconds = round(incident.action_seconds + incident.lost_steps * step_seconds, 3)
    after = incident.outcome or {}
    return {
        "first_step": incident.first_step,
        "last_step": incident.last_step,
        "resumed_at": decisive.resumed_at if incident.undone else None,
        "ranks": sorted(incident.ranks),
        "kind": incident.kind,
        "kind_label": KINDS[incident.kind],
        "failures": chain,
        "steps": f"{incident.first_step:,}"
        + (f" to {incident.last_step:,}" if incident.last_step > incident.first_step else ""),
        "what": words.sentence(*map(words.title, chain), link=", then "),
        "cause": words.show(str(decisive.line.get("diagnosis", ""))),
        "confidence": decisive.line.get("confidence"),
        "reference": words.show(str(decisive.line.get("reference") or "")),
        "evidence": [
            {"of": f, "title": words.title(f), "values": words.evidence_words(e.evidence)}
            for f, e in incident.failures.items()
        ],
        "actions": [{"text": phrase, "times": times} for phrase, times in incident.actions.items()],
        "experiments": incident.experiments,
        "lost_steps": incident.lost_steps,
        "skipped_batches": incident.skipped_batches,
        "lost_seconds": seconds,
        "cost": words.cost(incident.lost_steps, incident.skipped_batches, seconds),
        "came_back": incident.came_back,
        "outcome": outcome,
        "outcome_label": OUTCOMES[outcome],
        "outcome_text": sentence,
        "loss_before": after.get("loss_before"),
        "loss_after": after.get("loss"),
        "time": incident.first.time,
    }


def _outcome(incident: Incident, last_step: int, is_over: bool) -> tuple[str, str]:
    """Return how an incident ended, as a key of :data:`OUTCOMES` and as a sentence."""
    went_on = last_step > incident.last_step
    if incident.kind == "halt":
        if went_on:
            return "resumed", "The run stopped here. A later start went further."
        return "ended", "The run stopped here."
    if incident.kind == "alert":
        return "noted", "Nothing was changed."
    if incident.outcome is None and not went_on:
        if is_over:
            return "open", "The run ended too soon after it to know."
        return "open", "Training has not passed this step yet."
    if incident.kind == "refused":
        steps = "steps" if len(incident.skipped) > 1 else "step"
        return "contained", f"The {steps} changed nothing; training went on."
    if incident.kind == "data":
        return "dropped", "Training went on with the next batch."
    again = f" It came back {words.count(incident.came_back, 'time')}." * bool(incident.came_back)
    if incident.outcome is not None:
        key = "healed" if incident.outcome.get("healed") else "unhealed"
        return key, words.outcome_words(incident.outcome) + again
    key = "undone" if incident.undone else "passed"
    return key, f"Training passed step {incident.last_step} and went on.{again}"
