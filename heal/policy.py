"""When to do what. Pure: diagnosis and history in, plan out, so every rule is one line of a test.

The ladder: skip the step, tighten the clip and scale the LR, roll back and skip the offending data
with a lower LR, roll back further, halt. One incident never gets the same plan twice, and attempts
are counted over all incidents, so that healing always ends.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from heal.actions import (
    Action,
    Backoff,
    CheckpointActivations,
    ClearCache,
    Halt,
    HoldLr,
    Plan,
    RelearnClip,
    Rollback,
    ScaleLr,
    ShrinkBatch,
    Skip,
    SkipBatches,
    TakeSnapshot,
    TightenClip,
    WatchClosely,
    newest_snapshot,
)
from heal.causes import AT_ONCE, UNTRAINED, Blames, Cause, Family, Severity
from heal.config import HealingConfig
from heal.diagnose import Diagnosis
from heal.exit_codes import ExitCode
from heal.history import History, Incident

__all__ = ["History", "decide"]

CLIP_FACTOR = 0.5
"""Factor on the thresholds of clipping when it is tightened."""

LR_FLOOR = 0.01
"""Least share of the scheduled learning rate."""

SPIKE_PATIENCE = 20
"""Finite gradients skipped in a row, by a rule that skips spikes, until that rule starts over."""

MAX_CONSECUTIVE_DATA_ERRORS = 3
"""Batches that may fail in a row: more is a fault of the model, not of the data."""

LONGEST_WAIT_SECONDS, MAX_WAITS = 600.0, 8
"""Limits of one incident."""

MAX_HALVINGS = 30
"""No micro-batch has more samples than 2 ** 30; a run that claims to shrink for ever must end."""

MOST_SKIPPED = 500
"""Most batches after the trouble that the window may grow to: PaLM (arXiv:2204.02311) got past
spikes by leaving out some 200 to 500. If that does not help, it is not the data."""


FRUITLESS = "updates damage the first weights again and again; use a far lower learning rate"
"""What ends a run whose loss is not finite in its first steps, after a rollback once more."""


def decide(
    diagnosis: Diagnosis,
    history: History,
    config: HealingConfig,
    snapshots: Sequence[int],
    lr_scale: float = 1.0,
) -> Plan:
    """Choose the plan for a diagnosis.

    Args:
        diagnosis: what is wrong.
        history: what was tried; is not changed. Note the plan there afterwards.
        config: how patient to be.
        snapshots: steps of the good snapshots; that of step ``s`` has the updates before ``s``.
        lr_scale: the factor on the learning rate, if earlier plans have lowered it.

    Returns:
        The actions in order; empty if there is nothing to do but to log it.
    """
    family = diagnosis.family
    case = _Case(diagnosis, history, config, snapshots, history.open_incident(family))
    cures = {
        Family.STOP: lambda case: case.halt("", diagnosis.cause.about.exit_code),
        Family.MEMORY: _make_room,
        Family.WAIT: _wait,
        Family.DATA: _skip_bad_batch,
        Family.NUMERIC: _heal_numbers,
        Family.WARNING: _brace,
    }
    plan = cures[family](case) if family in cures else ()
    return (*plan, *_rate_given_back(case, plan, lr_scale))


class _Case(NamedTuple):
    """What a decision depends on."""

    diagnosis: Diagnosis
    history: History
    config: HealingConfig
    snapshots: Sequence[int]
    incident: Incident | None  # of the same family, that is not over yet

    def count(self, action: type[Action]) -> int:
        """Return how many plans of the incident had such an action."""
        return 0 if self.incident is None else self.incident.count(action)

    @property
    def known(self) -> Sequence[str]:
        """The causes that the incident had so far."""
        return () if self.incident is None else self.incident.causes

    @property
    def is_earlier(self) -> bool:
        """Whether the step ran before the last plan of the incident took effect.

        After a rollback there is no such record, and the steps count on from the snapshot.
        """
        if self.incident is None:
            return False
        rolled_back = any(a["action"] == Rollback.__name__ for a in self.incident.plans[-1])
        first = self.incident.resume_step + self.config.lag
        return not rolled_back and self.diagnosis.step < first

    @property
    def is_another_leap(self) -> bool:
        """Whether the run got past what the incident was about, and leapt from good to bad again.

        A rate that is too high makes a loss climb, or leap where it did before. So the plan worked,
        and this is damage of its own, done to weights that were as good as the newest snapshot.
        """
        if self.incident is None or self.diagnosis.step <= self.incident.last_step:
            return False
        is_of_rate = self.diagnosis.cause is Cause.LR_SPIKE
        return bool(self.diagnosis.evidence.get(AT_ONCE)) and not is_of_rate

    @property
    def is_late_record(self) -> bool:
        """Whether it is of a record, not an exception, from before the last plan."""
        return "flag" in self.diagnosis.evidence and self.is_earlier

    @property
    def last_good(self) -> Plan:
        """How a run that must end gets back the newest state that is known to be good."""
        target = newest_snapshot(self.snapshots, self.diagnosis.bad_step)
        return () if target is None else (Rollback(target),)

    def halt(self, why: str, code: ExitCode) -> Plan:
        """End the run: because of ``why``, and of what the diagnosis says."""
        cause, step, evidence = self.diagnosis.cause, self.diagnosis.step, self.diagnosis.evidence
        reason = cause.value + (f" at step {step}" if step >= 0 else "")
        reason += f", call {evidence['call']}" if "call" in evidence else ""
        if "batch" in evidence:
            reason += f", epoch {evidence['epoch']} batch {evidence['batch']}"
        what = evidence.get("blames") or evidence.get("type") or evidence.get("tensor")
        reason += f" ({what})" if what else ""
        reason += f"; {evidence['hint']}" if "hint" in evidence else ""
        return (Halt(f"{why}; last trouble: {reason}" if why else reason, int(code)),)


def _brace(case: _Case) -> Plan:
    """Return what a forecast may do: nothing that cannot be undone, never a rollback."""
    watch = WatchClosely(case.config.incident_steps)
    if case.count(TightenClip):  # once: limits multiply
        return (TakeSnapshot(), watch)
    return (TakeSnapshot(), TightenClip(CLIP_FACTOR), watch)


def _heal_numbers(case: _Case) -> Plan:
    diagnosis, history, config = case.diagnosis, case.history, case.config
    about = diagnosis.cause.about
    if diagnosis.severity < Severity.ERROR:  # not proven
        gentle = _contained(case) if about.is_skipped else ()
        if gentle is not None:
            return gentle
    if case.is_earlier:
        return (Skip(),) if about.is_skipped else ()
    if diagnosis.cause is Cause.DESYNC and Cause.DESYNC.value in case.known:
        why = "ranks are at different steps again after all returned to one"
        return case.halt(why, ExitCode.DISTRIBUTED)
    if UNTRAINED in diagnosis.evidence and history.is_fruitless(diagnosis.family):
        first: Plan = (Rollback(min(case.snapshots)),) if case.snapshots else ()
        return (*first, *case.halt(FRUITLESS, ExitCode.UNRECOVERABLE))
    if history.attempts >= config.max_recovery_attempts:
        why = f"{history.attempts} recovery attempts did not help"
        return (*case.last_good, *case.halt(why, ExitCode.BUDGET_SPENT))
    for plan in _rungs(case):  # the lowest that was not tried in this incident
        if case.incident is None or not case.incident.was_tried(plan):
            return plan
    if case.last_good:
        return (*case.last_good, *case.halt("nothing is left to try", ExitCode.UNRECOVERABLE))
    why = f"no good snapshot from before step {diagnosis.bad_step}"
    is_desync = diagnosis.cause is Cause.DESYNC
    return case.halt(why, ExitCode.DISTRIBUTED if is_desync else ExitCode.NO_SNAPSHOT)


def _rate_given_back(case: _Case, plan: Plan, lr_scale: float) -> Plan:
    """Return the rate to its schedule, if symptoms of weights that hold NaN have lowered it."""
    lowers = any(isinstance(action, (ScaleLr, Halt)) for action in plan)
    is_lowered = lr_scale < 1.0 and case.count(ScaleLr) > 0
    if not case.diagnosis.is_of_state or not is_lowered or lowers:
        return ()
    return (ScaleLr(1.0 / lr_scale, LR_FLOOR, 0),)


def _contained(case: _Case) -> Plan | None:
    """Return the plan for a skipped step by itself; None once patience is spent."""
    streak = case.diagnosis.streak
    is_nonfinite = case.diagnosis.cause.about.is_nonfinite
    if is_nonfinite and case.config.nan_action == "raise":
        return case.halt('nan_action is "raise"', ExitCode.NONFINITE)
    if streak >= case.config.max_consecutive_skips:
        return case.halt(f"{streak} steps in a row were skipped", ExitCode.NONFINITE)
    # The state is clean whatever the streak: no rollback could help against NaN in the data.
    is_patient = is_nonfinite or streak % SPIKE_PATIENCE
    return (Skip(),) if is_patient else None


def _rungs(case: _Case) -> Iterator[Plan]:
    """Yield plans from mild to drastic."""
    diagnosis, config, snapshots = case.diagnosis, case.config, case.snapshots
    about = diagnosis.cause.about
    scale = ScaleLr(config.lr_factor, LR_FLOOR, config.lr_ramp_steps)
    soft: Plan = (TightenClip(CLIP_FACTOR), scale)
    if diagnosis.cause is Cause.GRADIENT_SPIKE:
        # Finite, skipped and clean: the state is fine, the baseline of the clip rule is not.
        yield (RelearnClip(), scale)
        yield soft
        return
    usable = sorted((step for step in snapshots if step <= diagnosis.bad_step), reverse=True)
    if not usable and about.is_found_late:
        usable = [min(snapshots)] if snapshots else []
    if not usable:
        if not about.needs_snapshot and not diagnosis.evidence.get("applied"):
            yield soft
        return
    tried = 0 if case.is_another_leap else case.count(Rollback)
    # Each time one older than the newest: a rollback drops those that are newer than its target.
    target = usable[min(tried, 1, len(usable) - 1)]
    back: Plan = (Rollback(target), *_skip(case, target, tried), *_held_rate(diagnosis))
    is_new_fact = about.is_found_late and diagnosis.cause.value not in case.known
    # A transient fault or bad data needs no lower rate. Where one did not help, the next try is an
    # older state alone, because the rate may not be the fault: by turns.
    is_older = case.incident is None or not case.incident.was_applied(back[0])
    if not tried or is_new_fact or (is_older and tried % 2 == 0):
        yield back
    yield (*back, scale)
    yield (*back, scale, TightenClip(CLIP_FACTOR))


def _held_rate(diagnosis: Diagnosis) -> Plan:
    """Return how to keep a rate from changing again that no schedule has changed."""
    held = diagnosis.evidence.get("usual_lr")
    is_of_rate = diagnosis.cause.about.blames is Blames.LEARNING_RATE
    return (HoldLr(held),) if is_of_rate and isinstance(held, float) else ()


def _skip(case: _Case, target: int, tried: int) -> Plan:
    """Return which batches to skip: all since the snapshot, or the offending ones.

    The window doubles with each rollback, up to a limit: a spike often comes from a stretch of data
    and the state together.
    """
    diagnosis = case.diagnosis
    is_innocent = diagnosis.cause.about.blames is not Blames.DATA and not tried
    window = 0 if is_innocent else min(2**tried, MOST_SKIPPED)
    last = max(diagnosis.step, target) + window
    if case.config.after_rollback == "skip_data":
        return (SkipBatches(target, last),)
    return () if is_innocent else (SkipBatches(max(diagnosis.bad_step, target), last),)


def _make_room(case: _Case) -> Plan:
    diagnosis = case.diagnosis
    if case.is_late_record:
        return ()
    if diagnosis.cause is Cause.MEMORY_PRESSURE:
        return (ClearCache(), ShrinkBatch()) if case.incident is None else ()
    halving = case.count(ShrinkBatch) + 1
    is_smallest = case.incident is not None and case.incident.had_no_effect(ShrinkBatch)
    plan: Plan
    if not is_smallest and halving <= MAX_HALVINGS:
        plan = (ClearCache(), ShrinkBatch(halving))
    elif not case.count(CheckpointActivations):
        plan = (ClearCache(), CheckpointActivations())
    else:
        reason = diagnosis.evidence.get("cannot_be_cut")
        why = f"out of memory, and the batch cannot be cut: {reason}"
        why = why if reason else "out of memory at the smallest micro-batch"
        return case.halt(why, ExitCode.OUT_OF_MEMORY)
    if diagnosis.evidence.get("phase") != "step":
        return plan
    target = newest_snapshot(case.snapshots, diagnosis.bad_step)
    if target is None:
        return _half_a_step(case)
    return (*plan, Rollback(target), *_skip(case, target, 0))


def _half_a_step(case: _Case) -> Plan:
    """Return the end of a run whose optimizer stopped half-way, with nowhere to return to."""
    why = "the optimizer stopped within its step, and no snapshot exists to return to"
    return case.halt(why, ExitCode.NO_SNAPSHOT)


def _wait(case: _Case) -> Plan:
    """Double the wait each time, without jitter: ranks must sleep alike."""
    if case.is_late_record:
        return ()
    waits = case.count(Backoff)
    if waits >= MAX_WAITS:
        waited = 0.0 if case.incident is None else case.incident.waited_seconds
        why = f"waited {waits} times, {waited:g} seconds in all"
        return case.halt(why, ExitCode.NETWORK)
    return (Backoff(min(case.config.backoff_seconds * 2.0**waits, LONGEST_WAIT_SECONDS)),)


def _skip_bad_batch(case: _Case) -> Plan:
    """Skip the batch, unless so many fail that it must be the model."""
    diagnosis, history = case.diagnosis, case.history
    if history.consecutive_data_errors >= MAX_CONSECUTIVE_DATA_ERRORS:
        why = f"{history.consecutive_data_errors} batches in a row failed before this one"
        return case.halt(why, ExitCode.BAD_DATA)
    if history.data_errors >= case.config.max_data_errors:
        why = f"{history.data_errors} batches failed before this one"
        return case.halt(why, ExitCode.BAD_DATA)
    if diagnosis.evidence.get("phase") != "step":
        return (SkipBatches(diagnosis.step, diagnosis.step),)
    if not case.last_good:
        return _half_a_step(case)
    return (*case.last_good, SkipBatches(diagnosis.bad_step, diagnosis.step))
