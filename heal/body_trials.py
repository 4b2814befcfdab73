"""Runs the trials of experiments in a hand-written loop, by the loop's own body.

Only the body knows how a batch becomes a loss. So the batches of one step are given out once more,
with old weights in place: the body computes and backpropagates, ``healer.step(loss)`` takes the
loss and changes nothing, and the same batches are given out again, for real.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils._pytree import tree_leaves

from heal.data.split import own_copy
from heal.experiment import Experiment
from heal.guarded_step import GuardedStep, OtherOptimizers
from heal.lr_schedules import Schedules
from heal.training_state import RngState
from heal.trial import Trial

Forward = Callable[[Any], Tensor | float]


class BodyTrials:
    """Gives batches out, and once more where an experiment is due.

    What the body writes after its step in a trial, such as a moving average of the weights, is
    undone. A body that steps other optimizers than the healer's, or a scheduler that was not given,
    would step them in a trial as well; there no trial is run, unless ``forward`` says how to
    compute a loss without the body.

    Args:
        experiment: says when a trial is due, and takes its loss.
        guarded: whose optimizers are the healer's own.
        schedules: say whether there is one that was not given.
        forward: computes the loss of a batch; None if only the body can.
        note: called with why a body cannot be run twice.

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
        self._losses: list[float | None] = []  # that the trial has given so far, the old one first
        self._writes = Writes(note)
        self._outer: object = None
        self.is_open = False
        self._others = OtherOptimizers(o.inner for o in guarded.optimizers)
        self._repeats = True

    def batches(self, source: Iterable[Any]) -> Iterator[Any]:
        """Yield the batches of ``source``; those of a trial twice."""
        if self._forward is None:
            self._others.watch()
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
        if loss is not None:
            loss = trial.judged(float(loss.detach() if isinstance(loss, Tensor) else loss))
        self._losses.append(loss if trial.is_possible else None)
        if self._guarded.scaler is not None:
            self._guarded.forget_scaling()
        goes_on = trial.is_of_evaluation and len(self._losses) < 2
        if goes_on:
            trial.put_back()
        else:
            self._trial, self.is_open = None, False
            trial.end()
            self._experiment.note_losses(*self._losses)
        self._writes.watch(self._outer)

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
        """Yield the batches of one step for the trial, then again for real.

        In evaluation mode the body runs twice in the trial: the step is not taken in that mode.
        """
        trial = self._trial = self._experiment.begin_trial()
        self._losses.clear()
        self.is_open = True
        self._outer = _get_current_dispatch_mode()
        drawn: list[tuple[Any, RngState]] = [(batch, RngState.now())]
        del batch
        try:
            yield own_copy(drawn[0][0])
            while self._trial is not None and not self._losses:  # the step accumulates batches
                following = next(source, _END)
                if following is _END:
                    self.abandon()  # the epoch ended in the midst of a step
                    break
                drawn.append((following, RngState.now()))
                yield own_copy(following)
            self._writes.undo()
            if self._trial is not None:  # in evaluation mode: with today's weights as well
                for again, rng in drawn:
                    rng.put_back()
                    yield own_copy(again)
                self._writes.undo()
        finally:  # also if the loop was left, by a break or by an exception
            self._writes.leave()
            if self._trial is trial:
                self.abandon()
            trial.end()  # once more: the body may have gone on after its step
        for again, rng in drawn:
            rng.put_back()
            yield again


_END = object()


class Writes(TorchDispatchMode):
    """Keeps what tensors held before they were written in place, in the rest of a trial's body.

    Tensors that were made meanwhile are left out: an evaluation writes many, and keeps none.
    """

    def __init__(self, note: Callable[[str], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._note = note
        self._before: dict[tuple[Any, ...], tuple[Tensor, Tensor]] = {}
        self._made: set[int] = set()
        self._entered = ExitStack()

    def watch(self, outer: object) -> None:
        """Watch the writes of this thread from now on.

        Args:
            outer: the dispatch mode before the body. If that has entered another one, nothing is
                watched: modes must be left in order.
        """
        if _get_current_dispatch_mode() is outer:
            self._entered.enter_context(self)

    def leave(self) -> None:
        """Watch no longer, and forget what there was."""
        self._entered.close()
        self._before.clear()
        self._made.clear()

    def undo(self) -> None:
        """Watch no longer, and put back what was written, the last write first."""
        written = list(self._before.values())
        self.leave()
        with torch.inference_mode():  # also tensors that were made in it
            for tensor, before in reversed(written):
                if tensor.shape == before.shape:
                    tensor.data.copy_(before)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        self._contained(self._keep_written, func, args, kwargs)
        found = func(*args, **kwargs)
        self._contained(self._note_made, found, (args, kwargs))
        return found

    def _contained(self, action: Callable[..., None], *arguments: Any) -> None:
        """A tensor of a kind that cannot be copied must not end the run; it is not put back."""
        try:
            action(*arguments)
        except Exception as error:
            self._note(f"experiment: a write after the step is not undone: {error!r}")

    def _keep_written(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        for place, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                self._keep(args[place] if place < len(args) else kwargs.get(argument.name))

    def _keep(self, written: Any) -> None:
        for tensor in tree_leaves(written):
            if _storages(tensor) - self._made:
                place = *_storages(tensor), tensor.storage_offset(), tensor.shape
                if place not in self._before:
                    self._before[place] = tensor, tensor.detach().to("cpu", copy=True)

    def _note_made(self, found: Any, given: Any) -> None:
        self._made |= _storages(found) - _storages(given)


def _storages(values: Any) -> set[int]:
    tensors = [value for value in tree_leaves(values) if isinstance(value, Tensor)]
    return {t.untyped_storage()._cdata for t in tensors if t.layout is torch.strided}
