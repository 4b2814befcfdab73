"""What a restore overwrites, kept until the restore has succeeded.

A restore runs code of others (schedulers, modules, ``add_state``) and copies across devices; any of
it may raise half-way. Weights of one step beside moments of another are a state that no run had.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from heal.state.free_memory import available_bytes
from heal.state.scheduler_state import state_of
from zclip import ClippedOptimizer

FREE_SHARE = 0.5  # of the memory now free, that a copy may take


class Undo:
    """The present state of a run, to return to if a restore fails.

    Tensors are copied to host memory. Where there is no room for that, only plain values can be put
    back, and :attr:`is_whole` is False.

    Args:
        tensors: all that the restore will overwrite.
        model: its buffers may be replaced.
        optimizers: their state and groups may be replaced.
        schedulers: loaded through their own ``state_dict``.
        owners: objects and the names of their attributes that may be replaced.
        loaders: pairs of a function and what to call it with, for state that others keep.
        copied: returns a copy of plain values that nobody else changes.
    """

    def __init__(
        self,
        tensors: Sequence[Tensor],
        model: Module,
        optimizers: Sequence[ClippedOptimizer],
        schedulers: Sequence[Any],
        owners: Sequence[tuple[Any, Sequence[str]]],
        loaders: Sequence[tuple[Callable[[Any], None], Any]],
        copied: Callable[[Any], Any],
    ) -> None:
        free = available_bytes()
        # Asked first: Linux grants memory that it does not have, and then kills the process.
        self.is_whole = free is None or sum(t.nbytes for t in tensors) <= FREE_SHARE * free
        self._tensors: list[tuple[Tensor, Tensor]] = []
        if self.is_whole:
            try:
                self._tensors = [(t, t.detach().to("cpu", copy=True)) for t in tensors]
            except (RuntimeError, MemoryError):  # torch has no error of its own for the host
                self.is_whole = False
        self._buffers = [(m._buffers, dict(m._buffers)) for m in model.modules() if m._buffers]
        self._states = [(o.state, {p: dict(s) for p, s in o.state.items()}) for o in optimizers]
        self._groups = [(group, dict(group)) for o in optimizers for group in o.param_groups]
        self._attributes = [
            (owner, name, getattr(owner, name))
            for owner, names in owners
            for name in names
            if hasattr(owner, name)
        ]
        states = [(s, state_of(s)) for s in schedulers]
        self._loaders: list[tuple[Callable[[Any], None], Any]] = [
            (s.load_state_dict, copied(state)) for s, state in states if state is not None
        ]
        self._loaders += loaders

    @torch.no_grad()
    def put_back(self) -> list[str]:
        """Return to the state that was; return what could not be put back."""
        failures = [] if self.is_whole else ["tensors: there was no host memory for a copy of them"]
        for mapping, before in [*self._buffers, *self._groups]:
            _replace(mapping, before)
        for states, known in self._states:
            for param in [p for p in states if p not in known]:
                del states[param]
            for param, before in known.items():
                _replace(states[param], before)
        for owner, name, value in self._attributes:
            setattr(owner, name, value)
        for target, copy in self._tensors:
            try:
                target.copy_(copy)
            except Exception as error:
                failures.append(f"a tensor of shape {tuple(target.shape)}: {error!r}")
        for load, state in self._loaders:
            try:
                load(state)
            except Exception as error:
                failures.append(f"{getattr(load, '__qualname__', load)}: {error!r}")
        # A scheduler may write the groups when it is loaded.
        for mapping, before in self._groups:
            _replace(mapping, before)
        return failures


def _replace(mapping: Any, before: Mapping[Any, Any]) -> None:
    """Give a mapping its entries again; the object stays, because others hold it."""
    for key in [k for k in mapping if k not in before]:
        del mapping[key]
    mapping.update(before)
