"""What forward, backward, step or the loader raised: diagnosed, put back, reported to all ranks."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from heal.actions import (
    Backoff,
    CheckpointActivations,
    HealingError,
    Plan,
    ShrinkBatch,
    is_custom,
)
from heal.causes import Cause, Family
from heal.cluster.watchdog import last_message, leave_message
from heal.data.split import own_copy
from heal.data.stream import StepBatches
from heal.diagnose import Diagnosis, diagnose_exception
from heal.durable import Remedy
from heal.exception_causes import message_of, qualified_name
from heal.exit_codes import ExitCode
from heal.experiment import Experiment
from heal.journal import Journal
from heal.micro_batch import TrainStep
from heal.policy import MAX_HALVINGS
from heal.record import Flag
from heal.recovery import Outcome, Recovery
from heal.training_run import TorchRun

Failure = tuple[Diagnosis, Exception]

READ_WAITS = 3
"""Waits for a batch that the disk cannot read; after that its file is at fault, not the disk."""

MAX_MESSAGE = 300  # characters of an exception's message that are sent to other ranks

CURES: dict[Family, tuple[type, ...]] = {
    Family.MEMORY: (ShrinkBatch, CheckpointActivations),
    Family.WAIT: (Backoff,),
}
"""Actions after which the same batches may work; a plan of the policy has one, or halts."""


class FailedSteps:
    """Diagnoses what a step or the loader raises, and says what follows from the outcome.

    With other ranks nothing is tried again: the record of the step reports the failure, all ranks
    skip that step, and some steps later all of them apply the same cure.
    """

    def __init__(
        self,
        run: TorchRun,
        recovery: Recovery,
        journal: Journal,
        experiment: Experiment,
        report: Callable[[Flag], None],
    ) -> None:
        self._experiment = experiment
        self._run = run
        self._guarded = run.guarded
        self._ranks = run.guarded.ranks
        self._micro = run.micro
        self._recovery = recovery
        self._stream = run.stream
        self._journal = journal
        self._durable = run.durable
        self._report = report
        self._fatal: Exception | None = None
        self._waited_after, self._read_waits = (-1, -1), 0
        self._bad_files: set[str] = set()

    def compute(
        self, train_step: TrainStep, batches: StepBatches
    ) -> tuple[Tensor | None, Failure | None]:
        """Run forward and backward of a step; return the mean loss, or what was raised.

        After a failure gradients, buffers and generators are as they were before.

        Raises:
            NoMoreBatches: there are none.
        """
        for optimizer in self._guarded.optimizers:
            optimizer.zero_grad()
        loss, failure = self._try_all(train_step, batches)
        if failure is not None:
            # The except block is left: nothing holds the frames whose tensors must be freed.
            self._micro.undo()
        return loss, failure

    def stand_in(self, failure: Failure, train_step: TrainStep, batches: StepBatches) -> None:
        """Report a failure to all ranks, and send what they wait for. Halt if that is too late."""
        batches.draw_rest()  # as the other ranks do: all stay at one place in the data
        if not self._micro.messages.can_be_matched(batches.count * self._micro.pieces):
            self._leave(*failure)
        self.send(*failure)
        try:
            self._micro.stand_in(train_step, self._scale())
        except Exception as error:
            self._leave(*self.judge(error, self._micro.phase))

    def give_back(self, failure: Failure, phase: str) -> None:
        """Put back what a user's own forward and backward have changed; leave if ranks wait.

        After an exception in the optimizer's step nothing is: some weights may be updated already.
        """
        diagnosis = failure[0]
        if diagnosis.family is Family.DATA:
            self._name_batch(diagnosis)
        elif diagnosis.family is Family.MEMORY:
            diagnosis.evidence["cannot_be_cut"] = self._micro.note_caller()
        if phase != "step":
            self._micro.undo()
            if self._ranks.has_others:
                self._leave(*failure)

    def send(self, diagnosis: Diagnosis, error: Exception) -> None:
        """Report a failure to the other ranks, with the record of this step."""
        flag = diagnosis.cause.about.sent_as or Flag.UNKNOWN_ERROR
        if flag is Flag.UNKNOWN_ERROR:
            self._fatal = error
        self._journal.event("rank_failed", self._run.step, diagnosis=diagnosis.to_json())
        self._report(flag)

    def explained(self, halt: HealingError) -> HealingError:
        """Return a halt of all ranks with the rank that failed and its exception.

        All ranks halt in the same step, so that they can exchange messages.
        """
        log = self._recovery.log
        if not log or log[-1][1].evidence.get("flag") != Flag.UNKNOWN_ERROR.name:
            return halt
        own = "" if self._fatal is None else _in_words(self._fatal)
        texts = self._ranks.gather(own)
        failed = [f"rank {rank} raised {text}" for rank, text in enumerate(texts) if text]
        explained = HealingError(f"{halt}: {'; '.join(failed)}", halt.exit_code)
        explained.__cause__ = self._fatal
        return explained

    def _try_all(
        self, train_step: TrainStep, batches: StepBatches
    ) -> tuple[Tensor | None, Failure | None]:
        """Run forward and backward of every batch, as soon as it is drawn, until one fails."""
        loss: Tensor | None = None
        is_trial = self._experiment.is_due and not self._guarded.has_stages
        old_losses: list[float | None] = []
        now_losses: list[float | None] = []
        for at in range(batches.count):
            rng = batches.turn(at)  # not in a try: exceptions of the loader were judged there
            if is_trial:
                old, now = self._try_old_weights(train_step, batches.drawn[at])
                old_losses.append(old)
                now_losses.append(now)
                if at == batches.count - 1:
                    self._experiment.note_losses(_mean(old_losses), _mean(now_losses))
            if at == 0:
                self._micro.begin(rng)
            else:
                self._micro.note_drawn(rng)
            loss, failure = self._try_add(train_step, batches.drawn[: at + 1], batches)
            if failure is not None:
                return None, failure
        return loss, None

    def try_again(self, train_step: TrainStep, batches: StepBatches) -> None:
        """Run a whole trial on the batches of a step that was taken; nothing else changes."""

        def compute() -> Tensor:
            losses = [train_step(own_copy(batch)) for batch in batches.drawn]
            return torch.stack(losses).mean()

        self._experiment.compare(compute)

    def _try_old_weights(
        self, train_step: TrainStep, batch: Any
    ) -> tuple[float | None, float | None]:
        """Return the loss with old weights, and with today's where the real step has it not."""
        with self._experiment.trial() as trial:
            old = trial.forward(lambda: train_step(own_copy(batch)))
            if not trial.needs_both:
                return old, None
            trial.put_back()
            return old, trial.forward(lambda: train_step(own_copy(batch)))

    def _try_add(
        self, train_step: TrainStep, so_far: list[Any], batches: StepBatches
    ) -> tuple[Tensor | None, Failure | None]:
        try:
            return self._micro.add(so_far, batches.count, train_step, self._scale()), None
        except Exception as error:
            diagnosis, raised = self.judge(error, self._micro.phase)
        if diagnosis.family is Family.DATA:
            self._name_batch(diagnosis, len(batches.drawn) - 1 - self._micro.batch_at)
        elif diagnosis.family is Family.MEMORY and self._micro.cannot_cut:
            diagnosis.evidence["cannot_be_cut"] = self._micro.cannot_cut
        return None, (diagnosis, raised)

    def _name_batch(self, diagnosis: Diagnosis, back: int = 0) -> None:
        """Add the batch to the evidence: the newest one, or the one ``back`` before it."""
        diagnosis.evidence.update(self._stream.identity(back))
        diagnosis.evidence["ordinal"] = self._stream.ordinal - 1 - back

    def _scale(self) -> Callable[[Tensor], Tensor]:
        scaler = self._guarded.scaler
        return scaler.scale if scaler is not None else (lambda loss: loss)

    def _leave(self, diagnosis: Diagnosis, error: Exception) -> None:
        """Halt this rank and break the group, so that the others halt now and not in minutes."""
        diagnosis.evidence["halted"] = "other ranks waited for gradients that cannot be sent"
        self._journal.recovery(diagnosis, [])
        then, code = self._after_restart(diagnosis)
        reason = (
            f"{diagnosis.cause.value} at step {diagnosis.step} on rank {self._journal.rank} "
            f"({_in_words(error)}) after other ranks began to wait for this one; {then}"
        )
        leave_message(self._journal.rank, reason, code)
        self._ranks.abort()
        halt = HealingError(reason, code)
        halt.__cause__ = error  # for the postmortem
        raise halt

    def _after_restart(self, diagnosis: Diagnosis) -> tuple[str, ExitCode]:
        """Leave a remedy for the next start; return what to do, and the exit code that says so."""
        own = diagnosis.cause.about.exit_code
        evidence = diagnosis.evidence
        error = f"{evidence['type']}: {evidence['message']}"
        remedy = Remedy(diagnosis.step, self._journal.rank, diagnosis.cause.value, error)
        if diagnosis.family is Family.DATA and "ordinal" in evidence:
            remedy = replace(remedy, batches=[int(evidence["ordinal"])])
            then = "start the job again: it will leave this batch out"
        elif diagnosis.family is Family.MEMORY:
            if not self._micro.shrink():
                return "the micro-batch is as small as it may be", own
            remedy = replace(remedy, micro=self._micro.state())
            then = f"start the job again: it will cut batches into {self._micro.pieces} pieces"
        else:
            return "nothing is known that the next start could do otherwise", own
        if self._durable is None:
            return "give a checkpoint_dir, so that the next start can do otherwise", own
        if not self._durable.may_leave(remedy):
            return "the same step failed after as many restarts as data errors may come", own
        if not self._durable.leave(remedy):
            return "the disk did not take what the next start would need to do otherwise", own
        return then, ExitCode.DISTRIBUTED

    def judge(self, error: Exception, phase: str) -> Failure:
        """Diagnose an exception of this step, and release the memory that it holds."""
        diagnosis = diagnose_exception(
            error, step=self._run.step, phase=phase, is_alone=self._ranks.is_alone
        )
        if diagnosis.family is Family.MEMORY:
            # The traceback holds the frames, and these the tensors that fill the memory.
            error = error.with_traceback(None)
            error.__context__ = error.__cause__ = None
        return diagnosis, error

    def judge_read(self, error: Exception) -> Failure:
        """Diagnose an exception of the loader.

        A storage error that lasts after some waits is a fault of its file: the batch is dropped,
        within the limits of bad data.
        """
        diagnosis, error = self.judge(error, "data")
        if diagnosis.cause is not Cause.STORAGE_ERROR:
            return diagnosis, error
        if self._waited_after != self._stream.newest:
            self._waited_after, self._read_waits = self._stream.newest, 0
        file = str(getattr(error, "filename", None) or "")
        is_spent = self._read_waits >= READ_WAITS or self._recovery.would_halt(diagnosis)
        if not is_spent and file not in self._bad_files:
            self._read_waits += 1
            return diagnosis, error
        if file:
            self._bad_files.add(file)  # no wait for it in the next epoch
        evidence = {**diagnosis.evidence, "waits": self._read_waits}
        return replace(diagnosis, cause=Cause.DATA_ERROR, evidence=evidence), error

    def judge_epoch(self, error: Exception, epoch: int) -> Failure:
        """Diagnose an exception of a loader that cannot open an epoch.

        Raises:
            Exception: the same, if no wait may cure it: there is no batch to drop or to report.
        """
        diagnosis, error = self.judge(error, "open")
        diagnosis.evidence["epoch"] = epoch
        if diagnosis.family is not Family.WAIT or self._ranks.has_others:
            raise error
        return diagnosis, error

    def judge_batch(self, error: Exception, epoch: int, index: int) -> Failure:
        """Diagnose an exception of a loader that cannot read a batch, with the place of that."""
        diagnosis, error = self.judge_read(error)
        samples = self._stream.samples_of(index)
        diagnosis.evidence.update(epoch=epoch, batch=index, samples=samples)
        return diagnosis, error

    # What follows from the outcome.

    def may_work_now(self, diagnosis: Diagnosis, outcome: Outcome) -> bool:
        """Return whether to try the same batches again; halt if too many in a row are given up."""
        is_cured = self._is_cured(diagnosis.family, outcome.plan)
        is_counted = diagnosis.family in (Family.DATA, Family.NUMERIC)  # by the policy
        if not (outcome.rolled_back or is_cured or is_counted):
            self._recovery.give_up_batch(diagnosis)
        return is_cured and not outcome.rolled_back

    def halt_for(self, halt: HealingError, diagnosis: Diagnosis, error: Exception) -> HealingError:
        """Return a halt with the exception that it is for."""
        if diagnosis.cause is Cause.UNKNOWN:
            raise error from None  # it is the caller's
        if diagnosis.cause.about.sent_as is None and self._ranks.has_others:
            left = last_message()  # of a rank that left: then a collective failed here
            if left is not None and left.get("rank") != self._journal.rank:
                halt = HealingError(str(left["reason"]), int(left["exit_code"]))
        halt.__cause__ = error
        return halt

    def _is_cured(self, family: Family, plan: Plan) -> bool:
        """Whether the same batches may work now: a hook may leave out the cure, or repeat it."""
        incident = self._recovery.history.open_incident(family)
        is_endless = incident is not None and len(incident.plans) > MAX_HALVINGS + 1
        cures = CURES.get(family, ())
        is_cure = any(isinstance(action, cures) or is_custom(action) for action in plan)
        return is_cure and not is_endless

    def worked(self) -> None:
        """Count a step that was taken without an error."""
        self._micro.note_clean()
        self._recovery.note_batch_worked()


def _mean(losses: Sequence[float | None]) -> float | None:
    known = [loss for loss in losses if loss is not None]
    return sum(known) / len(known) if len(known) == len(losses) else None


def _in_words(error: BaseException) -> str:
    return f"{qualified_name(error)}: {message_of(error)[:MAX_MESSAGE]}"
