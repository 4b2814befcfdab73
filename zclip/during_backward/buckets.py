"""Buckets of DistributedDataParallel: measured after the all-reduce, while backward goes on.

A communication hook does what DDP would have done, or what a hook of the user's does, and measures
what comes out of it. DDP copies that into the gradients when backward ends (or has them share its
memory), so that only then can be noted which gradients the rows belong to.
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Variable
from torch.nn import Module

from zclip.during_backward.rows import EarlyRows, Slot, table_of

CommHook = tuple[Any, Callable[..., torch.futures.Future[Any]]]
"""State and hook, as DistributedDataParallel.register_comm_hook takes them."""


class Buckets:
    """The communication hook of one model. It cannot be taken back, so that it can be idle.

    Args:
        group: the ranks of the model.
        inner: the user's hook with its state; None averages as DDP does without a hook.
    """

    def __init__(self, group: Any, inner: CommHook | None) -> None:
        self.inner = inner
        self._group = group
        self._rows: EarlyRows | None = None

    def start(self, rows: EarlyRows) -> None:
        """Measure buckets from now on."""
        self._rows = rows

    def stop(self) -> None:
        """Only communicate from now on."""
        self._rows = None

    def reduce(self, bucket: Any) -> torch.futures.Future[Any]:
        """Communicate, then measure; return a future of what comes out."""
        rows = self._rows
        # Outside of a backward pass, in a join(), there are no gradients here to belong to.
        measured = None
        if rows is not None and torch._C._current_graph_task_id() != -1:
            measured = _Measured(rows, bucket)
            # DDP's own callback, which writes the gradients, is queued by the last bucket. One that
            # is queued by a callback runs after all of them.
            engine = Variable._execution_engine
            engine.queue_callback(lambda: engine.queue_callback(measured.confirm))
        future = self._communicated(bucket)
        return future.then(_first if measured is None else measured.take)

    def _communicated(self, bucket: Any) -> torch.futures.Future[Any]:
        if self.inner is not None:
            return self.inner[1](self.inner[0], bucket)
        buffer = bucket.buffer()
        # Multiplied before the sum, as DDP does without a hook: the same bits.
        buffer.mul_(1.0 / dist.get_world_size(self._group))
        work: Any = dist.all_reduce(buffer, group=self._group, async_op=True)
        future: torch.futures.Future[Any] = work.get_future()
        return future


def install(model: Module, inner: CommHook | None) -> Buckets:
    """Return the buckets of a DistributedDataParallel model, made at the first call.

    Raises:
        ValueError: the model has another communication hook.
    """
    known = _installed.get(model)
    if known is not None:
        if inner is not None and inner != known.inner:
            raise ValueError(
                "comm_hook: expected the one of the earlier attach, because torch cannot replace "
                "a communication hook, got another"
            )
        return known
    buckets = Buckets(model.process_group, inner)
    try:
        model.register_comm_hook(buckets, measured_comm_hook)  # type: ignore[operator]
    except RuntimeError as error:
        raise ValueError(
            "model: expected no communication hook, got one; leave out register_comm_hook and "
            "give it to attach(model, comm_hook=(state, hook))"
        ) from error
    _installed[model] = buckets
    return buckets


def measured_comm_hook(
    state: Buckets,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket over the ranks and measure it; the hook that DDP calls."""
    return state.reduce(bucket)


_installed: "weakref.WeakKeyDictionary[Module, Buckets]" = weakref.WeakKeyDictionary()


class _Measured:
    """One bucket in one backward pass."""

    def __init__(self, rows: EarlyRows, bucket: Any) -> None:
        self._buffer: Tensor = bucket.buffer()
        self._table: Tensor | None = None
        self._entries: list[tuple[Slot, Tensor, Tensor | None, int]] = []
        for param, view in zip(bucket.parameters(), bucket.gradients(), strict=True):
            slot, grad = rows.slot_of(param), param.grad
            if slot is not None:
                self._entries.append((slot, view, grad, -1 if grad is None else grad._version))

    def take(self, future: torch.futures.Future[Any]) -> Any:
        """Measure what came out of the communication, in the thread and stream that got it."""
        value = _first(future)
        # A hook may answer in memory of its own, or in another dtype: then the step measures.
        if value.data_ptr() == self._buffer.data_ptr() and value.dtype == self._buffer.dtype:
            self._table = table_of([view for _, view, _, _ in self._entries])
        return value

    def confirm(self) -> None:
        """Note which gradients have become what was measured; backward is over."""
        if self._table is None:
            return
        for index, (slot, view, old, version) in enumerate(self._entries):
            grad = slot.param.grad
            if grad is None or grad.dtype != view.dtype or grad.stride() != view.stride():
                continue  # not a copy of the view, element by element in memory
            # DDP leaves alone the gradient of a parameter that no rank has used.
            is_written = grad is not old or grad._version != version
            if is_written or grad.data_ptr() == view.data_ptr():
                slot.note(grad, grad, self._table, index)


def _first(future: torch.futures.Future[Any]) -> Any:
    value = future.value()
    return value[0] if isinstance(value, (list, tuple)) else value
