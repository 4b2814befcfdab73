"""Recompute activations in the backward pass: less memory for more time, the same gradients."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.nn import Module, ModuleList, Sequential
from torch.utils.checkpoint import checkpoint

from heal.state.buffer_copies import SMALL_BYTES, STATISTICS


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
    blocks = [b for b in max(stacks, key=len) if _can_recompute(b)]
    for block in blocks:
        block.__class__ = _recomputing(type(block))
    return bool(blocks)


def _can_recompute(block: Module) -> bool:
    """Not if it does already, nor if somebody has put another forward before that of its class."""
    if isinstance(block, (_Recomputed, torch.jit.ScriptModule)):
        return False
    return "forward" not in vars(block)


class _Recomputed:
    """Comes before the class of a block.

    A forward that is set on the instance would be copied with it and still compute with the
    weights of the block that it was made for.
    """

    _block_kind: type  # under a name that no block has

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        once: Callable[..., Any] = super().forward  # type: ignore[misc]
        if not self.training:  # type: ignore[attr-defined]
            return once(*args, **kwargs)
        if _written_by(self):
            kwargs["context_fn"] = lambda: (nullcontext(), _unwritten(self))
        return checkpoint(once, *args, use_reentrant=False, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A class that is made while the run goes on is found by nobody: name that of the block."""
        reduced: Any = super().__reduce_ex__(protocol)
        function, args, *rest = reduced
        ours, theirs = type(self), type(self)._block_kind
        named = [theirs if value is ours else value for value in (function, *args)]
        return _made_again, tuple(named), *rest


_made: dict[type, Any] = {}
"""For each kind of block the one that recomputes, so that blocks of a kind stay of one kind."""


def _recomputing(kind: type) -> Any:
    if kind not in _made:
        named = {"__module__": kind.__module__, "_block_kind": kind}
        _made[kind] = type(kind.__name__, (_Recomputed, kind), named)
    return _made[kind]


def _made_again(function: Callable[..., Any], *args: Any) -> Any:
    block = function(*args)
    block.__class__ = _recomputing(type(block))
    return block


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
