"""Tries to take a step of the whole loop, and heals what the attempt raises."""

from typing import TYPE_CHECKING, Any

from torch import Tensor

from heal.actions import CannotHeal, Rollback
from heal.causes import Family
from heal.diagnose import Diagnosis, diagnose_exception
from heal.guarded_step import GuardedStep
from heal.micro_batch import MicroBatcher, TrainStep
from heal.run import TorchRun
from heal.treatment import Treatment

if TYPE_CHECKING:
    from heal.loop import Healer

Failure = tuple[Diagnosis, Exception]


class Attempts:
    """Forward, backward and step; again in smaller pieces, after a wait or not at all."""

    def __init__(
        self,
        run: TorchRun,
        guarded: GuardedStep,
        micro: MicroBatcher,
        treatment: Treatment,
        healer: "Healer",
    ) -> None:
        self._run = run
        self._guarded = guarded
        self._micro = micro
        self._treatment = treatment
        self._healer = healer

    def take_step(self, train_step: TrainStep, batches: list[Any]) -> bool:
        """Do one step; False if its batches were given up.

        Raises:
            CannotHeal: healing is at its end.
            Exception: what was raised, if there is no cure for its kind.
        """
        while True:
            for optimizer in self._guarded.optimizers:
                optimizer.zero_grad()
            loss, failure = self._try_backward(train_step, batches)
            if failure is not None:
                # The except block is left: nothing holds the frames whose tensors must be freed.
                self._micro.undo()
                if not self._heal(*failure):
                    return False
                continue
            failure = self._try_step(loss)
            if failure is None:
                self._micro.note_clean()
                return True
            self._heal(*failure)  # never tried again: some weights may be updated already
            return False

    def treat(self, error: Exception, phase: str, **evidence: Any) -> None:
        """Heal what was raised outside of a step."""
        diagnosis, error = self._judged(error, phase)
        diagnosis.evidence.update(evidence)
        self._heal(diagnosis, error)

    def _try_backward(
        self, train_step: TrainStep, batches: list[Any]
    ) -> tuple[Tensor | None, Failure | None]:
        scaler = self._guarded.scaler
        scale = scaler.scale if scaler is not None else (lambda loss: loss)
        try:
            return self._micro.backward(batches, train_step, scale), None
        except Exception as error:
            return None, self._judged(error, self._micro.phase)

    def _try_step(self, loss: Tensor | None) -> Failure | None:
        try:
            self._healer.step(loss)
        except CannotHeal:
            raise
        except Exception as error:
            return self._judged(error, "step")
        return None

    def _judged(self, error: Exception, phase: str) -> Failure:
        diagnosis = diagnose_exception(error, step=self._run.step, phase=phase)
        if diagnosis.family is Family.MEMORY:
            # The traceback holds the frames, and these the tensors that fill the memory.
            error = error.with_traceback(None)
            error.__context__ = error.__cause__ = None
        return diagnosis, error

    def _heal(self, diagnosis: Diagnosis, error: Exception) -> bool:
        """Carry out the plan; True if the same batches should be tried again."""
        try:
            plan = self._treatment.carry_out(diagnosis)
        except CannotHeal as halt:
            if diagnosis.family is Family.STOP:
                raise error from None
            self._healer.close(halt)
            raise halt from error
        undone = any(isinstance(action, Rollback) for action in plan)
        return diagnosis.family in (Family.MEMORY, Family.WAIT) and not undone
