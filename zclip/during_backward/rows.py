"""Rows of stats that were taken before the step, and the proof that they still hold."""

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zclip import ops
from zclip.parallel.placement import is_dtensor, local_part

BATCH_BYTES = 1 << 20
"""Gradients in host memory are measured together once they add up to this.

It fits into the cache of a core, so that they are still there. Fewer bytes make more calls.
"""

DEVICE_BATCH_BYTES = 16 << 20
"""Likewise on an accelerator: a third of the L2 of a data-centre GPU, and few launches."""


_WITH_STREAMS = ("cuda", "xpu")


class Row(NamedTuple):
    """One row of a table of stats, and the gradient as it was when the row was taken."""

    grad: "weakref.ref[Tensor]"  # by identity: memory and version of a freed one may come back
    version: int
    local: tuple[int, int, int]  # address, version and length of what this rank holds
    table: Tensor
    place: int  # of the row in the table

    def holds(self, grad: Tensor | None, part: Tensor) -> bool:
        """Return whether this is still the row of a gradient, of which this rank holds ``part``."""
        return (
            grad is not None
            and self.grad() is grad
            and self.version == grad._version
            and self.local == _fingerprint(part)
        )


class Slot:
    """What is known about one parameter that is watched.

    Attributes:
        param: the parameter.
        size: bytes that this rank holds of its gradient.
        row: the last row taken; may no longer hold.
        turns: how often its gradient became final since the last step.
        expected: how often it did in the step before; under gradient accumulation only the last
            turn counts, and the others need not be measured.
    """

    __slots__ = ("expected", "param", "row", "size", "turns")

    def __init__(self, param: Tensor) -> None:
        self.param = param
        held = local_part(param) if is_dtensor(param) else param
        self.size = held.numel() * held.element_size()
        self.row: Row | None = None
        self.turns = 0
        self.expected = 1

    def note(self, grad: Tensor, part: Tensor, table: Tensor, index: int) -> None:
        """Keep a row that was just taken of ``part``, what this rank holds of ``grad``."""
        self.row = Row(weakref.ref(grad), grad._version, _fingerprint(part), table, index)


class EarlyRows:
    """Measures gradients as they become final, many in one call, and hands the rows to the step.

    Only rows whose gradient is the same object with the same memory and version counts are used;
    everything else is measured by the step, as if nothing were attached. So whatever a hook missed,
    or measured too early, costs time and not correctness.

    Attributes:
        early: how many gradients of the last step needed no more measuring.
        late: how many were measured by the step.
    """

    def __init__(self) -> None:
        self.early = 0
        self.late = 0
        self._slots: dict[int, Slot] = {}
        self._waiting: dict[Any, tuple[list[Slot], list[int]]] = {}
        self._places: tuple[Sequence[Tensor], list[tuple[int, Slot]]] | None = None
        self._order: tuple[list[int], Tensor] | None = None

    @property
    def is_watching(self) -> bool:
        """Whether there is any slot."""
        return bool(self._slots)

    def watch(self, param: Tensor) -> Slot:
        """Return the slot of a parameter, made if there is none."""
        if id(param) not in self._slots:
            self._slots[id(param)] = Slot(param)
            self._places = None
        return self._slots[id(param)]

    def slot_of(self, param: Tensor) -> Slot | None:
        """Return the slot of a parameter; None if it is not watched."""
        return self._slots.get(id(param))

    def hook_of(self, slot: Slot) -> Callable[[Tensor], None]:
        """Return what to call with the parameter when its gradient has become final."""
        # A closure with all it needs in cells: this runs once per parameter and backward pass.
        waiting, where, size = self._waiting, slot.param.device, slot.size
        enough = BATCH_BYTES if where.type == "cpu" else DEVICE_BATCH_BYTES
        has_streams = where.type in _WITH_STREAMS

        def became_final(_: Tensor) -> None:
            slot.turns += 1
            if slot.turns < slot.expected:
                return
            # A gradient is measured on the stream that made it, so that nothing has to wait.
            place = (where, torch.accelerator.current_stream(where) if has_streams else None)
            batch = waiting.get(place)
            if batch is None:
                batch = waiting[place] = ([], [0])
            slots, total = batch
            slots.append(slot)
            total[0] += size
            if total[0] >= enough:
                del waiting[place]
                measure(slots)

        return became_final

    def forget(self) -> None:
        """Drop every row: gradients were changed in a way that no version counter shows."""
        self._waiting.clear()
        for slot in self._slots.values():
            slot.row = None

    def close(self) -> None:
        """Watch nothing any more."""
        self.forget()
        self._slots.clear()
        self._places = self._order = None

    def complete(self, params: Sequence[Tensor], parts: list[Tensor]) -> Tensor:
        """Return the stats of ``parts``, measuring those that have no row that holds.

        Args:
            params: the parameters whose gradients are measured.
            parts: what this rank holds of each gradient.

        Returns:
            float64 [len(parts), 3], bit by bit what ``ops.grad_stats(parts)`` returns.
        """
        self._waiting.clear()  # what has not been measured yet is measured here
        tables: list[Tensor] = []
        starts: dict[int, int] = {}
        order = [-1] * len(parts)
        length = early = 0
        for place, slot in self._placed(params):
            if slot.turns:
                slot.expected, slot.turns = slot.turns, 0
            row, slot.row = slot.row, None
            if row is None or not row.holds(slot.param.grad, parts[place]):
                continue
            if id(row.table) not in starts:
                starts[id(row.table)] = length
                tables.append(row.table)
                length += len(row.table)
            order[place] = starts[id(row.table)] + row.place
            early += 1
        self.early, self.late = early, len(parts) - early
        if not early:
            return ops.grad_stats(parts)
        rest = [i for i, at in enumerate(order) if at < 0]
        device = parts[0].device
        tables = [_ready(table, device) for table in tables]
        if rest:
            tables.append(ops.grad_stats([parts[i] for i in rest]).to(device, non_blocking=True))
            for k, i in enumerate(rest):
                order[i] = length + k
        return torch.cat(tables).index_select(0, self._uploaded(order, device))

    def _placed(self, params: Sequence[Tensor]) -> list[tuple[int, Slot]]:
        """Return the slots of these parameters with their places; remembered for the same list."""
        if self._places is None or self._places[0] is not params:
            slots = self._slots
            found = [(i, slots[id(p)]) for i, p in enumerate(params) if id(p) in slots]
            self._places = params, found
        return self._places[1]

    def _uploaded(self, order: list[int], device: torch.device) -> Tensor:
        """Return the order on the device. It is that of the step before, nearly always."""
        if self._order is None or self._order[0] != order or self._order[1].device != device:
            self._order = order, torch.tensor(order).to(device, non_blocking=True)
        return self._order[1]


def measure(slots: list[Slot]) -> None:
    """Measure the gradients of these slots in one call. The step finds out what cannot be."""
    chosen: list[tuple[Slot, Tensor, Tensor]] = []
    for slot in slots:
        grad = slot.param.grad
        part = None if grad is None else part_of(slot.param, grad)
        if grad is not None and part is not None:
            chosen.append((slot, grad, part))
    table = table_of([part for _, _, part in chosen])
    if table is not None:
        for index, (slot, grad, part) in enumerate(chosen):
            slot.note(grad, part, table, index)


def table_of(parts: list[Tensor]) -> Tensor | None:
    """Return the stats of tensors on one device; None if they cannot be measured.

    Nothing is raised in the middle of backward: the step measures again, and names the culprit.
    """
    if not parts:
        return None
    try:
        table: Tensor = torch.ops.zclip.grad_stats.default(parts)
    except (RuntimeError, TypeError, ValueError):
        return None
    return table


def part_of(param: Tensor, grad: Tensor) -> Tensor | None:
    """Return what this rank holds of a gradient; None if it is not placed as its parameter is."""
    if not is_dtensor(param):
        return None if is_dtensor(grad) else grad
    if not is_dtensor(grad) or grad.placements != param.placements:
        return None
    return local_part(grad)


def _fingerprint(part: Tensor) -> tuple[int, int, int]:
    return part.data_ptr(), part._version, part.numel()


def _ready(table: Tensor, device: torch.device) -> Tensor:
    """Return a table where the step needs it. It may have been made on another stream."""
    if table.device.type in _WITH_STREAMS:
        table.record_stream(torch.accelerator.current_stream(table.device))
    return table.to(device, non_blocking=True)
