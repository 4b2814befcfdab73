"""What ranks of a data-parallel model tell each other in forward and backward, and who waits.

A rank that fails must not leave the others waiting for its gradients. DDP sends them during the
last backward of a step and nothing but buffers before it, so that a failure up to there can be
made good by a stand-in: a small forward and backward, only for its messages. FSDP sends weights in
every forward, and a rank that fails after the first of these cannot be matched any more. Tensor
parallelism sends activations, so that the stand-in must have the shapes of the batch that failed.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch import Tensor
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

from heal.data.split import CannotSplit, num_samples, split
from zclip.parallel.placement import is_dtensor

STAND_IN_SAMPLES = 2  # one is too few for BatchNorm


class GradientMessages:
    """Holds gradients back until the last piece of a step, and knows what was sent.

    Args:
        model: the one that is called in a step.

    Attributes:
        are_under_way: whether a backward has begun whose messages others wait for.
        are_in_every_forward: whether all ranks must call the model equally often in a step.
    """

    def __init__(self, model: Module) -> None:
        self.are_under_way = False
        self._model = model
        self._is_ddp = isinstance(model, DistributedDataParallel)
        self._is_sharded = not self._is_ddp and any(is_dtensor(p) for p in model.parameters())
        self._has_activations = self._is_sharded and _sends_activations(model)
        self.are_in_every_forward = self._is_sharded
        self._was_called = False
        self._good: Any = None
        self._tried: Any = None
        self._keeps = self._is_ddp or self._is_sharded
        if self._keeps:
            model.register_forward_pre_hook(self._note_call, prepend=True)

    def begin(self) -> None:
        """A step is to be computed; nothing was sent for it."""
        self.are_under_way = self._was_called = False
        self._tried = None

    def held_back(self, until: bool) -> AbstractContextManager[None]:
        """Send no gradients in here, unless it is for the last piece of a step."""
        if until or not self._is_ddp:
            return nullcontext()
        held: AbstractContextManager[None] = self._model.no_sync()  # type: ignore[operator]
        return held

    def note_tried(self, batch: Any) -> None:
        """Hear which batch a forward is for."""
        if self._has_activations:
            self._tried = batch

    def note_good(self, batch: Any) -> None:
        """Keep a batch that worked, in case that one is needed to stand in."""
        if self._keeps:
            self._good = batch

    def can_be_matched(self, calls: int = 1) -> bool:
        """Return whether a stand-in could send all that others still wait for.

        Args:
            calls: how often every rank calls the model in this step.
        """
        if self._good is None or self.are_under_way:
            return False
        if self._has_activations and _shapes(self._tried) != _shapes(self._good):
            return False
        return not (self._is_sharded and (self._was_called or calls > 1))

    def sample(self) -> Any:
        """Return a few samples of the last batch that worked; all where their number is sent."""
        if self._has_activations:
            return self._good
        parts = max(1, num_samples(self._good) // STAND_IN_SAMPLES)
        try:
            return split(self._good, parts)[0][0]
        except CannotSplit:
            return self._good  # it worked once

    @contextmanager
    def repeated(self) -> Iterator[None]:
        """Call the model again in a step without sending its buffers again."""
        model: Any = self._model
        if not (self._is_ddp and self._was_called):
            yield
            return
        model.require_forward_param_sync = False  # DDP sets it anew after the forward
        yield

    def _note_call(self, *ignored: Any) -> None:
        self._was_called = True


def _sends_activations(model: Module) -> bool:
    """Tell tensor parallelism from FSDP: its weights are sharded without FSDP, or once more."""
    from torch.distributed.fsdp import FSDPModule

    sharded: list[Any] = [p for p in model.parameters() if is_dtensor(p)]
    splits = [sum(not place.is_replicate() for place in p.placements) for p in sharded]
    has_fsdp = any(isinstance(module, FSDPModule) for module in model.modules())
    return not has_fsdp or max(splits, default=0) > 1


def _shapes(batch: Any) -> list[Any]:
    leaves = tree_leaves(batch)
    return [tuple(leaf.shape) if isinstance(leaf, Tensor) else type(leaf) for leaf in leaves]
