"""Runs the trials of experiments: a loss with old weights in place of today's.

:class:`Trial` swaps the weights and puts every bit back. :class:`BodyTrials` runs one in a
hand-written loop, by the loop's own body, because only that knows how a batch becomes a loss: the
batches of one step are given out once more, with old weights in place; the body computes and
backpropagates, ``healer.step(loss)`` takes the loss and changes nothing, and the same batches are
given out again, for real.
"""

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils._pytree import tree_leaves

from heal.buffers import Key, are_of_evaluation, local_part
from heal.data.split import own_copy
from heal.guarded_step import GuardedStep, OtherSteps
from heal.lr_schedules import Schedules
from heal.snapshots import Snapshot
from heal.training_state import RngState, TrainingState

if TYPE_CHECKING:
    from heal.experiment import Experiment

Forward = Callable[[Any], Tensor | float]


class Trial:
    """Old weights in place of today's, until :meth:`end`.

    Weights that the optimizer trains and buffers that move are swapped by copying, so that every
    tensor keeps its address. Gradients, generators, parameter groups and schedulers are put back.

    Args:
        state: the tensors that are swapped.
        snapshot: the old weights; None if there is none, so that nothing can be tried.
        player: the optimizer whose weights are swapped; None for those of all.
        wants_gradients: whether gradients are in question, so that the loss is backpropagated.
        is_of_evaluation: whether layers that keep running statistics read them, as evaluation does.
            All else stays in training mode: there forward returns what the caller expects.
        note: called with what failed.
    """

    def __init__(
        self,
        state: TrainingState,
        snapshot: Snapshot | None,
        player: int | None,
        wants_gradients: bool,
        is_of_evaluation: bool,
        note: Callable[[str], None],
    ) -> None:
        self._note = note
        self.wants_gradients = wants_gradients
        self.is_of_evaluation = is_of_evaluation
        self._state = state
        self._live = state.everything()
        held = [key for key in self._live if key[0] in ("parameter", "buffer")]
        # On the host: the body may need all the memory that the device has.
        self._saved = {key: self._live[key].detach().to("cpu", copy=True) for key in held}
        self._grads = [(p, p.grad) for p in state.parameters()]
        self._modes = [(module, module.training) for module in state.model.modules()]
        self._hooks: list[Any] = []
        if is_of_evaluation:
            for module, _ in self._modes:
                if are_of_evaluation(module):
                    module.eval()
                    # The body may put the model into training mode once more.
                    self._hooks.append(module.register_forward_pre_hook(_evaluate))
        self._values = state.values()
        self.rng = RngState.now()
        self.is_possible = snapshot is not None
        for param, _ in self._grads:
            param.grad = None
        if snapshot is not None:
            swapped = state.keys_of(player, snapshot.tensors)
            self._write({key: snapshot.tensors[key] for key in swapped if key in self._live})

    @torch.no_grad()
    def _write(self, tensors: Mapping[Key, Tensor]) -> None:
        for key, tensor in tensors.items():
            # Through .data: a write that is taken back is none to whoever counts versions.
            self._live[key].data.copy_(tensor)
        fsdp: Any = sys.modules.get("torch.distributed.fsdp")  # to import it takes a second
        for module in () if fsdp is None else self._state.model.modules():
            if isinstance(module, fsdp.FSDPModule):
                module.reshard()  # what a forward without a backward leaves gathered is old now

    @property
    def needs_both(self) -> bool:
        """Whether the loss with today's weights must come from the trial too, not from the step.

        The cause of NaN in the real step, such as a hook, may be missing in a trial, and the step
        is not taken in evaluation mode.
        """
        return self.wants_gradients or self.is_of_evaluation

    def forward(self, compute: Callable[[], Tensor | float]) -> float | None:
        """Return a loss computed without gradients; None if that failed. Generators are put back.

        Where gradients are in question it is backpropagated, and infinite if they are not finite.
        With several ranks all of them call this, and a failure of one is a failure of all.
        """
        if not self.is_possible:
            return None
        if self.wants_gradients:
            return self._backward(compute)
        for mode in (torch.no_grad, torch.enable_grad):  # a loss may differentiate by itself
            try:
                with mode():
                    return float(compute())
            except Exception as error:  # an experiment must not end a run
                problem = error
            finally:
                self.rng.put_back()
        self._note(f"experiment: the forward pass failed: {problem!r}")
        return None

    def _backward(self, compute: Callable[[], Tensor | float]) -> float | None:
        try:
            with torch.enable_grad():
                loss = compute()
                if isinstance(loss, Tensor) and loss.requires_grad:
                    loss.backward()
            return self.judged(float(loss.detach() if isinstance(loss, Tensor) else loss))
        except Exception as error:  # an experiment must not end a run
            self._note(f"experiment: the backward pass failed: {error!r}")
            return None
        finally:
            for param, _ in self._grads:
                param.grad = None
            self.rng.put_back()

    def judged(self, loss: float) -> float:
        """Return the loss of a body that has backpropagated; infinite if its step would be skipped.

        So it is where gradients are in question and they, or the statistics that forward wrote,
        are not finite: weights that overflow a variance leave loss and gradients finite.
        """
        if not self.wants_gradients:
            return loss
        grads = [p.grad for p, _ in self._grads if p.grad is not None]
        buffers = [
            self._live[key]
            for key, before in self._saved.items()
            if key[0] == "buffer" and _is_finite(before)
        ]
        return loss if all(map(_is_finite, [*grads, *buffers])) else math.inf

    def put_back(self) -> None:
        """Put today's weights back, and go on in the trial, to compute with them."""
        self._write(self._saved)
        self.rng.put_back()

    def end(self) -> None:
        """Put every bit back. May be called again, if a body goes on after it."""
        self._write(self._saved)
        for param, grad in self._grads:
            param.grad = grad
        while self._hooks:
            self._hooks.pop().remove()
        for module, mode in self._modes:
            module.training = mode
        self._state.restore_settings(self._values)
        self.rng.put_back()


def _evaluate(module: Module, arguments: Any) -> None:
    module.training = False


def _is_finite(tensor: Tensor) -> bool:
    return bool(local_part(tensor).isfinite().all())


class BodyTrials:
    """Gives batches out, and once more where an experiment is due.

    What the body writes after its step in a trial, such as a moving average of the weights, is
    undone. A body that steps other optimizers than the healer's, or a scheduler that was not given,
    would step them in a trial as well; there no trial is run, unless ``forward`` says how to
    compute a loss without the body.

    Attributes:
        is_open: whether the body runs with old weights, so that its step must change nothing.
    """

    def __init__(
        self,
        experiment: "Experiment",
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
        self._others = OtherSteps(guarded.optimizers, note)
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
