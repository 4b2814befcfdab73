"""The parameters of a fused optimizer on one device, with their state, as the operators take them.

Built once, then only checked: parameter groups by identity, state by :class:`WatchedState`, and
addresses in the operator itself, natively.
"""

import weakref
from collections.abc import Container, Iterable, Mapping, Sequence
from itertools import repeat
from operator import is_not
from typing import Any

import torch
from torch import Tensor

from zclip.checks import check_dense, check_tensors, check_writable
from zclip.layout import IS_KNOWN, NUM_LEDGER, UPDATES
from zclip.parallel.placement import has_dtensor, local_parts
from zclip.reading import Reader, native


class Plan:
    """One device's share of the parameters.

    Args:
        algorithm: ADAM, SGD or LION of :mod:`zclip.layout`.
        keys: of the first moment, the second, and its maximum in the state of a parameter.
        params: of all groups that have some on this device, one after another.
        sizes: how many of them each group has.
        state: of the optimizer.
        names: of the parameters.
        telemetry: whether to measure weights and state.

    Attributes:
        lacking: indices of parameters that have no state yet.
        ledger: int64 [N, 5], see :mod:`zclip.layout`.
        is_native: whether one call of the extension can do a whole step.
    """

    def __init__(
        self,
        algorithm: int,
        keys: Sequence[str],
        params: list[Tensor],
        sizes: list[int],
        state: Mapping[Tensor, Mapping[str, Any]],
        names: list[str],
        telemetry: bool,
    ) -> None:
        self.algorithm = algorithm
        self.params = params
        self.sizes = sizes
        self.names = names
        self.telemetry = telemetry
        self.device = params[0].device
        self._dtypes = [p.dtype for p in params]
        self.lacking = [i for i, p in enumerate(params) if not state.get(p)]
        self._has_dtensor = has_dtensor(params)
        self._nothing = torch.empty(0, device=self.device)
        self._aligns = False
        self._local = self._local_parts(params)
        entries = [state.get(p, {}) for p in params]
        self._lists = [self._listed(entries, key) for key in keys]
        self._steps = self._listed(entries, "step")
        self.ledger = torch.zeros(len(params), NUM_LEDGER, dtype=torch.int64, device=self.device)
        self._handle = 0
        self._reader = Reader()
        self._reading = 0
        self.is_native = self.device.type == "cpu" and native.is_loaded

    def _listed(self, entries: list[Mapping[str, Any]], key: str) -> list[Tensor]:
        found = [entry.get(key) for entry in entries]
        if all(value is None for value in found):
            return []
        return self._local_parts([self._nothing if value is None else value for value in found])

    def _local_parts(self, tensors: list[Tensor]) -> list[Tensor]:
        return local_parts(tensors, self.name) if self._has_dtensor else tensors

    def name(self, i: int) -> str:
        """Return what an error calls a gradient."""
        return f"the gradient of {self.names[i]}"

    @property
    def is_converted(self) -> bool:
        """Whether a parameter has another dtype now."""
        return [p.dtype for p in self.params] != self._dtypes

    def inherit(self, old: Iterable["Plan"], begun: Container[Tensor]) -> None:
        """Take over what other plans know of the same parameters.

        A parameter that was converted is not compared with what was stored: no bit is the same.

        Args:
            old: the other plans.
            begun: parameters that have a first moment of an update; it was loaded if no plan
                knows them.
        """
        known: dict[int, tuple[Tensor, torch.dtype]] = {}
        for plan in old:
            rows = zip(plan.ledger.unbind(), plan._dtypes, strict=True)
            known.update(zip(map(id, plan.params), rows, strict=True))
        for param, row, dtype in zip(self.params, self.ledger.unbind(), self._dtypes, strict=True):
            if id(param) not in known:
                if param in begun:
                    row[UPDATES].fill_(1)  # an assignment would wait for the device
                continue
            before, old_dtype = known[id(param)]
            row.copy_(before)
            if dtype != old_dtype:
                row[IS_KNOWN].fill_(0)
            if param not in begun:
                row[UPDATES].fill_(0)

    def gradients(self) -> list[Tensor] | None:
        """Return the gradients, an empty tensor where there is none; None if none has any.

        Raises:
            LookupError: one that has no state yet has a gradient now: a new plan is needed.
        """
        grads: list[Any] = native.gradients(self.params)
        is_plain = self.is_native and not (self.lacking or self._has_dtensor or self._aligns)
        self._reading = native.read(self._reader.number, grads, False) if is_plain else 0
        if self._reading:  # they are all there
            return grads
        if not all(map(is_not, grads, repeat(None))):
            if all(g is None for g in grads):
                return None
            if any(grads[i] is not None for i in self.lacking):
                raise LookupError
            grads = [self._nothing if g is None else g for g in grads]
        elif self.lacking:
            raise LookupError
        if self._has_dtensor:
            grads = self._local_parts(grads)
        return self._in_line(grads) if self._aligns else grads

    def update(self, grads: list[Tensor], *numbers: Any) -> tuple[Tensor, Tensor]:
        """Call ``optim_update_``; see there for what ``numbers`` are."""
        op = torch.ops.zclip.optim_update_.default
        lists = (*self._lists, self._steps, self.ledger)
        coefs, blocked, grad_scale, rates, settings, seed, skip_flags = numbers
        tail = (coefs, blocked, grad_scale, rates, self.algorithm, self.sizes, settings, seed)
        watched = (self.telemetry, skip_flags)
        try:
            rows, summary = op(self._local, grads, *lists, *tail, *watched)
        except (RuntimeError, TypeError, ValueError):
            grads = self._repaired(grads)
            rows, summary = op(self._local, grads, *lists, *tail, *watched)
        return rows, summary

    def read(self, grads: list[Tensor]) -> int:
        """Return the number of a reading of what :meth:`gradients` returned; 0 if it cannot be."""
        if not self._reading:
            given = [None if g is self._nothing else g for g in grads]
            self._reading = native.read(self._reader.number, given, True)
        return self._reading

    def step(self, grads: list[Tensor], *arguments: Any) -> tuple[Tensor, ...] | None:
        """Call ``fused_step_``; None if a tensor has moved, so that a new plan is needed.

        Args:
            grads: what was read last.
            arguments: of the operator, after the plan.
        """
        op = torch.ops.zclip.fused_step_.default
        try:
            if not self._handle:
                self._make()
            results: tuple[Tensor, ...] = op(self._reading, self._handle, *arguments)
        except (RuntimeError, TypeError, ValueError):
            grads, self._reading = self._repaired(grads), 0
            results = op(self.read(grads), self._handle, *arguments)
        return results if results[-1].numel() else None

    def _make(self) -> None:
        lists = (*self._lists, self._steps, self.ledger)
        self._handle = torch.ops.zclip.make_plan.default(
            self._local, *lists, self.algorithm, self.sizes, self.telemetry
        )
        weakref.finalize(self, torch.ops.zclip.drop_plan.default, self._handle)

    def _repaired(self, grads: list[Tensor]) -> list[Tensor]:
        """Return gradients that lie in memory as their parameters do, if an operator rejected them.

        Raises:
            TypeError, ValueError, RuntimeError: that is not what is wrong.
        """
        check_tensors(grads, self.name)
        for i, (param, grad) in enumerate(zip(self._local, grads, strict=True)):
            if grad.numel() and grad.shape != param.shape:
                raise ValueError(
                    f"{self.name(i)}: expected {tuple(param.shape)}, the shape of the parameter, "
                    f"got {tuple(grad.shape)}"
                )
            if grad.numel() and (grad.dtype == torch.float64) != (param.dtype == torch.float64):
                raise TypeError(
                    f"{self.name(i)}: expected a gradient and a parameter of float64, or neither, "
                    f"got {grad.dtype} of {param.dtype}"
                )
        check_writable(self._local, self.names.__getitem__)
        check_dense(self._local, self.names.__getitem__)
        repaired = self._in_line(grads)
        if all(a is b for a, b in zip(repaired, grads, strict=True)):
            raise  # the error of the operator, in whose handler this is called
        self._aligns = True
        return repaired

    def _in_line(self, grads: list[Tensor]) -> list[Tensor]:
        return [
            torch.empty_like(p).copy_(g) if g.numel() > 1 and g.stride() != p.stride() else g
            for p, g in zip(self._local, grads, strict=True)
        ]
