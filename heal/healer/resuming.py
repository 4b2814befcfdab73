"""The part of a healer that outlives the process, and looks back: checkpoints and recomputation."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from heal.config import HealingConfig
from heal.healer.durable import Durable
from heal.healer.parts import Parts
from heal.healer.recompute import Recomputation, recompute
from heal.journal.journal import Journal
from heal.step.micro_batch import TrainStep


class Resuming:
    """The half of a Healer that saves, resumes and computes again."""

    config: HealingConfig
    journal: Journal
    parts: Parts

    def resume(self) -> int:
        """Go on from the newest checkpoint that is whole on every rank; return the next step.

        Call it once, before the first step, on every rank; 0 if there is nothing to resume.
        Weights, optimizer, schedules, generators, position in the data and what healing remembers
        are as they were: the run goes on bit by bit as if it had never stopped. A damaged
        checkpoint is passed over and noted.

        Raises:
            ValueError: no ``checkpoint_dir`` was given.
            StateMismatch: the checkpoint is of another model or optimizer; nothing was changed.
        """
        step = self._checkpoints().resume()
        if step:
            self.parts.books.first_snapshot()
        return step

    @property
    def failed_checkpoints(self) -> int | None:
        """How many saves failed; None without a ``checkpoint_dir``."""
        durable = self.parts.books.durable
        return None if durable is None else durable.failures

    def save_checkpoint(self) -> None:
        """Save now, and return when it is on the disk; every rank has to call this.

        Raises:
            ValueError: no ``checkpoint_dir`` was given.
            SaveFailed: nothing was saved; what was saved before is untouched.
        """
        self._checkpoints().save()

    def _checkpoints(self) -> Durable:
        if self.parts.books.durable is None:
            raise ValueError("there is no checkpoint_dir; give one to the Healer")
        return self.parts.books.durable

    def recompute(
        self,
        train_step: TrainStep,
        batches: Sequence[Any],
        losses: Sequence[Tensor] | None = None,
        *,
        accumulate: int = 1,
    ) -> Recomputation:
        """Compute the last steps again, and tell a passing fault from data and model.

        There must be a snapshot of the first of them: see :meth:`request_snapshot`. The run itself
        computes, and every byte is put back. Every rank has to call this. The verdict is in the
        journal too.

        Args:
            train_step: takes a batch and returns its mean loss, as it did.
            batches: of the last steps, in order.
            losses: of these steps, if they were kept: they tell which rank it was.
            accumulate: batches per step.

        Raises:
            CannotRecompute: there is no such snapshot, or healing changed the learning rate.
        """
        steps = [batches[i : i + accumulate] for i in range(0, len(batches), accumulate)]
        parts = self.parts
        computed = parts.state, parts.guarded, parts.micro, parts.run, parts.schedules.stepped
        return recompute(*computed, self.journal, train_step, steps, losses)

    def _save_to(self, directory: str | Path, group: Any) -> None:
        """Save to a folder from now on.

        Raises:
            OSError: it cannot be made. At once, for nothing is trained yet that could be lost; a
                run whose every save will fail would be found out too late.
        """
        try:
            durable = Durable(
                directory,
                self.config,
                self.parts.state,
                self.parts.run,
                self.parts.stream,
                self.parts.memory,
                self.journal,
                self.parts.notes,
                group,
            )
        except OSError as error:
            raise OSError(
                error.errno,
                f"checkpoint_dir {str(directory)!r} cannot be made: {error.strerror or error}; "
                "give a folder that this process may write to, or none, to save no checkpoints",
            ) from error
        self.parts.books.durable = self.parts.run.durable = self.parts.attempts.durable = durable
