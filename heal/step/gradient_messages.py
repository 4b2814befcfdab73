"""What ranks of a data-parallel model tell each other in forward and backward, and who waits.

A rank that fails must not leave the others waiting for its gradients. DDP sends them during the
last backward of a step and nothing but buffers before it, so that a failure up to there can be
made good by a stand-in: a small forward and backward, only for its messages. FSDP sends weights in
every forward, and a rank that fails after the first of these cannot be matched any more.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel

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
        self.are_in_every_forward = self._is_sharded
        self._was_called = False
        self._good: Any = None
        self._keeps = self._is_ddp or self._is_sharded
        if self._keeps:
            model.register_forward_pre_hook(self._note_call, prepend=True)

    def begin(self) -> None:
        """A step is to be computed; nothing was sent for it."""
        self.are_under_way = self._was_called = False

    def held_back(self, until: bool) -> AbstractContextManager[None]:
        """Send no gradients in here, unless it is for the last piece of a step."""
        if until or not self._is_ddp:
            return nullcontext()
        held: AbstractContextManager[None] = self._model.no_sync()  # type: ignore[operator]
        return held

    def note_good(self, batch: Any) -> None:
        """Keep a batch that worked, in case that one is needed to stand in."""
        if self._keeps:
            self._good = batch

    def can_be_matched(self) -> bool:
        """Return whether a stand-in could send all that others still wait for."""
        if self._good is None or self.are_under_way:
            return False
        return not (self._is_sharded and self._was_called)

    def sample(self) -> Any:
        """Return a few samples of the last batch that worked."""
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
