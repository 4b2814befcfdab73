"""From events to incidents as they are told: what, evidence, cause, action, cost, outcome."""

from dataclasses import dataclass, field
from typing import Any

from heal.report import words
from heal.report.incident import GRAVITY, KINDS, Event, Incident
from heal.report.read import whole

MAX_INCIDENTS = 500  # rows of the table; the mildest are left out first
MAX_MARKS = 4000  # marks on the charts
MAX_SESSIONS = 100
RECENT = 8  # incidents that an event of another rank may still belong to


@dataclass(slots=True)
class Story:
    """What the events of all ranks say.

    Attributes:
        incidents: in the order in which they began.
        sessions: the events that tell of a start, of all ranks.
        marks: event and number of its incident, -1 without one.
    """

    incidents: list[Incident] = field(default_factory=list)
    marks: list[tuple[Event, Incident | None]] = field(default_factory=list)
    sessions: list[Event] = field(default_factory=list)
    goal: int | None = None
    events: int = 0
    left_out: int = 0
    marks_left_out: int = 0
    first_time: float | None = None
    last_time: float | None = None
    last_step: int = -1
    tensors: dict[str, dict[str, int]] = field(default_factory=dict)

    def tell(self, rank: int, line: dict[str, Any]) -> None:
        """Take in one event, in the order of time."""
        event = Event.of_line(rank, line)
        self.events += 1
        if event.time is not None:
            self.first_time = event.time if self.first_time is None else self.first_time
            self.last_time = event.time
        self.last_step = max(self.last_step, event.step)
        incident = self._place(event) if event.is_trouble else None
        if event.name == "started":
            self._start(event)
        elif event.name == "goal":
            self.goal = whole(line.get("steps"))
            return
        elif event.name == "outcome":
            undone = [i for i in self.incidents[-RECENT:] if i.undone and event.rank in i.ranks]
            if undone:
                undone[-1].note_outcome(line)
            return
        self.marks.append((event, incident))
        if len(self.marks) > 2 * MAX_MARKS:
            self._thin_marks()

    def finish(self) -> "Story":
        """Call after the last event."""
        self._thin_marks()
        if len(self.incidents) > MAX_INCIDENTS:
            gravest = sorted(
                range(len(self.incidents)),
                key=lambda i: (-GRAVITY[self.incidents[i].kind], -i),
            )[:MAX_INCIDENTS]
            self.left_out = len(self.incidents) - MAX_INCIDENTS
            self.incidents = [self.incidents[i] for i in sorted(gravest)]
        return self

    def _place(self, event: Event) -> Incident:
        recent = self.incidents[-RECENT:]
        incident = next((i for i in reversed(recent) if i.has(event)), None)
        if incident is None:
            incident = next((i for i in reversed(recent) if i.takes(event)), None)
        if incident is None:
            incident = Incident.of_event(event)
            self.incidents.append(incident)
        else:
            incident.add(event)
        tensor = event.evidence().get("tensor")
        if tensor:
            counts = self.tensors.setdefault(words.shorten(str(tensor), 200), {})
            counts[event.failure] = counts.get(event.failure, 0) + 1
        return incident

    def _start(self, event: Event) -> None:
        if len(self.sessions) < MAX_SESSIONS:
            self.sessions.append(event)
        if event.rank == 0:  # steps may count from the start again: nothing before belongs here
            for incident in self.incidents[-RECENT:]:
                incident.is_closed = True

    def _thin_marks(self) -> None:
        if len(self.marks) > MAX_MARKS:
            kept = sorted(
                range(len(self.marks)), key=lambda i: (-GRAVITY[self.marks[i][0].kind], i)
            )[:MAX_MARKS]
            self.marks_left_out += len(self.marks) - MAX_MARKS
            self.marks = [self.marks[i] for i in sorted(kept)]


def tell_incident(
    incident: Incident, step_seconds: float, last_step: int, is_over: bool
) -> dict[str, Any]:
    """Return an incident as the table shows it.

    Args:
        incident: which.
        step_seconds: what a step usually takes, to price those that were lost.
        last_step: the furthest step that the run is known to have reached.
        is_over: whether the run has ended.
    """
    decisive = incident.decisive
    outcome, told = _outcome(incident, last_step, is_over)
    chain = list(incident.failures)
    return {
        "first_step": incident.first_step,
        "last_step": incident.last_step,
        "resumed_at": decisive.resumed_at if incident.undone else None,
        "ranks": sorted(incident.ranks),
        "kind": incident.kind,
        "kind_label": KINDS[incident.kind],
        "failures": chain,
        "what": ", then ".join(
            words.title(f) if i == 0 else words.title(f)[:1].lower() + words.title(f)[1:]
            for i, f in enumerate(chain)
        ),
        "cause": words.show(str(decisive.line.get("diagnosis", ""))),
        "confidence": decisive.line.get("confidence"),
        "reference": words.show(str(decisive.line.get("reference") or "")),
        "evidence": [
            {"of": f, "title": words.title(f), "values": words.evidence_words(e.evidence())}
            for f, e in incident.failures.items()
        ],
        "actions": [{"text": phrase, "times": times} for phrase, times in incident.actions.items()],
        "lost_steps": incident.lost_steps,
        "skipped_batches": incident.skipped_batches,
        "lost_seconds": round(incident.action_seconds + incident.lost_steps * step_seconds, 3),
        "came_back": incident.came_back,
        "outcome": outcome,
        "outcome_text": told,
        "time": incident.first.time,
    }


def _outcome(incident: Incident, last_step: int, is_over: bool) -> tuple[str, str]:
    went_on = last_step > incident.last_step
    if incident.kind == "halt":
        if went_on:
            return "resumed", "The run stopped here; started again later, it went further."
        return "ended", "The run stopped here."
    if incident.kind == "alert":
        return "noted", "Nothing had to be changed."
    if not went_on:
        if is_over:
            return "open", "The run ended before it could show."
        return "open", "Training has not yet passed this step."
    if incident.kind == "refused":
        many = len(incident.refused) > 1
        return "contained", f"The {'steps' if many else 'step'} changed nothing; training went on."
    if incident.kind == "data":
        return "healed", "Training went on with the next batch."
    again = (
        f" It came back {words.count(incident.came_back, 'time')}." if incident.came_back else ""
    )
    if incident.is_recovered is not None:
        now, before = incident.losses
        if incident.is_recovered:
            return "healed", f"The loss is back: {now:.3g}, was {before:.3g} before.{again}"
        return "unhealed", f"Not recovered: loss {now:.3g}, was {before:.3g} before.{again}"
    if incident.undone:
        return "undone", f"Training passed step {incident.last_step} and went on.{again}"
    return "healed", f"Training passed step {incident.last_step} and went on.{again}"
