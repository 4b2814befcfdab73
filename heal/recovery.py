"""From findings to actions: diagnose, decide, ask the hook, carry out, write down."""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from heal.actions import (
    Action,
    Halt,
    HealingError,
    Plan,
    Rollback,
    ScaleLr,
    Skip,
    SkipBatches,
    action_to_json,
    changes_training,
    check_action,
    is_custom,
)
from heal.causes import Cause, Family, Finding, Severity
from heal.config import HealingConfig
from heal.diagnose import Diagnosis, blame_state, diagnose, may_be_the_weights
from heal.exit_codes import ExitCode
from heal.history import History, Incident
from heal.journal import LEFT_OUT, Journal
from heal.monitor import Monitor, Seen, is_suspect
from heal.policy import LR_FLOOR, MAX_CONSECUTIVE_DATA_ERRORS, decide
from heal.run import TorchRun

Hook = Callable[[Diagnosis, Plan], Plan | None]
"""Sees what is wrong and what is planned; returns another plan, or None to agree."""

MAX_AHEAD = 10_000  # steps whose batches a hook may have skipped before they come
RECOVERED_NOISE, RECOVERED_SHARE = 3.0, 0.1  # above its old level that a loss may be and is back
MAX_LOGGED = 1000  # entries kept in memory; the journal has them all

SPENT = (
    ExitCode.BUDGET_SPENT,
    ExitCode.NONFINITE,
    ExitCode.OUT_OF_MEMORY,
    ExitCode.BAD_DATA,
    ExitCode.NETWORK,
)
"""Codes of halts that count something: a hook that could replace them could heal for ever."""


class Recovery:
    """Carries out what the policy decides, and remembers it.

    Args:
        run: what is healed.
        monitor: polled before a plan is made, so that all is known that can be.
        config: how patient to be.
        journal: told of every diagnosis.
        note: told of a hook or an action that failed; without a run_dir nobody reads the journal.

    Attributes:
        history: what was tried; survives rollbacks.
        log: the step that came next, diagnosis and plan of everything that was found.
        num_changes: how many plans changed training.
        late: what was found when a plan was made or the run saved; treated by the next step.
        treated: what the plan is for that is being carried out; None when there is none.
    """

    def __init__(
        self,
        run: TorchRun,
        monitor: Monitor,
        config: HealingConfig,
        journal: Journal,
        note: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.history = History()
        self.log: deque[tuple[int, Diagnosis, Plan]] = deque(maxlen=MAX_LOGGED)
        self.treated: Diagnosis | None = None
        self.num_changes = 0
        self._hook: Hook | None = None
        self.late: list[Seen] = []
        self._run = run
        self._monitor = monitor
        self._config = config
        self._journal = journal
        self._note = note
        self._num_given_up = 0  # batches in a row
        self._saw_bad_data = self._has_halted = False
        self._overflows: list[Diagnosis] = []

    def add_hook(self, hook: Hook) -> None:
        """Show every plan to ``hook``; what it returns, if not None, is done instead."""
        self._hook = hook

    def poll(self) -> Iterator[Seen]:
        """Yield what was found and is not treated yet, then what the monitor has polled now."""
        late, self.late = self.late, []
        yield from late
        for seen in self._monitor.poll():
            self._count(seen)
            yield seen
        yield from self._monitor.poll_checks()

    def catch_up(self) -> None:
        """Poll now, because a plan is about to be made or the run to be saved.

        Clean steps prove the snapshots that it may need. What is found is treated by the next step.
        """
        try:
            for seen in self._monitor.poll():
                self._count(seen)
                if seen.findings:
                    self.late.append(seen)
        except Exception as error:  # the plan must be made
            self._note(f"{LEFT_OUT}: {error!r}")

    def _count(self, seen: Seen) -> None:
        if seen.settled is not None:
            self._journal.event("experiment", self._run.step, **seen.settled.to_json())
        if seen.is_clean:
            self.note_clean(seen.step, *self._monitor.watch.loss_level())

    def treat(self, seen: Seen) -> bool:
        """Heal what was found in one step; return whether the run went back.

        Raises:
            HealingError: the run must stop.
        """
        # Written down first: a rollback forgets what led to it, and a halt ends the run.
        self.note_moves(self._monitor.watch.take_moves(seen.step, seen.findings))
        plan = self.treat_findings(seen.findings)
        rolled_back = any(isinstance(action, Rollback) for action in plan)
        if not rolled_back and is_suspect(seen.findings):
            self._run.ring.note_settled()  # nothing was undone: what comes now has to prove itself
        return rolled_back

    def untreated(self) -> list[tuple[int, list[dict[str, Any]]]]:
        """Return what was found and not treated yet, by step, as plain values."""
        return [(seen.step, [f.to_json() for f in seen.findings]) for seen in self.late]

    def resume(
        self,
        history: dict[str, Any],
        untreated: Sequence[tuple[int, Sequence[dict[str, Any]]]],
    ) -> None:
        """Go on with what ``history.state()`` and :meth:`untreated` returned elsewhere."""
        self.history = History.from_state(history)
        self.late = [
            Seen(step, [Finding.from_json(f) for f in findings]) for step, findings in untreated
        ]

    def finish(self) -> None:
        """Write down what the last records show, when no step is to come."""
        late, self.late = self.late, []
        for seen in late:
            self.report_last(seen.findings)
        for seen in self._monitor.poll_last():
            self.report_last(seen.findings)
            self.note_moves(self._monitor.watch.take_moves(seen.step, seen.findings))
        self.note_outcomes_at_end(*self._monitor.watch.loss_level())
        if self._overflows:
            self._report_overflows()

    def treat_findings(self, findings: Sequence[Finding]) -> Plan:
        """Diagnose findings and carry out the plan; return what was done.

        Raises:
            HealingError: the run must stop.
        """
        if not findings:
            return ()
        diagnosis = diagnose(findings, self.history)
        self.history.note_findings(findings)
        if diagnosis is None:
            return ()
        if diagnosis.cause is Cause.SCALER_OVERFLOW:  # routine: reported once, when it is over
            self._overflows.append(diagnosis)
            return ()
        return self.carry_out(diagnosis)

    def note_clean(self, step: int, loss: float, noise: float) -> None:
        """Count a clean step: incidents end with it, and a scaler's search for its scale.

        Args:
            step: which.
            loss: its present level; NaN if it is not known.
            noise: of the loss.
        """
        for incident in self.history.note_step(step, self._config):
            self._note_outcome(incident, loss, noise)
        if self._overflows:
            self._report_overflows()

    def report_last(self, findings: Sequence[Finding]) -> None:
        """Write down what was found after the last step, when there is nothing left to do.

        After a halt it is only counted: the last entry says why the run ended.
        """
        diagnosis = diagnose(findings, self.history)
        self.history.note_findings(findings)
        if self._has_halted:
            return
        if diagnosis is not None and diagnosis.cause is Cause.SCALER_OVERFLOW:
            self._overflows.append(diagnosis)
        elif diagnosis is not None:
            self._locate(diagnosis)
            was_skipped = diagnosis.cause.about.is_skipped and not diagnosis.evidence.get("applied")
            plan: Plan = (Skip(),) if was_skipped else ()
            at = self._run.step
            self.log.append((at, diagnosis, plan))
            self._write_down(diagnosis, plan, [True] * len(plan), 0.0, at, self._knobs())

    def _report_overflows(self) -> None:
        first, last = self._overflows[0], self._overflows[-1]
        told = {"skipped": len(self._overflows), "first_step": first.step, **last.evidence}
        self._overflows = []
        diagnosis = replace(last, evidence=told)
        self.log.append((self._run.step, diagnosis, ()))
        self._write_down(diagnosis, (), (), 0.0, self._run.step, self._knobs())

    def would_halt(self, diagnosis: Diagnosis) -> bool:
        """Return whether the policy has nothing left for a diagnosis; nothing is done."""
        plan = decide(diagnosis, self.history, self._config, self._run.snapshots())
        return any(isinstance(action, Halt) for action in plan)

    def carry_out(self, diagnosis: Diagnosis) -> Plan:
        """Decide on a diagnosis and do it.

        Raises:
            HealingError: the run must stop.
        """
        self.catch_up()
        self._locate(diagnosis)
        diagnosis, is_misread = self._look_at_state(diagnosis)
        if diagnosis.cause.about.is_nonfinite and "type" in diagnosis.evidence:
            # It was raised, so that the device counted no refused step: patience must end too.
            diagnosis = replace(diagnosis, streak=self.history.note_nonfinite_error())
        plan = decide(diagnosis, self.history, self._config, self._run.snapshots())
        if is_misread:
            plan = self._take_back_lr(plan)
        plan = self._ask_hook(diagnosis, plan)
        at, before = self._run.step, self._knobs()
        began = time.monotonic()
        effects: list[bool] = []
        self.treated = diagnosis
        try:
            for action in plan:
                effects.append(self._apply(action))
        except HealingError:
            self._has_halted = True
            raise
        finally:  # also if the plan was to halt: the journal tells why
            self.treated = None
            self.history.note_plan(diagnosis, plan, effects, unheard=at - self._config.lag)
            self.log.append((at, diagnosis, plan))
            self._write_down(diagnosis, plan, effects, time.monotonic() - began, at, before)
        return plan

    def _look_at_state(self, diagnosis: Diagnosis) -> tuple[Diagnosis, bool]:
        """Look for NaN in the state where it could be the cause; return whether it is."""
        config = self._config
        stops = config.nan_action == "raise" and diagnosis.cause.about.is_nonfinite
        if stops or not may_be_the_weights(
            diagnosis, config.nan_patience, config.max_consecutive_skips
        ):
            return diagnosis, False
        # What came by a record is treated by every rank in the same step; an exception is not.
        try:
            was_raised = "type" in diagnosis.evidence
            found = self._run.corruption(not was_raised, was_raised or diagnosis.streak > 1)
        except Exception as error:
            self._note(f"weights could not be checked for NaN: {error!r}")
            return diagnosis, False
        if found is None:
            self._look_at_data(diagnosis)
            return diagnosis, False
        return blame_state(diagnosis, found, self._run.step), True

    def _look_at_data(self, diagnosis: Diagnosis) -> None:
        """Say in the evidence whether NaN came with the batch, where the state holds none.

        A batch is read again when a streak begins, until one was found to hold NaN; then only when
        patience is spent.
        """
        if not diagnosis.cause.about.is_nonfinite or (self._saw_bad_data and diagnosis.streak == 1):
            return
        fault = self._run.data_fault(diagnosis.step)
        if fault:
            self._saw_bad_data = True
            diagnosis.evidence["blames"] = f"the data: {fault}"
        elif diagnosis.streak > 1:
            sound = "weights, buffers and optimizer state" + (
                "" if fault is None else ", the batch"
            )
            diagnosis.evidence["hint"] = (
                f"{sound} are finite: look for NaN outside of them, as in a hidden state that is "
                "carried from step to step"
            )

    def _locate(self, diagnosis: Diagnosis) -> None:
        """Say in the evidence which batch it was: step numbers come again after a rollback."""
        if diagnosis.family in (Family.ALERT, Family.WARNING) or diagnosis.step < 0:
            return
        is_first = diagnosis.streak == 1 or diagnosis.severity >= Severity.ERROR
        try:
            found = dict(self._run.whereabouts(diagnosis.step, with_samples=is_first))
        except Exception as error:
            self._note(f"the batch of step {diagnosis.step} could not be named: {error!r}")
            return
        if diagnosis.cause.about.is_found_late:
            found = {"call": found["call"]} if "call" in found else {}
        for name, value in found.items():
            diagnosis.evidence.setdefault(name, value)

    def _take_back_lr(self, plan: Plan) -> Plan:
        """Add that the rate returns to its schedule, if symptoms of corrupt weights lowered it."""
        incident = self.history.open_incident(Family.NUMERIC)
        lowers = any(isinstance(action, (ScaleLr, Halt)) for action in plan)
        if incident is None or not incident.count(ScaleLr) or lowers or self._run.lr_scale >= 1.0:
            return plan
        return (*plan, ScaleLr(1.0 / self._run.lr_scale, LR_FLOOR, 0))

    def give_up_batch(self, diagnosis: Diagnosis) -> None:
        """Count a batch that is given up because the plan has no cure for what it raised.

        Raises:
            HealingError: so many failed in a row that it is not the batches.
        """
        self._num_given_up += 1
        most = MAX_CONSECUTIVE_DATA_ERRORS
        if self._num_given_up > most:
            raise HealingError(
                f"{diagnosis.cause.value} at step {diagnosis.step}: {self._num_given_up} batches "
                f"in a row were given up, for the plans had no cure; expected at most {most}",
                diagnosis.cause.about.exit_code,
            )

    def note_batch_worked(self) -> None:
        """Hear that a step was taken: what was given up before it does not count any more."""
        self._num_given_up = 0

    def note_outcomes_at_end(self, loss: float, noise: float) -> None:
        """Write down how incidents stand that are not over when the run ends."""
        for incident in self.history.incidents:
            self._note_outcome(incident, loss, noise)

    def _note_outcome(self, incident: Incident, loss: float, noise: float) -> None:
        """Healed means that the loss is where it was, within its noise; nothing else does."""
        before = incident.loss_before
        if before is None or not incident.rollbacks or loss != loss:
            return
        margin = max(RECOVERED_NOISE * max(noise, incident.noise), RECOVERED_SHARE * abs(before))
        is_healed = loss <= before + margin
        self._journal.note_outcome(is_healed, loss, before)
        self._journal.event(
            "outcome",
            self._run.step,
            first_step=incident.first_step,
            healed=is_healed,
            loss=loss,
            loss_before=before,
        )

    def note_moves(self, moves: Sequence[tuple[int, str, str]]) -> None:
        """Write down that the forecast finds the run in another condition."""
        for step, before, after in moves:
            self._journal.event("forecast", step, before=before, after=after)

    def _knobs(self) -> dict[str, float]:
        """What plans change and records do not show."""
        return {"lr_scale": self._run.lr_scale, "micro_batches": self._run.micro_batches}

    def _apply(self, action: Action) -> bool:
        try:
            has_effect = bool(action.apply(self._run))
            if isinstance(action, Rollback):
                self.late.clear()  # found in steps that did not happen
            return has_effect
        except HealingError:
            raise
        except Exception as error:  # a cure that fails must not kill; a rollback that fails must
            if isinstance(action, Rollback):
                raise HealingError(f"rollback failed: {error!r}") from error
            self._journal.event(
                "action_failed", self._run.step, error=repr(error), **action_to_json(action)
            )
            self._note(f"{type(action).__name__} failed and was left out: {error!r}")
            return False

    def _ask_hook(self, diagnosis: Diagnosis, plan: Plan) -> Plan:
        if self._hook is None or (not plan and diagnosis.severity < Severity.WARN):
            return plan
        try:
            answer = self._hook(diagnosis, plan)
            if answer is None or _is_budget_spent(plan):
                return plan
            is_text = isinstance(answer, str)  # an empty one would pass for an empty plan
            answer = tuple(answer)
            if is_text:
                raise TypeError(f"expected a tuple of actions from the hook, got {answer!r}")
            for action in answer:
                check_action(action)
            self._check_skips(answer)
            self._check_budget(answer)
            return answer
        except Exception as error:
            self._journal.event("hook_failed", self._run.step, error=repr(error))
            self._note(f"the hook of on_instability failed, the plan was kept: {error!r}")
            return plan

    def _check_budget(self, answer: Plan) -> None:
        """Check that a user's own actions end too: each plan with one is an attempt."""
        most = self._config.max_recovery_attempts
        if self.history.attempts >= most and any(is_custom(action) for action in answer):
            raise ValueError(
                f"expected at most {most} attempts (max_recovery_attempts) with actions of your "
                f"own, got {self.history.attempts} before this one"
            )

    def _check_skips(self, answer: Plan) -> None:
        """Refuse to pass over what no trouble explains: every batch of it would be drawn."""
        furthest = self._run.step + MAX_AHEAD
        for action in answer:
            if isinstance(action, SkipBatches) and action.last_step > furthest:
                raise ValueError(
                    f"SkipBatches: last_step is {action.last_step}; expected at most {MAX_AHEAD} "
                    "steps ahead of the run"
                )

    def _write_down(
        self,
        diagnosis: Diagnosis,
        plan: Plan,
        effects: Sequence[bool],
        seconds: float,
        at: int,
        before: dict[str, float],
    ) -> None:
        done = [action_to_json(action) for action in plan]
        for action, effect in zip(done, effects, strict=False):
            action["effect"] = effect
        try:
            self._journal.recovery(
                diagnosis,
                done,
                seconds=round(seconds, 6),
                noticed_at=at,
                resumed_at=self._run.step,
                before=before,
                after=self._knobs(),
            )
            self.num_changes += changes_training(plan)
        except Exception as error:
            self._journal.event("logging_failed", self._run.step, error=repr(error))


def _is_budget_spent(plan: Plan) -> bool:
    """Tell whether a plan ends the run because patience is at its end: healing always ends."""
    return any(isinstance(action, Halt) and action.exit_code in SPENT for action in plan)
