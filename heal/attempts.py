"""Tries to take a step, and recovers from exceptions of forward, backward, step and loader."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from heal.actions import (
    Backoff,
    CheckpointActivations,
    HealingError,
    Plan,
    Rollback,
    ShrinkBatch,
    is_custom,
)
from heal.causes import Cause, Family
from heal.checkpointing import Durable, Remedy
from heal.cluster import watchdog as last_message
from heal.data.loader_pass import AfterError
from heal.data.split import own_copy
from heal.data.stream import BatchStream, StepBatches
from heal.diagnose import Diagnosis, diagnose_exception
from heal.exceptions import message_of, qualified_name
from heal.exit_codes import ExitCode
from heal.experiment import Experiment
from heal.guarded_step import GuardedStep
from heal.journal import Journal
from heal.micro_batch import TrainStep
from heal.policy import MAX_HALVINGS
from heal.recovery import Recovery
from heal.run import TorchRun
from heal.verdict import Flag

Failure = tuple[Diagnosis, Exception]
Step = Callable[[Tensor | None], None]

READ_WAITS = 3
"""Waits for a batch that the disk cannot read; after that its file is at fault, not the disk."""

MAX_MESSAGE = 300  # characters of an exception's message that are sent to other ranks

CURES: dict[Family, tuple[type, ...]] = {
    Family.MEMORY: (ShrinkBatch, CheckpointActivations),
    Family.WAIT: (Backoff,),
}
"""Actions after which the same batches may work; a plan of the policy has one, or halts."""


class Attempts:
    """Forward, backward and step; again in smaller pieces, after a wait or not at all.

    With other ranks nothing is tried again: the record of the step reports the failure, all ranks
    skip that step, and some steps later all of them apply the same cure.
    """

    def __init__(
        self,
        run: TorchRun,
        guarded: GuardedStep,
        recovery: Recovery,
        stream: BatchStream,
        journal: Journal,
        experiment: Experiment,
        durable: Durable | None,
        report: Callable[[Flag], None],
    ) -> None:
        self._experiment = experiment
        self._run = run
        self._guarded = guarded
        self._ranks = guarded.ranks
        self._micro = run.micro
        self._recovery = recovery
        self._stream = stream
        self._journal = journal
        self._durable = durable
        self._report = report
        self._fatal: Exception | None = None
        self._waited_after, self._read_waits = (-1, -1), 0
        self._bad_files: set[str] = set()

    def take_step(self, train_step: TrainStep, batches: StepBatches, step: Step) -> bool:
        """Take one step; return False if its batches were dropped.

        Args:
            train_step: takes a batch and returns its mean loss.
            batches: of this step.
            step: clips and steps the optimizer, given the loss.

        Raises:
            NoMoreBatches: there are none.
            HealingError: the run must stop.
            Exception: there is no cure for it.
        """
        while True:
            for optimizer in self._guarded.optimizers:
                optimizer.zero_grad()
            loss, failure = self._try_all(train_step, batches)
            if failure is not None:
                # The except block is left: nothing holds the frames whose tensors must be freed.
                self._micro.undo()
                if self._ranks.has_others:
                    batches.draw_rest()  # as the other ranks do: all stay at one place in the data
                    self._stand_in(failure, train_step, batches.count)
                elif self.heal(*failure):
                    continue
                else:
                    if not self._stream.will_rewind:
                        batches.draw_rest()
                    return False
            return self.try_step(partial(step, loss))

    def try_step(self, step: Callable[[], None]) -> bool:
        """Take a step, and recover from what it raises; return whether it was taken.

        It is never tried again: some weights may be updated already.
        """
        try:
            step()
        except HealingError:
            raise
        except Exception as error:
            failure = self.judge(error, "step")
        else:
            self.worked()
            return True
        self.heal(*failure)
        return False

    def repeat(
        self, compute: Callable[[], Any], failed: Callable[[Diagnosis], None]
    ) -> tuple[bool, Any]:
        """Call ``compute`` again after each failure that has a cure; see :meth:`Healer.repeat`."""
        while True:
            try:
                return True, compute()
            except Exception as error:
                failure = self.judge(error, self._micro.phase)
            # The except block is left: nothing holds the frames whose tensors must be freed.
            failed(failure[0])
            self._micro.undo()
            if not self.heal(*failure):
                return False, None

    @contextmanager
    def attempt(self, was_stepping: Callable[[], bool]) -> Iterator[None]:
        """Recover from exceptions of the body: its batch is dropped. Raise those without a cure.

        If ``was_stepping()``, some weights may have changed.
        """
        self._micro.begin()
        failure: Failure | None = None
        is_in_step = False
        try:
            yield
        except HealingError:
            raise
        except Exception as error:
            is_in_step = was_stepping()
            failure = self.judge(error, "step" if is_in_step else "forward")
        if failure is None:
            self.worked()
            return
        diagnosis = failure[0]
        if diagnosis.family is Family.DATA:
            self._name_batch(diagnosis)
        elif diagnosis.family is Family.MEMORY:
            diagnosis.evidence["cannot_be_cut"] = self._micro.note_caller()
        if not is_in_step:
            self._micro.undo()
            if self._ranks.has_others:
                self._leave(*failure)
        self.heal(*failure)

    def loader_failed(self, error: Exception, epoch: int, index: int | None) -> AfterError:
        """Recover from an exception of the loader; return what becomes of the batch.

        Without an ``index`` the epoch could not be opened. Then the only cure is to wait, because
        there is no batch to drop or to report to other ranks.
        """
        diagnosis, error = self.judge(error, "open") if index is None else self.judge_read(error)
        diagnosis.evidence["epoch"] = epoch
        if index is None:
            if diagnosis.family is not Family.WAIT or self._ranks.has_others:
                raise error
        else:
            diagnosis.evidence.update(batch=index, samples=self._stream.samples_of(index))
            if self._ranks.has_others:
                self._send(diagnosis, error)
                return AfterError.STAND_IN
        return AfterError.TRY_AGAIN if self.heal(diagnosis, error) else AfterError.PASS_OVER

    def step_failed(self, error: Exception) -> None:
        """Report to other ranks that the optimizer stopped half-way here; they go on until then.

        Raises:
            HealingError: no message can reach them.
        """
        diagnosis, error = self.judge(error, "step")
        self._send(diagnosis, error)
        self._report(Flag.STEP_FAILED)

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

    def _try_old_weights(
        self, train_step: TrainStep, batch: Any
    ) -> tuple[float | None, float | None]:
        """Return the loss of a batch with the weights of a snapshot; nothing else changes.

        Also that with today's weights where the real step does not show it, else None.
        """
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

    def _stand_in(self, failure: Failure, train_step: TrainStep, count: int) -> None:
        """Report a failure to all ranks, and send what they wait for. Halt if that is too late."""
        if failure[0].cause.about.sent_as is None:
            self.heal(*failure)  # the group is broken already: halt
        if not self._micro.messages.can_be_matched(count * self._micro.pieces):
            self._leave(*failure)
        self._send(*failure)
        try:
            self._micro.stand_in(train_step, self._scale())
        except Exception as error:
            self._leave(*self.judge(error, self._micro.phase))

    def _send(self, diagnosis: Diagnosis, error: Exception) -> None:
        flag = diagnosis.cause.about.sent_as
        if flag is None:
            self.heal(diagnosis, error)  # halts, unless a hook has replaced the halt
            flag = Flag.UNKNOWN_ERROR
        if flag is Flag.UNKNOWN_ERROR:
            self._fatal = error
        self._journal.event("rank_failed", self._run.step, diagnosis=diagnosis.to_json())
        self._report(flag)

    def _leave(self, diagnosis: Diagnosis, error: Exception) -> None:
        """Halt this rank and break the group, so that the others halt now and not in minutes."""
        diagnosis.evidence["halted"] = "other ranks waited for gradients that cannot be sent"
        self._journal.recovery(diagnosis, [])
        then, code = self._after_restart(diagnosis)
        reason = (
            f"{diagnosis.cause.value} at step {diagnosis.step} on rank {self._journal.rank} "
            f"({_in_words(error)}) after other ranks began to wait for this one; {then}"
        )
        last_message.post(self._journal.rank, reason, code)
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

    def heal(self, diagnosis: Diagnosis, error: Exception) -> bool:
        """Carry out the plan; True if the same batches should be tried again."""
        try:
            plan = self._recovery.carry_out(diagnosis)
            undone = any(isinstance(action, Rollback) for action in plan)
            is_cured = self._is_cured(diagnosis.family, plan)
            is_counted = diagnosis.family in (Family.DATA, Family.NUMERIC)  # by the policy
            if not (undone or is_cured or is_counted):
                self._recovery.give_up_batch(diagnosis)
        except HealingError as halt:
            if diagnosis.cause is Cause.UNKNOWN:
                raise error from None
            if diagnosis.cause.about.sent_as is None:
                halt = self._halt_of_others(halt)
            halt.__cause__ = error
            raise halt from error
        return is_cured and not undone

    def _halt_of_others(self, halt: HealingError) -> HealingError:
        """Return the halt of the rank that left, if that is why a collective failed here."""
        left = last_message.read() if self._ranks.has_others else None
        if left is None or left.get("rank") == self._journal.rank:
            return halt
        return HealingError(str(left["reason"]), int(left["exit_code"]))

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
