"""Forward and backward of one step, in pieces where memory is short.

The gradient is that of the whole batch: every piece is weighted by its samples. A step that failed
half-way leaves no trace: gradients, buffers and generators are put back before it is tried again.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import BatchNorm1d, Module, ModuleList, Sequential
from torch.utils.checkpoint import checkpoint

from heal.buffers import SMALL_BYTES, STATISTICS, BufferCopies
from heal.data.split import CannotSplit, count_samples, own_copy, split
from heal.ranks import GradientMessages
from heal.training_state import RngState

TrainStep = Callable[[Any], Tensor]
"""Takes a batch, or a piece of one, and returns its mean loss, which was not yet backpropagated."""


IS_NOT_CUT = "this loop does not cut its batches; iterate healer.pieces(batch), or use healer.run"


def check_loss(loss: Any) -> None:
    """Raise a TypeError if ``train_step`` has returned what has no gradient."""
    if not isinstance(loss, Tensor):
        got = type(loss).__name__
    elif loss.numel() != 1:
        got = f"a tensor of {loss.numel()} numbers"
    elif not loss.requires_grad:
        got = "one that does not depend on any parameter that is trained"
    else:
        return
    raise TypeError(f"train_step: expected the mean loss, a tensor of one number, got {got}")


class MicroBatcher:
    """Runs forward and backward, and cuts batches finer after memory ran out.

    Pieces give the gradient of the whole batch where the loss is a mean over samples. Where it is
    a mean over something else, as tokens that are not padding, give ``weigh``. BatchNorm sees the
    statistics of its piece, and dropout draws other numbers.

    What was found to fit is a number of samples: a batch with fewer than the one that ran out of
    memory, as the last of an epoch, is cut into fewer pieces, not into smaller ones.

    Args:
        parameters: whose gradients are cleared after a failure.
        smallest: fewest samples in a piece; a batch that has fewer is not cut.
        grow_steps: clean steps after which pieces grow again; 0 for never.
        weigh: returns how much a piece counts; its number of samples if None. A piece of weight 0
            is left out.
        buffers: of the model, put back after a failure; made here if None.

    Attributes:
        pieces: how many parts a batch of full size is cut into.
        phase: "forward" or "backward", and ``batch_at``, from 0: what is being computed.
        largest_batch: samples in the largest batch of the step; 0 if it is not known.
        cannot_cut: why the batch of a step that failed cannot be cut; empty if it can.
        messages: what ranks of a data-parallel model send each other while a step is computed.
    """

    def __init__(
        self,
        model: Module,
        parameters: Callable[[], Sequence[Tensor]],
        smallest: int = 1,
        grow_steps: int = 0,
        weigh: Callable[[Any], float] | None = None,
        buffers: BufferCopies | None = None,
    ) -> None:
        self.pieces = 1
        self.phase = "forward"
        self.batch_at = 0
        self.attempts = 0
        self.cannot_cut = ""
        self.largest_batch = 0
        self.messages = GradientMessages(model)
        self._caller_cuts = False  # a loop of the caller's own uses :meth:`pieces_of`
        self._weigh = weigh
        self._parameters = parameters
        self._smallest = smallest
        self._grow_steps = grow_steps
        self._clean_steps = self._growths = 0
        self._full_size = 0  # samples of the batch that ``pieces`` was found for; 0 if not known
        self._rng: RngState | None = None
        self._total: Tensor | None = None  # what there is of the mean loss of a step
        self._buffers = BufferCopies(model) if buffers is None else buffers

    def backward(
        self, batches: Sequence[Any], train_step: TrainStep, scale: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """Accumulate the gradient of the mean loss over the batches of a step; return that loss."""
        self.begin()
        for at in range(len(batches)):
            loss = self.add(batches[: at + 1], len(batches), train_step, scale)
        return loss

    def begin(self, rng: RngState | None = None) -> None:
        """Begin a step, from these generators; :meth:`undo` puts them and the buffers back."""
        self.attempts += 1
        self.phase = "forward"
        self._total = None
        self._rng = RngState.now() if rng is None else rng
        self._buffers.begin()
        self.messages.begin()

    def note_backward(self) -> None:
        """Note that what an integration raises from here on is raised by backward."""
        self.phase = "backward"

    def add(
        self,
        batches: Sequence[Any],
        count: int,
        train_step: TrainStep,
        scale: Callable[[Tensor], Tensor],
    ) -> Tensor:
        """Accumulate the share of the last of ``batches``; return what there is of the mean loss.

        ``batches`` are those of a step so far, which has ``count``; ``scale`` is as a GradScaler's.
        """
        if not self.largest_batch:
            self._measure(batches)
        self.batch_at = len(batches) - 1
        try:
            return self._add(batches[-1], count, train_step, scale)
        except Exception:
            self._measure(batches)  # not in healthy steps: it takes time
            raise

    def _add(
        self, batch: Any, count: int, train_step: TrainStep, scale: Callable[[Tensor], Tensor]
    ) -> Tensor:
        self.messages.note_tried(batch)
        pieces = self._weighted(batch)
        for i, (piece, share) in enumerate(pieces):
            is_last = self.batch_at == count - 1 and i == len(pieces) - 1
            with self.messages.held_back(until=is_last):
                self.phase = "forward"
                loss = train_step(own_copy(piece))  # it may be tried again
                check_loss(loss)
                if share != 1.0 or count > 1:
                    loss = loss * (share / count)
                self.phase = "backward"
                if is_last:
                    self.messages.note_sent()
                scale(loss).backward()
                total = self._total
                self._total = loss.detach() if total is None else total + loss.detach()
        assert self._total is not None
        self.messages.note_good(batch)
        return self._total

    def cut_into(self, pieces: int) -> None:
        """Cut batches into so many pieces from now on."""
        self.pieces = pieces

    def weigh_by(self, weigh: Callable[[Any], float] | None) -> None:
        """Count a piece of a batch by ``weigh(piece)``; by its samples if None."""
        self._weigh = weigh

    def note_size(self, samples: int) -> None:
        """Note the size of a batch that an integration ran out of memory with."""
        self.largest_batch = samples

    def note_caller(self) -> str:
        """Return why a batch that the caller's loop ran out of memory with cannot be cut."""
        self.cannot_cut = "" if self._caller_cuts else IS_NOT_CUT
        return self.cannot_cut

    def pieces_of(self, batch: Any) -> list[tuple[Any, float]]:
        """Cut a batch for a loop of the caller's own; return the pieces and their shares.

        Shares add up to 1: the sum of ``share * loss`` is the mean loss of the whole batch.
        """
        self._caller_cuts = True
        self._measure([batch])
        return self._weighted(batch)

    def count_for_caller(self) -> int:
        """Return into how many pieces a loop of the caller's own should cut its batches."""
        self._caller_cuts = True
        return self.pieces

    def note_drawn(self, rng: RngState) -> None:
        """Another batch was drawn: what that took from the generators is not put back."""
        self._rng = rng

    def stand_in(self, train_step: TrainStep, scale: Callable[[Tensor], Tensor]) -> None:
        """Take part in the messages of a step that failed here, with NaN for a gradient.

        Other ranks wait for our gradients; NaN from one makes all ranks skip the step, and leaves
        no trace in the statistics of clipping. To be called after :meth:`undo`.
        """
        with self.messages.repeated():
            loss = train_step(own_copy(self.messages.sample()))
            self.messages.note_sent()
            scale(loss * float("nan")).backward()
        self._put_back()

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Leave the attempts of the body out of the count."""
        attempts = self.attempts
        try:
            yield
        finally:
            self.attempts = attempts

    def undo(self) -> None:
        """Undo what a failed step did, before any optimizer was stepped."""
        for param in self._parameters():
            param.grad = None
        self._put_back()

    def _put_back(self) -> None:
        self._buffers.put_back()
        if self._rng is not None:
            self._rng.put_back()

    def parts_of(self, samples: int) -> int:
        """Return how many pieces a batch of so many samples is to be cut into."""
        if self.pieces == 1 or self.messages.are_in_every_forward:
            return self.pieces  # a rank with fewer pieces than the other ones would block them
        parts = self.pieces
        if self._full_size:
            parts = _divided(samples, _divided(self._full_size, self.pieces))
        return max(1, min(parts, samples // self._smallest))

    def shrink(self) -> bool:
        """Cut twice as fine; False if pieces are as small as they may be, or cannot be cut."""
        self._clean_steps = 0
        if self.cannot_cut:
            return False
        samples = self.largest_batch
        if not samples or self.messages.are_in_every_forward:
            if samples and samples // self.pieces <= self._smallest:
                return False
            self.pieces *= 2
            return True
        now = self.parts_of(samples)
        finer = _divided(samples, max(1, min(2 * now, samples // self._smallest)))
        if finer >= _divided(samples, now):
            return False
        self._full_size = max(self._full_size, samples)
        self.pieces = _divided(self._full_size, finer)
        return True

    def note_clean(self) -> None:
        """Count a step that fitted; after enough of them try larger pieces.

        Each attempt doubles the wait for the next: memory that is too small now will be later.
        """
        if self.pieces == 1 or not self._grow_steps:
            return
        self._clean_steps += 1
        if self._clean_steps >= self._grow_steps << self._growths:
            self.pieces //= 2
            self._clean_steps = 0
            self._growths += 1

    def state(self) -> dict[str, int]:
        """Return how fine batches are cut, and when that is tried less fine."""
        counts = {"clean_steps": self._clean_steps, "growths": self._growths}
        return {"pieces": self.pieces, "full_size": self._full_size, **counts}

    def load_state(self, state: Mapping[str, int]) -> None:
        """Go on with what :meth:`state` returned in another process."""
        self.pieces, self._full_size = state["pieces"], state.get("full_size", 0)
        self._clean_steps, self._growths = state["clean_steps"], state["growths"]

    def _measure(self, batches: Sequence[Any]) -> None:
        """Find out how finely the batches of a step that failed could be cut."""
        self.cannot_cut, self.largest_batch = "", 1
        for batch in batches:
            try:
                split(batch, self.pieces * 2)
                self.largest_batch = max(self.largest_batch, count_samples(batch))
            except CannotSplit as error:
                self.cannot_cut = str(error)
        if self.largest_batch > 1:
            self.cannot_cut = ""  # some other batch of the step can be

    def _weighted(self, batch: Any) -> list[tuple[Any, float]]:
        if self.pieces == 1:
            return [(batch, 1.0)]
        try:
            pieces = split(batch, self.parts_of(count_samples(batch)))
        except CannotSplit:
            return [(batch, 1.0)]  # another one could be; this one may fit as it is
        if len(pieces) == 1:
            return [(batch, 1.0)]
        weights = [float(n if self._weigh is None else self._weigh(p)) for p, n in pieces]
        if not any(weights):  # nothing counts: what the whole batch gives, in memory that fits
            weights = [float(n) for _, n in pieces]
        whole = sum(weights)
        # The mean over nothing is NaN, also times zero. It must be computed only where ranks wait.
        return [
            (piece, w / whole)
            for (piece, _), w in zip(pieces, weights, strict=True)
            if w or self.messages.are_in_every_forward
        ]


def fewest_samples(model: Module) -> int:
    """Return the fewest samples of a piece: BatchNorm1d cannot take the variance of one."""
    return 2 if any(isinstance(module, BatchNorm1d) for module in model.modules()) else 1


def _divided(samples: int, by: int) -> int:
    """Divide and round up."""
    return -(-samples // by)


# Recompute activations in the backward pass: less memory for more time, the same gradients.


def checkpoint_activations(model: Module) -> bool:
    """Turn recomputation on, by the model's own switch if it has one.

    Without one, every block of the longest ModuleList or Sequential is recomputed; dropout draws
    the same numbers again, and running statistics are written once. Copies of the model, pickled
    or deep, recompute as well, each with its own weights.

    Returns:
        False if the model has no repeated blocks or recomputes already.
    """
    own_switch = getattr(model, "gradient_checkpointing_enable", None)
    if callable(own_switch):
        if getattr(model, "is_gradient_checkpointing", False):
            return False
        own_switch()
        return True
    stacks = [m for m in model.modules() if isinstance(m, (ModuleList, Sequential)) and len(m) > 1]
    if not stacks:
        return False
    # Not those whose instance has a forward, ours or the user's, nor scripted ones.
    blocks = [
        block
        for block in max(stacks, key=len)
        if "forward" not in vars(block) and not isinstance(block, torch.jit.ScriptModule)
    ]
    for block in blocks:
        _Recomputed(block).install()
    return bool(blocks)


class _Recomputed:
    """The forward of one block, set on the instance; a copy of the block gets its own."""

    def __init__(self, block: Module) -> None:
        self._block = block

    def install(self) -> None:
        """Have the block compute by this forward."""
        vars(self._block)["forward"] = self
        vars(self._block)["_replicate_for_data_parallel"] = self.replicate

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        block = self._block
        once = type(block).forward.__get__(block)
        if not block.training:
            return once(*args, **kwargs)
        if _written_by(block):
            kwargs["context_fn"] = lambda: (nullcontext(), _unwritten(block))
        return checkpoint(once, *args, use_reentrant=False, **kwargs)

    def replicate(self) -> Module:
        """Return a replica of the block that computes with its own weights."""
        replica: Module = type(self._block)._replicate_for_data_parallel(self._block)
        _Recomputed(replica).install()
        return replica


@contextmanager
def _unwritten(block: Any) -> Iterator[None]:
    """Leave buffers as they are: the first forward has written them."""
    kept = [(owner, key, owner[key], owner[key].clone()) for owner, key in _written_by(block)]
    try:
        yield
    finally:
        for owner, key, buffer, copy in kept:
            owner[key] = buffer
            buffer.data.copy_(copy)  # past autograd, which may have saved what is there


def _written_by(block: Any) -> list[tuple[dict[str, Any], str]]:
    """Return where buffers are that a forward may write; a large one is taken for a table."""
    return [
        (module._buffers, key)
        for module in block.modules()
        for key, buffer in module._buffers.items()
        if buffer is not None and (key in STATISTICS or buffer.nbytes <= SMALL_BYTES)
    ]
