"""Findings or an exception in, one cause with evidence out. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from heal.causes import NOT_FINITE, PROOF, UNTRAINED, Cause, Family, Finding, Severity
from heal.exception_causes import LOADER_PHASES, classify, message_of, qualified_name
from heal.history import History

__all__ = ["Cause", "Diagnosis", "Severity", "diagnose", "diagnose_exception"]

MAX_MESSAGE = 500
"""Characters of an exception's message that are kept: torch prints whole memory tables."""

SUSPECT_STEPS = 300
"""For how long a warning may explain what follows: about three checks of the weights."""

ALONE, SUPPORTED = 0.7, 0.9
MEASURED = 0.99
"""Confidence: a statistical finding by itself, with another that agrees, and a fact."""


TOO_HIGH = (
    "updates with this learning rate damage the first weights again and again: start again with a "
    "rate ten times lower, or a hundred times, and with a warm-up; this run goes on as it is"
)

SEEN_AS = "seen_as"
"""The evidence that names the symptom by which NaN in the state was noticed."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Why a run is in trouble.

    ``bad_step`` is the first step that may have done damage; -1 if that has no meaning. ``step``
    is where it was noticed. ``streak`` counts how often in a row the trouble was seen.
    """

    cause: Cause
    evidence: dict[str, Any]
    confidence: float
    severity: Severity
    bad_step: int
    step: int = -1
    streak: int = 1

    @property
    def family(self) -> Family:
        return self.cause.about.family

    @property
    def is_proven(self) -> bool:
        """Whether an experiment has found the weights damaged."""
        return PROOF in self.evidence

    @property
    def is_of_state(self) -> bool:
        """Whether NaN or Inf was found in the state, where a symptom was seen."""
        return SEEN_AS in self.evidence

    @property
    def reference(self) -> str:
        return self.cause.about.reference

    @property
    def summary(self) -> str:
        """One sentence for people, with the evidence that has a name."""
        summary = self.cause.about.summary
        blames, where = self.evidence.get("blames"), self.evidence.get("tensor")
        if blames:
            return f"{summary} The cause is {blames}."
        return f"{summary} Tensor: {where}." if where else summary

    def to_json(self) -> dict[str, Any]:
        """Return what the journal writes."""
        words = {"cause": self.cause.value, "summary": self.summary, "severity": self.severity.name}
        counts = {"step": self.step, "bad_step": self.bad_step, "streak": self.streak}
        sure = {"confidence": self.confidence, "reference": self.reference}
        return {**words, **sure, **counts, "evidence": dict(self.evidence)}


def diagnose(findings: Sequence[Finding], history: History) -> Diagnosis | None:
    """Return the one cause behind the findings of a step; None if there were none.

    Of findings that are equally severe, the one that explains the others is chosen, and the others
    become evidence. A recent warning that explains the symptom is named as the suspect.

    Damage that comes again before anything was learned is the doing of the updates, and there is
    nothing that a rollback could regain: then the cause is that nothing is learned, unless the loss
    is not even finite.
    """
    if not findings:
        return None
    worst = max(finding.severity for finding in findings)
    candidates = [finding for finding in findings if finding.severity == worst]
    chosen = min(candidates, key=lambda finding: list(Cause).index(finding.cause))
    others = [finding for finding in findings if finding is not chosen]
    evidence: dict[str, Any] = dict(chosen.evidence)
    is_fruitless = UNTRAINED in evidence and history.is_fruitless(chosen.cause.about.family)
    if is_fruitless and evidence["loss_now"] != NOT_FINITE:
        evidence["advice"] = TOO_HIGH
        seen = chosen.bad_step, chosen.step
        return Diagnosis(Cause.NOT_LEARNING, evidence, SUPPORTED, Severity.WARN, *seen)
    if others:
        evidence["also"] = {other.cause.value: dict(other.evidence) for other in others}
    bad_step = min(finding.bad_step for finding in candidates)
    suspect = _suspect(chosen, history) if worst >= Severity.ERROR else None
    if suspect is not None:
        evidence["suspect"], evidence["suspect_step"] = suspect
        bad_step = min(bad_step, suspect[1])
    confidence = ALONE
    if chosen.cause.about.is_fact or evidence.get("measured"):
        confidence = MEASURED
    elif suspect is not None or any(o.severity >= Severity.WARN for o in others):
        confidence = SUPPORTED
    seen = chosen.step, chosen.streak
    return Diagnosis(chosen.cause, evidence, confidence, worst, bad_step, *seen)


def diagnose_exception(
    exc: BaseException, *, step: int = -1, phase: str = "", is_alone: bool = False
) -> Diagnosis:
    """Return why a step raised: by the type of the exception first, by its message second.

    Args:
        exc: the exception.
        step: during which it was raised.
        phase: "data", "forward", "backward", "step" or "" if unknown. An unknown error in the
            loader is the data's; in the optimizer's step the state may be half updated.
        is_alone: whether there is no other process that a loader could share a collective with.
    """
    cause, confidence, matched = classify(exc, phase, is_alone=is_alone)
    evidence: dict[str, Any] = {
        "type": qualified_name(exc),
        "message": message_of(exc)[:MAX_MESSAGE],
        "matched": matched,
    }
    if phase:
        evidence["phase"] = phase
    severity = cause.about.severity
    if phase == "step":  # raised within the update, after which a warning is not enough
        severity = max(severity, Severity.ERROR)
    return Diagnosis(cause, evidence, confidence, severity, bad_step=step, step=step)


def may_be_the_weights(diagnosis: Diagnosis, patience: int, most: int) -> bool:
    """Return whether weights that hold NaN or Inf could be behind a diagnosis.

    They could for damage that an experiment has found, for NaN losses and gradients, and for any
    exception of the model's own code: NaN is an error where it samples from its output, looks up an
    index or inverts a matrix. For skipped steps only when a streak begins and whenever patience is
    spent, because a look costs a pass over the state.

    Args:
        diagnosis: what is wrong, as far as is known.
        patience: skipped steps in a row that make a plan.
        most: skipped steps in a row that end the run.
    """
    was_raised = "type" in diagnosis.evidence
    if diagnosis.is_proven:
        return True
    if diagnosis.cause.about.is_nonfinite:
        streak = diagnosis.streak
        return was_raised or streak == 1 or streak % patience == 0 or streak >= most
    if diagnosis.cause is Cause.UNKNOWN:
        return True
    is_of_loader = diagnosis.evidence.get("phase") in LOADER_PHASES
    return diagnosis.cause is Cause.DATA_ERROR and not is_of_loader


def diagnose_corruption(diagnosis: Diagnosis, found: Mapping[str, Any], step: int) -> Diagnosis:
    """Return the diagnosis of NaN or Inf in the state.

    Args:
        diagnosis: what it was taken for.
        found: where NaN or Inf was found, see :func:`heal.state_checks.find_corruption`.
        step: the step that comes next. Good snapshots never hold NaN, so that any of them will do.
    """
    raised = ("type", "message")
    seen: dict[str, Any] = {k: v for k, v in diagnosis.evidence.items() if k in raised}
    evidence: dict[str, Any] = {**found, "measured": True, SEEN_AS: diagnosis.cause.value, **seen}
    cause = Cause(evidence.pop("cause"))
    return Diagnosis(cause, evidence, MEASURED, Severity.ERROR, bad_step=step, step=step)


def _suspect(finding: Finding, history: History) -> tuple[str, int] | None:
    """Return the newest warning that explains the finding.

    An experiment has shown that the weights were sound at ``bad_step``: no warning from before it
    explains what followed, and a change that was meant is not undone for it.
    """
    first = finding.step - SUSPECT_STEPS
    if PROOF in finding.evidence:
        first = max(first, finding.bad_step)
    for name, step in reversed(history.suspects):
        is_recent = first <= step <= finding.step
        if is_recent and finding.cause.value in Cause(name).about.explains:
            return name, step
    return None
