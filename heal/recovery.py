"""The steps of a recovery: settle, diagnose, examine, ask the hook, execute.

``Healer._recover`` takes them in this order; between the last three :func:`heal.policy.decide`
makes the plan.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from heal.actions import (
    Action,
    Halt,
    HealingError,
    Plan,
    Rollback,
    Skip,
    SkipBatches,
    action_to_json,
    changes_training,
    check_action,
    is_custom,
)
from heal.causes import Cause, Family, Finding, Severity
from heal.config import HealingConfig
from heal.detectors.robust import FEWEST
from heal.diagnose import Diagnosis, diagnose, diagnose_corruption, may_be_the_weights
from heal.exit_codes import ExitCode
from heal.history import History, Incident
from heal.journal import LEFT_OUT, Journal
from heal.monitor import Monitor, Seen
from heal.policy import MAX_CONSECUTIVE_DATA_ERRORS, decide
from heal.training_run import TorchRun

Hook = Callable[[Diagnosis, Plan], Plan | None]
"""Takes a diagnosis and its plan; returns another plan, or None to agree."""

MAX_AHEAD = 10_000  # steps ahead of the run whose batches a hook may skip
RECOVERED_NOISE, RECOVERED_SHARE = 3.0, 0.1  # by which a recovered loss may exceed its old level
MAX_LOGGED = 1000  # entries kept in memory; the journal has them all

SPENT = (
    ExitCode.BUDGET_SPENT,
    ExitCode.NONFINITE,
    ExitCode.OUT_OF_MEMORY,
    ExitCode.BAD_DATA,
    ExitCode.NETWORK,
)
"""Codes of halts by a limit: a hook that could replace them could go on for ever."""


class Outcome(NamedTuple):
    """What a recovery has done.

    Attributes:
        plan: the actions that were applied, in order.
    """

    plan: Plan = ()

    @property
    def rolled_back(self) -> bool:
        """Whether the run has returned to an earlier step."""
        return bool(self.plan) and any(isinstance(action, Rollback) for action in self.plan)


NOTHING_DONE = Outcome()


class Recovery:
    """Diagnoses, executes plans, and remembers both.

    What was found stays in :attr:`late` if it is polled while a plan is made or the run saved.

    Attributes:
        history: what was tried; survives rollbacks.
        log: the step that came next, diagnosis and plan of everything that was found.
        num_changes: how many plans changed training.
        late: what was found when a plan was made or the run saved; the next step recovers from it.
        recovering_from: the diagnosis whose plan is being carried out; None when there is none.
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
        self.num_changes = 0
        self.late: list[Seen] = []
        self.recovering_from: Diagnosis | None = None
        self._hook: Hook | None = None
        self._run = run
        self._monitor = monitor
        self._config = config
        self._journal = journal
        self._note = note
        self._num_given_up = 0  # batches in a row
        self._saw_bad_data = self._has_halted = False
        self._overflows: list[Diagnosis] = []

    def add_hook(self, hook: Hook) -> None:
        """Call ``hook`` with every plan; a plan that it returns is used instead."""
        self._hook = hook

    def poll(self, is_last: bool = False) -> Iterator[Seen]:
        """Yield what was found late, then what the monitor polls now; if last, all there is."""
        late, self.late = self.late, []
        yield from late
        yield from self._monitor.poll(0 if is_last else None)
        yield from self._monitor.poll_checks(is_last)

    def catch_up(self) -> None:
        """Poll now, because a plan is about to be made or the run to be saved.

        Clean steps prove the snapshots that it may need. The next step recovers from findings.
        """
        try:
            for seen in self._monitor.poll():
                known = self.settle(seen)
                if known.findings:
                    self.late.append(known)
        except Exception as error:  # the plan must be made
            self._note(f"{LEFT_OUT}: {error!r}")

    # The steps of a recovery.

    def settle(self, seen: Seen) -> Seen:
        """Leave suspicions to an experiment; return what is known, its answers included.

        A clean step ends incidents.
        """
        known = self._monitor.settle(seen)
        if known.settled is not None:
            self._journal.event("experiment", self._run.step, **known.settled.to_json())
        if known.is_clean:
            for incident in self.history.note_step(known.step, self._config):
                self._write_outcome(incident)
            if self._overflows:
                self._write_overflows()
        if self._monitor.watch.forecast is not None:
            self._write_forecast(known)  # now: a rollback forgets it, and a halt ends the run
        return known

    def diagnose(self, seen: Seen) -> Diagnosis | None:
        """Return the one cause; None if there is none, or an overflow, which is routine."""
        if seen.raised is not None or not seen.findings:
            return seen.raised
        diagnosis = diagnose(seen.findings, self.history)
        self.history.note_findings(seen.findings)
        if diagnosis is not None and diagnosis.cause is Cause.SCALER_OVERFLOW:
            self._overflows.append(diagnosis)  # written once, when the search is over
            return None
        if diagnosis is not None and self.history.knows_fruitless(diagnosis):
            self._monitor.note_kept(seen)
            return None
        return diagnosis

    def examine(self, diagnosis: Diagnosis) -> Diagnosis:
        """Add what the record does not show: which batch, and whether it or the weights hold NaN.

        Polls first: clean steps prove the snapshots that a plan may need.
        """
        self.catch_up()
        self._locate(diagnosis)
        diagnosis = self._look_at_state(diagnosis)
        if diagnosis.cause.about.is_nonfinite and "type" in diagnosis.evidence:
            # An exception: the device counted no skipped step, and patience must end all the same.
            diagnosis = replace(diagnosis, streak=self.history.note_nonfinite_error())
        return diagnosis

    def execute(self, plan: Plan, diagnosis: Diagnosis) -> Outcome:
        """Apply the actions in order and write down what they did, also if one halts the run.

        Raises:
            HealingError: the run must stop.
        """
        at, before, began = self._run.step, self._adjusted(), time.monotonic()
        effects: list[bool] = []
        outcome = Outcome(plan)
        if outcome.rolled_back:
            self._note_level(diagnosis)
        self.recovering_from = diagnosis
        try:
            for action in plan:
                effects.append(self._apply(action))
        except HealingError:
            self._has_halted = True
            raise
        finally:
            self.recovering_from = None
            seconds = time.monotonic() - began
            self.history.note_plan(diagnosis, plan, effects, first_pending=at - self._config.lag)
            self._write(diagnosis, plan, effects, at, before, seconds)
        return outcome

    def would_halt(self, diagnosis: Diagnosis) -> bool:
        """Return whether the policy would halt for a diagnosis; nothing is done."""
        plan = decide(diagnosis, self.history, self._config, self._run.snapshots())
        return any(isinstance(action, Halt) for action in plan)

    def give_up_batch(self, diagnosis: Diagnosis) -> None:
        """Count a batch that is dropped because the plan has no cure for its exception.

        Raises:
            HealingError: so many failed in a row that it is not the batches.
        """
        self._num_given_up += 1
        most = MAX_CONSECUTIVE_DATA_ERRORS
        if self._num_given_up > most:
            raise HealingError(
                f"{diagnosis.cause.value} at step {diagnosis.step}: expected at most {most} "
                f"batches in a row that no plan cures, got {self._num_given_up}",
                diagnosis.cause.about.exit_code,
            )

    def note_batch_worked(self) -> None:
        """Count from zero: a step was taken."""
        self._num_given_up = 0

    # What a diagnosis needs to know beyond the record.

    def _locate(self, diagnosis: Diagnosis) -> None:
        """Add the batch to the evidence: step numbers come again after a rollback."""
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

    def _note_level(self, diagnosis: Diagnosis) -> None:
        """Add the level of the loss to the evidence: that is what a rollback should bring back."""
        level, noise = self._monitor.watch.loss_level()
        if level == level:
            diagnosis.evidence.setdefault("usual_loss", level)
            diagnosis.evidence.setdefault("noise", noise)

    def _look_at_state(self, diagnosis: Diagnosis) -> Diagnosis:
        """Look for NaN in the state if it could be the cause, and in the batch if it is not."""
        config = self._config
        stops = config.nan_action == "raise" and diagnosis.cause.about.is_nonfinite
        if stops or not may_be_the_weights(
            diagnosis, config.nan_patience, config.max_consecutive_skips
        ):
            return diagnosis
        # All ranks act on a record in the same step, but not on an exception.
        try:
            was_raised = "type" in diagnosis.evidence
            found = self._run.corruption(not was_raised, was_raised or diagnosis.streak > 1)
        except Exception as error:
            self._note(f"weights could not be checked for NaN: {error!r}")
            return diagnosis
        if found is None:
            self._look_at_data(diagnosis)
            return diagnosis
        return diagnose_corruption(diagnosis, found, self._run.step)

    def _look_at_data(self, diagnosis: Diagnosis) -> None:
        """Add to the evidence whether NaN came with the batch, where the state holds none."""
        evidence, is_first = diagnosis.evidence, diagnosis.streak == 1
        may_be_data = diagnosis.cause.about.is_nonfinite and not diagnosis.is_proven
        if not may_be_data or (self._saw_bad_data and is_first):  # then once patience is spent
            return
        fault = self._run.data_fault(diagnosis.step)
        if fault:
            self._saw_bad_data = True
            evidence["blames"] = f"the data: {fault}"
        elif not is_first and "blames" not in evidence:
            sound = "weights, buffers and optimizer state"
            sound += "" if fault is None else ", the batch"
            evidence["hint"] = (
                f"{sound} are finite: look for weights so large that a forward pass overflows, and "
                "for NaN outside of them, as in a hidden state that is carried from step to step"
            )

    # What becomes of a plan.

    def ask_hook(self, diagnosis: Diagnosis, plan: Plan) -> Plan:
        """Return the plan that the user's hook prefers; the same one if there is no hook."""
        if self._hook is None or (not plan and diagnosis.severity < Severity.WARN):
            return plan
        is_spent = any(isinstance(action, Halt) and action.exit_code in SPENT for action in plan)
        try:
            answer = self._hook(diagnosis, plan)
            return plan if answer is None or is_spent else self._checked(answer)
        except Exception as error:
            self._journal.event("hook_failed", self._run.step, error=repr(error))
            self._note(f"the hook of on_instability failed, the plan was kept: {error!r}")
            return plan

    def _checked(self, answer: Any) -> Plan:
        """Return the plan of a hook, or raise what is wrong with it."""
        plan = tuple(answer)
        if isinstance(answer, str):  # an empty one would pass for an empty plan
            raise TypeError(f"expected a tuple of actions from the hook, got {plan!r}")
        for action in plan:
            check_action(action)
            if isinstance(action, SkipBatches) and action.last_step > self._run.step + MAX_AHEAD:
                raise ValueError(  # each of them would be drawn
                    f"SkipBatches: last_step: expected at most {MAX_AHEAD} steps ahead of the run, "
                    f"which is at step {self._run.step}, got {action.last_step}"
                )
        most, tried = self._config.max_recovery_attempts, self.history.attempts
        if tried >= most and any(is_custom(action) for action in plan):
            raise ValueError(
                f"expected at most {most} attempts (max_recovery_attempts) with actions of your "
                f"own, got {tried} before this one"
            )
        return plan

    def _apply(self, action: Action) -> bool:
        """Apply an action; return its effect. Only a rollback that fails ends the run.

        An action of the user's own that writes weights means it.
        """
        try:
            if is_custom(action):
                self._monitor.note_weights()
            has_effect = bool(action.apply(self._run))
            if is_custom(action) and self._monitor.were_weights_written():
                self._monitor.expect_change()
        except HealingError:
            raise
        except Exception as error:
            if isinstance(action, Rollback):
                raise HealingError(f"rollback failed: {error!r}") from error
            self._journal.event(
                "action_failed", self._run.step, error=repr(error), **action_to_json(action)
            )
            self._note(f"{type(action).__name__} failed and was left out: {error!r}")
            return False
        if isinstance(action, Rollback):
            self.late.clear()  # found in steps that did not happen
        return has_effect

    # What is written down.

    def _adjusted(self) -> dict[str, float]:
        """What plans change and records do not show."""
        return {"lr_scale": self._run.lr_scale, "micro_batches": self._run.micro_batches}

    def _write(
        self,
        diagnosis: Diagnosis,
        plan: Plan,
        effects: Sequence[bool],
        at: int,
        before: dict[str, float] | None = None,
        seconds: float = 0.0,
    ) -> None:
        """Write a diagnosis and its plan; fewer effects than actions if one halted the run."""
        self.log.append((at, diagnosis, plan))
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
                before=self._adjusted() if before is None else before,
                after=self._adjusted(),
            )
            self.num_changes += changes_training(plan)
        except Exception as error:
            self._journal.event("logging_failed", self._run.step, error=repr(error))

    def _write_overflows(self) -> None:
        """Write the overflows of a scaler that has found its scale, as one entry."""
        if not self._overflows:
            return
        first, last = self._overflows[0], self._overflows[-1]
        evidence = {"skipped": len(self._overflows), "first_step": first.step, **last.evidence}
        self._overflows = []
        self._write(replace(last, evidence=evidence), (), (), self._run.step)

    def _write_outcome(self, incident: Incident) -> None:
        """Write whether an incident is healed: the loss is where it was, within its noise.

        Within the noise of then and of now: the loss of a run that is broken has noise to spare,
        and that of the first steps is hardly known. Where nothing was learned the loss from before
        is that of weights that knew nothing: to be there again is no success. The last few losses
        count by themselves, because the level leaves out what has leapt above it.
        """
        before, (level, noise) = incident.loss_before, self._monitor.watch.loss_level()
        if before is None or not incident.rollbacks or level != level:
            return
        loss = max(level, self._monitor.watch.latest_loss())
        noise = min(noise, incident.noise)
        margin = max(RECOVERED_NOISE * noise, RECOVERED_SHARE * abs(before))
        is_of_chance = incident.first_step < FEWEST and self._monitor.watch.has_learned_nothing
        has_learned = not (is_of_chance or Cause.NOT_LEARNING.value in incident.causes)
        is_healed = loss <= before + margin and has_learned
        self._journal.note_outcome(is_healed, loss, before)
        self._journal.event(
            "outcome",
            self._run.step,
            first_step=incident.first_step,
            healed=is_healed,
            loss=loss,
            loss_before=before,
            has_learned=has_learned,
        )

    def _write_forecast(self, seen: Seen) -> None:
        """Write that the forecast finds the run in another condition."""
        for step, before, after in self._monitor.watch.take_moves(seen.step, seen.findings):
            self._journal.event("forecast", step, before=before, after=after)

    # When the run ends, is saved or resumed.

    def finish(self) -> None:
        """Write down what the last records show, when no more steps will be taken."""
        late, self.late = self.late, []
        for seen in late:
            self._write_last(seen.findings)
        for seen in self._monitor.poll_last():
            self._write_last(seen.findings)
            self._write_forecast(seen)
        for incident in self.history.incidents:
            self._write_outcome(incident)
        self._write_overflows()

    def _write_last(self, findings: Sequence[Finding]) -> None:
        """Write findings without a plan; after a halt they are only counted, so it stays last."""
        if self._has_halted:
            self.history.note_findings(findings)
            return
        diagnosis = self.diagnose(Seen(self._run.step, findings))
        if diagnosis is None:
            return
        self._locate(diagnosis)
        was_skipped = diagnosis.cause.about.is_skipped and not diagnosis.evidence.get("applied")
        plan: Plan = (Skip(),) if was_skipped else ()
        self._write(diagnosis, plan, [True] * len(plan), self._run.step)

    def late_findings(self) -> list[tuple[int, list[dict[str, Any]]]]:
        """Return :attr:`late` as plain values."""
        return [(seen.step, [f.to_json() for f in seen.findings]) for seen in self.late]

    def resume(
        self,
        history: dict[str, Any],
        late: Sequence[tuple[int, Sequence[dict[str, Any]]]],
    ) -> None:
        """Go on with what ``history.state()`` and :meth:`late_findings` returned elsewhere."""
        self.history = History.from_state(history)
        self.late = [
            Seen(step, [Finding.from_json(f) for f in findings]) for step, findings in late
        ]
