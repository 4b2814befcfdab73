"""When to do what. Pure: diagnosis and history in, plan out, so every rule is one line of a test.

The ladder: skip the step, tighten the clip and scale the LR, roll back and skip the offending data
with a lower LR, roll back further, halt. One incident never gets the same plan twice, and attempts
are counted over all incidents, so that healing always ends.
"""

from collections.abc import Iterator, Sequence

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
)
from heal.causes import Blames, Cause, Family, Severity
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


def decide(
    diagnosis: Diagnosis, history: History, config: HealingConfig, snapshots: Sequence[int]
) -> Plan:
    """Choose the plan for a diagnosis.

    Args:
        diagnosis: what is wrong.
        history: what was tried; is not changed. Note the plan there afterwards.
        config: how patient to be.
        snapshots: steps of the good snapshots; that of step ``s`` has the updates before ``s``.

    Returns:
        The actions in order; empty if there is nothing to do but to log it.
    """
    if diagnosis.family is Family.STOP:
        return (_halt(diagnosis, "", diagnosis.cause.about.exit_code),)
    if diagnosis.family is Family.MEMORY:
        return _make_room(diagnosis, history, config, snapshots)
    if diagnosis.family is Family.WAIT:
        return _wait(diagnosis, history, config)
    if diagnosis.family is Family.DATA:
        return _skip_bad_batch(diagnosis, history, config, snapshots)
    if diagnosis.family is Family.NUMERIC:
        return _heal_numbers(diagnosis, history, config, snapshots)
    if diagnosis.family is Family.WARNING:
        return _brace(history, config)
    return ()


def _halt(diagnosis: Diagnosis, why: str, code: ExitCode) -> Halt:
    evidence = diagnosis.evidence
    what = evidence.get("blames") or evidence.get("type") or evidence.get("tensor")
    where = f" ({what})" if what else ""
    at = f" at step {diagnosis.step}" if diagnosis.step >= 0 else ""
    at += f", call {evidence['call']}" if "call" in evidence else ""
    at += f", epoch {evidence['epoch']} batch {evidence['batch']}" if "batch" in evidence else ""
    reason = f"{diagnosis.cause.value}{at}{where}"
    reason += f"; {evidence['hint']}" if "hint" in evidence else ""
    return Halt(f"{why}; last trouble: {reason}" if why else reason, int(code))


def _brace(history: History, config: HealingConfig) -> Plan:
    """Return what a forecast may do: nothing that cannot be undone, never a rollback."""
    watch = WatchClosely(config.incident_steps)
    incident = history.open_incident(Family.WARNING)
    if incident is not None and incident.count(TightenClip):  # once: limits multiply
        return (TakeSnapshot(), watch)
    return (TakeSnapshot(), TightenClip(CLIP_FACTOR), watch)


def _heal_numbers(
    diagnosis: Diagnosis, history: History, config: HealingConfig, snapshots: Sequence[int]
) -> Plan:
    is_proven = diagnosis.severity >= Severity.ERROR
    if diagnosis.cause.about.is_skipped and not is_proven:
        gentle = _contained(diagnosis, config)
        if gentle is not None:
            return gentle
    elif not is_proven:
        return ()
    incident = history.open_incident(Family.NUMERIC)
    if incident is not None and _ran_before_plan(diagnosis, incident, config):
        return (Skip(),) if diagnosis.cause.about.is_skipped else ()
    known = () if incident is None else incident.causes
    if diagnosis.cause is Cause.DESYNC and Cause.DESYNC.value in known:
        why = "ranks are at different steps again after all returned to one"
        return (_halt(diagnosis, why, ExitCode.DISTRIBUTED),)
    if history.attempts >= config.max_recovery_attempts:
        spent = f"{history.attempts} recovery attempts did not help"
        halt = _halt(diagnosis, spent, ExitCode.BUDGET_SPENT)
        return (*_last_good(diagnosis, snapshots), halt)
    return _next_rung(diagnosis, incident, config, snapshots)


def _contained(diagnosis: Diagnosis, config: HealingConfig) -> Plan | None:
    """Return the plan for a skipped step by itself; None once patience is spent."""
    is_nonfinite = diagnosis.cause.about.is_nonfinite
    if is_nonfinite and config.nan_action == "raise":
        return (_halt(diagnosis, 'nan_action is "raise"', ExitCode.NONFINITE),)
    if diagnosis.streak >= config.max_consecutive_skips:
        why = f"{diagnosis.streak} steps in a row were skipped"
        return (_halt(diagnosis, why, ExitCode.NONFINITE),)
    # The state is clean whatever the streak: no rollback could help against NaN in the data.
    is_patient = is_nonfinite or diagnosis.streak % SPIKE_PATIENCE
    return (Skip(),) if is_patient else None


def _last_good(diagnosis: Diagnosis, snapshots: Sequence[int]) -> Plan:
    """Return how a run that must end gets back the newest state that is known to be good."""
    usable = [step for step in snapshots if step <= diagnosis.bad_step]
    return (Rollback(max(usable)),) if usable else ()


def _ran_before_plan(diagnosis: Diagnosis, incident: Incident, config: HealingConfig) -> bool:
    """Return whether the step ran before the last plan took effect.

    After a rollback there is no such record, and the steps count on from the snapshot.
    """
    newest = incident.plans[-1]
    rolled_back = any(action["action"] == Rollback.__name__ for action in newest)
    return not rolled_back and diagnosis.step < incident.resume_step + config.lag


def _is_late_record(diagnosis: Diagnosis, incident: Incident, config: HealingConfig) -> bool:
    """Return whether it is of a record, not an exception, from before the last plan."""
    return "flag" in diagnosis.evidence and _ran_before_plan(diagnosis, incident, config)


def _next_rung(
    diagnosis: Diagnosis,
    incident: Incident | None,
    config: HealingConfig,
    snapshots: Sequence[int],
) -> Plan:
    """Return the lowest rung that was not tried in this incident."""
    for plan in _rungs(diagnosis, incident, config, snapshots):
        if incident is None or not incident.was_tried(plan):
            return plan
    if any(step <= diagnosis.bad_step for step in snapshots):
        halt = _halt(diagnosis, "nothing is left to try", ExitCode.UNRECOVERABLE)
        return (*_last_good(diagnosis, snapshots), halt)
    why = f"no good snapshot from before step {diagnosis.bad_step}"
    is_desync = diagnosis.cause is Cause.DESYNC
    code = ExitCode.DISTRIBUTED if is_desync else ExitCode.NO_SNAPSHOT
    return (_halt(diagnosis, why, code),)


def _rungs(
    diagnosis: Diagnosis,
    incident: Incident | None,
    config: HealingConfig,
    snapshots: Sequence[int],
) -> Iterator[Plan]:
    """Yield plans from mild to drastic."""
    scale = ScaleLr(config.lr_factor, LR_FLOOR, config.lr_ramp_steps)
    soft: Plan = (TightenClip(CLIP_FACTOR), scale)
    usable = sorted((step for step in snapshots if step <= diagnosis.bad_step), reverse=True)
    oldest = [min(snapshots)] if snapshots else []
    if not usable and diagnosis.cause.about.is_found_late:
        usable = oldest
    tried = incident.rollbacks if incident is not None else 0
    if diagnosis.cause is Cause.GRADIENT_SPIKE:
        # Finite, skipped and clean: the state is fine, the baseline of the clip rule is not.
        yield (RelearnClip(), scale)
        yield soft
        usable = []
    was_applied = bool(diagnosis.evidence.get("applied"))
    if not usable and not diagnosis.cause.about.needs_snapshot and not was_applied:
        yield soft
    if usable:
        target = usable[min(tried, len(usable) - 1)]
        back: tuple[Action, ...] = (Rollback(target), *_skip(diagnosis, config, target, tried))
        back += _held_rate(diagnosis)
        known = () if incident is None else incident.causes
        is_new_fact = diagnosis.cause.about.is_found_late and diagnosis.cause.value not in known
        if not tried or is_new_fact:  # a transient fault or bad data needs no lower rate
            yield back
        yield (*back, scale)
        yield (*back, scale, TightenClip(CLIP_FACTOR))


def _held_rate(diagnosis: Diagnosis) -> Plan:
    """Return how to keep a rate from rising again that no schedule has raised."""
    held = diagnosis.evidence.get("usual_lr")
    is_scheduled = bool(diagnosis.evidence.get("measured"))
    if diagnosis.cause is not Cause.LR_SPIKE or is_scheduled or not isinstance(held, float):
        return ()
    return (HoldLr(held),)


def _skip(diagnosis: Diagnosis, config: HealingConfig, target: int, tried: int) -> Plan:
    """Return which batches to skip: all since the snapshot, or the offending ones.

    The window doubles with each rollback, up to a limit: a spike often comes from a stretch of data
    and the state together.
    """
    is_innocent = diagnosis.cause.about.blames is not Blames.DATA and not tried
    window = 0 if is_innocent else min(2**tried, MOST_SKIPPED)
    last = max(diagnosis.step, target) + window
    if config.after_rollback == "skip_data":
        return (SkipBatches(target, last),)
    return () if is_innocent else (SkipBatches(max(diagnosis.bad_step, target), last),)


def _make_room(
    diagnosis: Diagnosis, history: History, config: HealingConfig, snapshots: Sequence[int]
) -> Plan:
    incident = history.open_incident(Family.MEMORY)
    if incident is not None and _is_late_record(diagnosis, incident, config):
        return ()
    if diagnosis.cause is Cause.MEMORY_PRESSURE:
        return (ClearCache(), ShrinkBatch()) if incident is None else ()
    halving = incident.count(ShrinkBatch) + 1 if incident is not None else 1
    is_smallest = incident is not None and incident.had_no_effect(ShrinkBatch)
    plan: Plan
    if not is_smallest and halving <= MAX_HALVINGS:
        plan = (ClearCache(), ShrinkBatch(halving))
    elif incident is None or not incident.count(CheckpointActivations):
        plan = (ClearCache(), CheckpointActivations())
    else:
        reason = diagnosis.evidence.get("cannot_be_cut")
        why = f"out of memory, and the batch cannot be cut: {reason}"
        why = why if reason else "out of memory at the smallest micro-batch"
        return (_halt(diagnosis, why, ExitCode.OUT_OF_MEMORY),)
    if diagnosis.evidence.get("phase") != "step":
        return plan
    target = _before_half_step(diagnosis, snapshots)
    if isinstance(target, Halt):
        return (target,)
    return (*plan, Rollback(target), *_skip(diagnosis, config, target, 0))


def _before_half_step(diagnosis: Diagnosis, snapshots: Sequence[int]) -> int | Halt:
    """Return where to roll back to from an optimizer step that stopped half-way."""
    usable = [step for step in snapshots if step <= diagnosis.bad_step]
    if usable:
        return max(usable)
    why = "the optimizer stopped within its step, and no snapshot exists to return to"
    return _halt(diagnosis, why, ExitCode.NO_SNAPSHOT)


def _wait(diagnosis: Diagnosis, history: History, config: HealingConfig) -> Plan:
    """Double the wait each time, without jitter: ranks must sleep alike."""
    incident = history.open_incident(Family.WAIT)
    if incident is not None and _is_late_record(diagnosis, incident, config):
        return ()
    waits = incident.count(Backoff) if incident is not None else 0
    waited = incident.waited_seconds if incident is not None else 0.0
    seconds = min(config.backoff_seconds * 2.0**waits, LONGEST_WAIT_SECONDS)
    if waits >= MAX_WAITS:
        why = f"waited {waits} times, {waited:g} seconds in all"
        return (_halt(diagnosis, why, ExitCode.NETWORK),)
    return (Backoff(seconds),)


def _skip_bad_batch(
    diagnosis: Diagnosis, history: History, config: HealingConfig, snapshots: Sequence[int]
) -> Plan:
    """Skip the batch, unless so many fail that it must be the model."""
    if history.consecutive_data_errors >= MAX_CONSECUTIVE_DATA_ERRORS:
        why = f"{history.consecutive_data_errors} batches in a row failed before this one"
        return (_halt(diagnosis, why, ExitCode.BAD_DATA),)
    if history.data_errors >= config.max_data_errors:
        why = f"{history.data_errors} batches failed before this one"
        return (_halt(diagnosis, why, ExitCode.BAD_DATA),)
    if diagnosis.evidence.get("phase") != "step":
        return (SkipBatches(diagnosis.step, diagnosis.step),)
    target = _before_half_step(diagnosis, snapshots)
    if isinstance(target, Halt):
        return (target,)
    return (Rollback(target), SkipBatches(diagnosis.bad_step, diagnosis.step))
