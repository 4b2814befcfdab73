"""From events to incidents: what happened, evidence, cause, action, cost and outcome."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
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

SEVERITY = {kind: -i for i, kind in enumerate(KINDS)}
MAX_INCIDENTS = 500  # rows of the table; the mildest are left out first
MAX_MARKS = 4000  # marks on the charts
MAX_SESSIONS = 100
RECENT = 8  # incidents that an event of another rank may still belong to


class Event:
    """A line of the journal, with what a reader needs made safe to use.

    Attributes:
        kind: the most severe thing that was done.
        key: the same on every rank that did the same.
    """

    def __init__(self, rank: int, line: Mapping[str, Any]) -> None:
        self.rank = rank
        self.line = line
        self.step = whole(line.get("step")) or 0
        self.time = seconds_of(line.get("time"))
        self.name = words.shorten(str(line.get("event", "note")), 60)
        self.failure = words.shorten(str(line.get("failure", "")), 60)
        bad_step, noticed_at = whole(line.get("bad_step")), whole(line.get("noticed_at"))
        is_known = bad_step is not None and bad_step >= 0
        self.bad_step = min(bad_step or 0, self.step) if is_known else self.step
        self.noticed_at = self.step + 1 if noticed_at is None else noticed_at
        self.resumed_at = whole(line.get("resumed_at"))
        plan, evidence = line.get("plan"), line.get("evidence")
        self.plan = [a for a in plan if isinstance(a, Mapping)] if isinstance(plan, list) else []
        self.evidence: Mapping[str, Any] = evidence if isinstance(evidence, Mapping) else {}
        self.is_trouble = self.name in ("recovery", "alert") and bool(self.failure)
        self.rolled_back = any(a.get("action") == "Rollback" and a.get("effect") for a in self.plan)
        self.kind = "start" if self.name == "started" else "note"
        self.key = ""
        if self.is_trouble:
            done = map(words.action_kind, self.plan)
            self.kind = max(done, key=lambda kind: SEVERITY[kind], default="alert")
            facts = [self.failure, self.step, self.resumed_at, self.plan]
            self.key = json.dumps(facts, default=str)


class Incident:
    """Events that belong together; those of other ranks that say the same are counted once.

    Attributes:
        decisive: the newest of the most severe events.
        outcome: the event that says whether the loss came back; None if the journal has none.
    """

    def __init__(self, first: Event) -> None:
        self.first = self.decisive = first
        self.first_step, self.last_step = first.bad_step, first.step
        self.ranks: set[int] = set()
        self.failures: dict[str, Event] = {}
        self.actions: Counter[str] = Counter()
        self.undone: list[tuple[int, int]] = []
        self.outcome: Mapping[str, Any] | None = None
        self.experiments: list[str] = []
        self.is_closed = False
        self.came_back = self._skipped_batches = 0
        self._skipped: set[int] = set()
        self._seconds = 0.0
        self._ranks_of: dict[str, set[int]] = {}

    def takes(self, event: Event) -> bool:
        """Return whether an event belongs to this incident."""
        both = {event.failure, self.first.failure}
        is_alike = len(both) == 1 or both <= words.NUMERIC
        reaches_back = bool(self.undone) or event.step >= self.first_step - NEAR_STEPS
        is_near = event.bad_step <= self.last_step + NEAR_STEPS and reaches_back
        return is_alike and is_near and not self.is_closed

    def is_echo(self, event: Event) -> bool:
        """Return whether another rank has logged this too."""
        ranks = self._ranks_of.get(event.key, ())
        return bool(ranks) and event.rank not in ranks

    def add(self, event: Event) -> None:
        """Take an event in."""
        is_echo = self.is_echo(event)
        self.ranks.add(event.rank)
        self._ranks_of.setdefault(event.key, set()).add(event.rank)
        if is_echo:
            return
        self.came_back += bool(self.undone) and event.rank == self.first.rank
        self.first_step = min(self.first_step, event.bad_step)
        self.last_step = max(self.last_step, event.step)
        is_decisive = SEVERITY[event.kind] >= SEVERITY[self.decisive.kind]
        if is_decisive:
            self.decisive = event
        if is_decisive or event.failure not in self.failures:
            self.failures[event.failure] = event
        seconds = number(event.line.get("seconds"))
        self._seconds += seconds if 0.0 < seconds < 1e12 else 0.0  # not NaN either
        for action in event.plan:
            self.actions[words.action_words(action, event.resumed_at)] += 1
            kind = words.action_kind(action)
            if kind == "refused":
                self._skipped.add(event.step)
            elif kind == "data" and not event.rolled_back:
                first, last = whole(action.get("first_step")), whole(action.get("last_step"))
                self._skipped_batches += max(0, (last or 0) - (first or 0) + 1)
        if event.rolled_back and event.resumed_at is not None:
            self.undone.append((event.resumed_at, max(event.resumed_at, event.noticed_at)))

    def to_json(self, step_seconds: float, last_step: int, is_over: bool) -> dict[str, Any]:
        """Return the incident as every form of the report shows it.

        ``step_seconds`` prices lost steps; ``last_step`` is the furthest that the run has reached.
        """
        decisive, after = self.decisive, self.outcome or {}
        outcome, sentence = self._ending(last_step, is_over)
        # Steps done again, and skipped ones that were not done again anyway.
        lost = sum(end - start for start, end in self.undone)
        lost += sum(not any(a <= s < b for a, b in self.undone) for s in self._skipped)
        seconds = round(self._seconds + lost * step_seconds, 3)
        until = f" to {self.last_step:,}" if self.last_step > self.first_step else ""
        return {
            "first_step": self.first_step,
            "last_step": self.last_step,
            "resumed_at": decisive.resumed_at if self.undone else None,
            "ranks": sorted(self.ranks),
            "kind": decisive.kind,
            "kind_label": KINDS[decisive.kind],
            "failures": list(self.failures),
            "steps": f"{self.first_step:,}{until}",
            "what": words.sentence(*map(words.title, self.failures), link=", then "),
            "cause": words.show(str(decisive.line.get("diagnosis", ""))),
            "confidence": decisive.line.get("confidence"),
            "reference": words.show(str(decisive.line.get("reference") or "")),
            "evidence": [
                {"of": f, "title": words.title(f), "values": words.evidence_words(e.evidence)}
                for f, e in self.failures.items()
            ],
            "actions": [{"text": phrase, "times": n} for phrase, n in self.actions.items()],
            "experiments": self.experiments,
            "lost_steps": lost,
            "skipped_batches": self._skipped_batches,
            "lost_seconds": seconds,
            "cost": words.cost(lost, self._skipped_batches, seconds),
            "came_back": self.came_back,
            "outcome": outcome,
            "outcome_label": OUTCOMES[outcome],
            "outcome_text": sentence,
            "loss_before": after.get("loss_before"),
            "loss_after": after.get("loss"),
            "time": self.first.time,
        }

    def _ending(self, last_step: int, is_over: bool) -> tuple[str, str]:
        """Return how it ended, as a key of :data:`OUTCOMES` and as a sentence."""
        kind, went_on = self.decisive.kind, last_step > self.last_step
        if kind == "halt":
            if last_step >= self.decisive.noticed_at:  # records come some steps late
                return "resumed", "The run stopped here. A later start went further."
            return "ended", "The run stopped here."
        if kind == "alert":
            return "noted", "Nothing was changed."
        if self.outcome is None and not went_on:
            if is_over:
                return "open", "The run ended too soon after it to know."
            return "open", "Training has not passed this step yet."
        if kind == "refused":
            steps = "steps" if len(self._skipped) > 1 else "step"
            return "contained", f"The {steps} changed nothing; training went on."
        if kind == "data":
            return "dropped", "Training went on with the next batch."
        again = f" It came back {words.count(self.came_back, 'time')}." * bool(self.came_back)
        if self.outcome is not None:
            key = "healed" if self.outcome.get("healed") else "unhealed"
            return key, words.outcome_words(self.outcome) + again
        key = "undone" if self.undone else "passed"
        return key, f"Training passed step {self.last_step} and went on.{again}"


class Story:
    """What the events of all ranks say; they are added in the order of time.

    Attributes:
        incidents: in the order in which they began.
        sessions: the events ``started``, of all ranks.
        marks: events for the charts, each with its incident.
        experiments: what each showed, by step and suspicion; those of several ranks are one.
        tensors: how often incidents name each, by cause.
    """

    def __init__(self) -> None:
        self.incidents: list[Incident] = []
        self.marks: list[tuple[Event, Incident | None]] = []
        self.sessions: list[Event] = []
        self.experiments: dict[tuple[int, str], Event] = {}
        self.tensors: dict[str, Counter[str]] = {}
        self.ranks: set[int] = set()
        self.goal: int | None = None
        self.events = self.left_out = self.marks_left_out = 0
        self.first_time: float | None = None
        self.last_time: float | None = None
        self.last_step = -1
        self._pending: dict[str, str] = {}  # experiments before the incident that they are about

    def add(self, event: Event) -> None:
        """Take in one event."""
        self.events += 1
        self.ranks.add(event.rank)
        if event.time is not None:
            self.first_time = event.time if self.first_time is None else self.first_time
            self.last_time = event.time
        self.last_step = max(self.last_step, event.step)
        if event.name == "goal":
            self.goal = whole(event.line.get("steps"))
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

    def finish(self) -> None:
        """Leave out what is too much; call after the last event."""
        self._thin_marks()
        kept = most_severe([i.decisive.kind for i in self.incidents][::-1], MAX_INCIDENTS)
        self.left_out = len(self.incidents) - len(kept)
        self.incidents = [self.incidents[::-1][i] for i in kept][::-1]

    def _place(self, event: Event) -> Incident:
        recent = self.incidents[-RECENT:]
        known = [i for i in recent if i.is_echo(event)] or [i for i in recent if i.takes(event)]
        if not known:
            known = [Incident(event)]
            self.incidents += known
        incident = known[-1]
        incident.add(event)
        if event.failure in self._pending:
            incident.experiments.append(self._pending.pop(event.failure))
        # Old versions named the first gradient of a NaN loss, which makes every gradient NaN.
        is_first = event.failure == "nonfinite_loss" and "tensor_index" in event.evidence
        tensor = event.evidence.get("tensor")
        if tensor and not is_first:
            counts = self.tensors.setdefault(words.shorten(str(tensor), 200), Counter())
            counts[event.failure] += 1
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
        suspicion, text = str(event.line.get("suspicion", "")), words.experiment_words(event.line)
        if (event.step, suspicion) in self.experiments:
            return  # of another rank
        self.experiments[event.step, suspicion] = event
        near = [i for i in self.incidents[-RECENT:] if suspicion in i.failures]
        if near and near[-1].last_step >= (whole(event.line.get("since")) or 0):
            near[-1].experiments.append(text)
        else:
            self._pending[suspicion] = text

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
