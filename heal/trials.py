"""Runs the trials of experiments in a hand-written loop, by the loop's own body.

Only the body knows how a batch becomes a loss. So the batches of one step are given out once more,
with old weights in place: the body computes and backpropagates, ``healer.step(loss)`` takes the
loss and changes nothing, and the same batches are given out again, for real.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor

from heal.data.stream import own_copy
from heal.experiment import Experiment, Trial
from heal.guarded_step import GuardedStep, OtherOptimizers
from heal.lr_schedules import Schedules
from heal.training_state import RngState

Forward = Callable[[Any], Tensor | float]


class BodyTrials:
    """Gives batches out, and once more where an experiment is due.

    A body that steps other optimizers than the healer's, or a scheduler that was not given, would
    step them in a trial as well; there no trial is run, unless ``forward`` says how to compute a
    loss without the body.

    Args:
        experiment: says when a trial is due, and takes its loss.
        guarded: whose optimizers are the healer's own.
        schedules: say whether there is one that was not given.
        forward: computes the loss of a batch; None if only the body can.
        note: told of a body that cannot be run twice.

    Attributes:
        is_open: whether the body runs with old weights, so that its step must change nothing.
    """

    def __init__(
        self,
        experiment: Experiment,
        guarded: GuardedStep,
        schedules: Schedules,
        forward: Forward | None,
        note: Callable[[str], None],
    ) -> None:
        self._experiment = experiment
        self._guarded = guarded
        self._schedules = schedules
        self._forward = forward
        self._note = note
        self._trial: Trial | None = None
        self.is_open = False
        self._others = OtherOptimizers(o.inner for o in guarded.optimizers)
        self._repeats = True

    def batches(self, source: Iterable[Any]) -> Iterator[Any]:
        """Yield the batches of ``source``; those of a trial twice."""
        iterator = iter(source)
        for batch in iterator:
            if not self._experiment.is_due:
                yield batch
                del batch  # it would stay in memory while the next one is read
            elif self._forward is not None:
                self._run_forward(self._forward, batch)
                yield batch
                del batch
            elif self._can_repeat():
                yield from self._twice(batch, iterator)
            else:
                yield batch
                del batch

    def finish(self, loss: Tensor | float | None) -> None:
        """Take the loss of the body instead of a step, and put everything back."""
        trial = self._trial
        assert trial is not None
        self._trial, self.is_open = None, False
        if loss is not None:
            loss = trial.judged(float(loss.detach() if isinstance(loss, Tensor) else loss))
        trial.end()
        if self._guarded.scaler is not None:
            self._guarded.forget_scaling()
        self._experiment.note_losses(loss if trial.is_possible else None)

    def abandon(self) -> None:
        """Give up the trial that is under way: its body could not be run to its step."""
        trial, self._trial, self.is_open = self._trial, None, False
        if trial is not None:
            trial.end()
            self._experiment.note_losses(None)

    def close(self) -> None:
        """Stop watching the optimizers of the process."""
        self._others.close()

    def _can_repeat(self) -> bool:
        if self._repeats and self._others.have_stepped and not self._guarded.ranks.has_others:
            self._repeats = False
        return self._repeats and self._schedules.are_known and not self._guarded.has_stages

    def _run_forward(self, forward: Forward, batch: Any) -> None:
        with self._experiment.trial() as trial:
            old = trial.forward(lambda: forward(own_copy(batch)))
            trial.put_back()
            now = trial.forward(lambda: forward(own_copy(batch)))
        self._experiment.note_losses(old, now)

    def _twice(self, batch: Any, source: Iterator[Any]) -> Iterator[Any]:
        """Yield the batches of one step for the trial, then again for real."""
        trial = self._trial = self._experiment.begin_trial()
        self.is_open = True
        drawn: list[tuple[Any, RngState]] = [(batch, RngState.now())]
        del batch
        try:
            yield own_copy(drawn[0][0])
            while self._trial is not None:  # the step accumulates several batches
                following = next(source, _END)
                if following is _END:
                    self.abandon()  # the epoch ended in the midst of a step
                    break
                drawn.append((following, RngState.now()))
                yield own_copy(following)
        finally:  # also if the loop was left, by a break or by an exception
            if self._trial is trial:
                self.abandon()
            trial.end()  # once more: the body may have gone on after its step
        for again, rng in drawn:
            rng.put_back()
            yield again


_END = object()
