"""What was tried so far. Survives rollbacks: a ladder that forgot its rungs would never end.

Plain values, saved with the run. :func:`heal.policy.decide` reads it and changes nothing; the loop
notes every clean step (:meth:`History.note_step`) and every plan (:meth:`History.note_plan`).
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any

from heal.actions import (
    Action,
    Backoff,
    Plan,
    Rollback,
    action_to_json,
    changes_training,
    is_custom,
)
from heal.causes import UNTRAINED, Cause, Family, Finding, Severity
from heal.config import HealingConfig

if TYPE_CHECKING:
    from heal.diagnose import Diagnosis

MAX_SUSPECTS = 32
"""Warnings kept for the diagnosis of what follows them."""

ATTEMPTS_RESET_STEPS = 1000
"""New steps, beyond the furthest one reached, after which all attempts are available again."""


@dataclass(slots=True)
class Incident:
    """One stretch of trouble, from its first plan until enough clean steps have passed."""

    family: str
    first_step: int
    last_step: int
    """The furthest step at which its trouble was seen."""
    resume_step: int
    """The first step that ran under the newest plan."""
    causes: list[str] = field(default_factory=list)
    plans: list[list[dict[str, Any]]] = field(default_factory=list)
    effects: list[list[bool]] = field(default_factory=list)
    loss_before: float | None = None
    """The level of the loss before the trouble, where it is known; and its noise."""
    noise: float = 0.0

    @property
    def rollbacks(self) -> int:
        return self.count(Rollback)

    @property
    def waited_seconds(self) -> float:
        waits = (a for plan in self.plans for a in plan if a["action"] == Backoff.__name__)
        return float(sum(a["seconds"] for a in waits))

    def was_tried(self, plan: Plan) -> bool:
        """Return whether this very plan was carried out in this incident."""
        return [action_to_json(action) for action in plan] in self.plans

    def was_applied(self, action: Action) -> bool:
        """Return whether a plan of this incident had this very action."""
        return any(action_to_json(action) in plan for plan in self.plans)

    def count(self, action: type) -> int:
        """Return how many plans had such an action."""
        return sum(any(a["action"] == action.__name__ for a in plan) for plan in self.plans)

    def had_no_effect(self, action: type) -> bool:
        """Return whether an action was tried and reported that it can do no more."""
        return any(
            step["action"] == action.__name__ and not effect
            for plan, effects in zip(self.plans, self.effects, strict=True)
            for step, effect in zip(plan, effects, strict=False)
        )


@dataclass(slots=True)
class History:
    """Attempts, incidents and counts of one run."""

    attempts: int = 0
    """Plans that changed training since the budget was last whole."""
    total_attempts: int = 0
    furthest_step: int = -1
    attempt_mark: int = -1
    """The furthest step when the last attempt was made: progress is counted from there."""
    nan_count: int = 0
    """Steps skipped for NaN or Inf, and errors that say so."""
    nonfinite_errors: int = 0
    """Errors in a row that say NaN or Inf, as of anomaly detection; no step was taken since."""
    data_errors: int = 0
    consecutive_data_errors: int = 0
    data_error_step: int = -1
    """Where the last one was; steps before it come again after a rollback and prove nothing."""
    incidents: list[Incident] = field(default_factory=list)
    """Those not yet over, at most one per family."""
    closed_incidents: int = 0
    suspects: list[tuple[str, int]] = field(default_factory=list)
    """Cause and step of recent warnings."""
    was_fruitless: bool = False
    """Whether damage came again after a rollback, before anything was learned."""

    def open_incident(self, family: Family) -> Incident | None:
        """Return the incident of a family that is not over yet."""
        return next((i for i in self.incidents if i.family == family.value), None)

    def is_fruitless(self, family: Family) -> bool:
        """Return whether a rollback was tried in the open incident, or found to be of no use."""
        incident = self.open_incident(family)
        return self.was_fruitless or (incident is not None and incident.rollbacks > 0)

    def knows_fruitless(self, diagnosis: "Diagnosis") -> bool:
        """Return whether it was reported before that nothing is learned, and damage comes again."""
        return self.was_fruitless and _is_fruitless(diagnosis)

    def note_step(self, step: int, config: HealingConfig) -> list[Incident]:
        """Count a clean step: incidents end, attempts are won back. Return those that ended."""
        over: list[Incident] = []
        self.furthest_step = max(self.furthest_step, step)
        self.nonfinite_errors = 0
        if step >= self.data_error_step:
            self.consecutive_data_errors = 0
        if self.incidents:
            over = [i for i in self.incidents if step >= i.last_step + config.incident_steps]
            self.closed_incidents += len(over)
            self.incidents = [i for i in self.incidents if i not in over]
        if self.attempts and step >= self.attempt_mark + ATTEMPTS_RESET_STEPS:
            self.attempts = 0
        return over

    def note_findings(self, findings: Sequence[Finding]) -> None:
        """Remember warnings: they may explain what comes later."""
        for finding in findings:
            self.nan_count += finding.cause.about.is_nonfinite
            if finding.severity >= Severity.WARN:
                self.suspects.append((finding.cause.value, finding.step))
        del self.suspects[:-MAX_SUSPECTS]

    def note_nonfinite_error(self) -> int:
        """Count an exception because of NaN or Inf; return how many came in a row."""
        self.nan_count += 1
        self.nonfinite_errors += 1
        return self.nonfinite_errors

    def note_plan(
        self,
        diagnosis: "Diagnosis",
        plan: Plan,
        effects: Sequence[bool] = (),
        first_pending: int = 0,
    ) -> None:
        """Remember a plan that was carried out.

        Args:
            diagnosis: why.
            plan: what was done.
            effects: what each ``apply`` returned; all true if left out.
            first_pending: the first step whose record could not be read yet.
        """
        cause, step = diagnosis.cause, diagnosis.step
        family = cause.about.family
        self.furthest_step = max(self.furthest_step, step)
        if family is Family.DATA:
            self.data_errors += 1
            self.consecutive_data_errors += 1
            self.data_error_step = step
        if _is_fruitless(diagnosis):
            self.was_fruitless = True
            for affected in self.incidents:
                affected.causes.append(cause.value)
        if not changes_training(plan) and family is not Family.WAIT:
            return
        incident = self.open_incident(family)
        if incident is None:
            incident = Incident(family.value, min(step, diagnosis.bad_step), step, step)
            self.incidents.append(incident)
        incident.last_step = max(incident.last_step, step)
        target = next((a.before_step for a in plan if isinstance(a, Rollback)), None)
        incident.resume_step = max(step + 1, first_pending) if target is None else target
        incident.causes.append(cause.value)
        incident.plans.append([action_to_json(action) for action in plan])
        incident.effects.append([bool(e) for e in effects] or [True] * len(plan))
        level = diagnosis.evidence.get("usual_loss")
        if incident.loss_before is None and isinstance(level, float):
            noise = diagnosis.evidence.get("noise")
            incident.loss_before = level
            incident.noise = noise if isinstance(noise, float) else 0.0
        if family is Family.NUMERIC or any(is_custom(action) for action in plan):
            self.attempts += 1
            self.total_attempts += 1
            self.attempt_mark = self.furthest_step

    def state(self) -> dict[str, Any]:
        """Return everything as values that JSON has."""
        state = asdict(self)
        state["suspects"] = [list(suspect) for suspect in self.suspects]
        return state

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> "History":
        """Return the history that :meth:`state` described; unknown entries are left out."""
        known = {f.name for f in fields(cls)}
        values = {name: value for name, value in state.items() if name in known}
        values["incidents"] = [Incident(**incident) for incident in values.get("incidents", [])]
        values["suspects"] = [(str(c), int(s)) for c, s in values.get("suspects", [])]
        return cls(**values)


def _is_fruitless(diagnosis: "Diagnosis") -> bool:
    return diagnosis.cause is Cause.NOT_LEARNING and UNTRAINED in diagnosis.evidence
