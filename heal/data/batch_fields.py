"""What a batch is made of: its tensors and lists, through whatever containers hold them."""

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

PACKED_NAMES = re.compile(r"cu_?seq|edge_index|row_splits", re.IGNORECASE)
"""Fields that tell where samples begin that lie one behind the other: sequences, or graphs."""


class CannotSplit(TypeError):
    """A batch is of a kind that cannot be cut, or it is not clear what its samples are."""


def tensors_in(batch: Any) -> Iterator[Tensor]:
    """Yield every tensor of a batch.

    Raises:
        CannotSplit: samples are packed: the rows of its tensors are something else.
    """
    if isinstance(batch, Tensor):
        yield batch
        return
    for value in entries_of(batch):
        yield from tensors_in(value)


def rows(batch: Any) -> set[int]:
    """Return the lengths that the tensors of a batch have."""
    return {len(t) for t in tensors_in(batch) if t.dim() > 0}


def outside_lists(values: Iterable[Any]) -> Iterator[Any]:
    """Yield tensors, arrays and outermost lists, through dicts, dataclasses and named tuples."""
    for value in values:
        is_list = isinstance(value, (list, tuple)) and not hasattr(value, "_fields")
        if is_list or isinstance(value, Tensor) or is_array(value):
            yield value
        else:
            yield from outside_lists(entries_of(value))


def is_array(value: Any) -> bool:
    """Return whether something is an array of numpy, which need not be there."""
    return type(value).__module__ == "numpy" and getattr(value, "ndim", 0) > 0


def entries_of(batch: Any) -> Iterator[Any]:
    """Yield what a container holds; nothing if it is none.

    Raises:
        CannotSplit: samples are packed.
    """
    if isinstance(batch, Mapping):
        _refuse_packed(batch)
        yield from batch.values()
    elif isinstance(batch, (list, tuple)):
        yield from _checked(batch)
    elif dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        names = [field.name for field in dataclasses.fields(batch)]
        _refuse_packed(names)
        for name in names:
            yield getattr(batch, name)


def _checked(batch: Sequence[Any]) -> Sequence[Any]:
    if isinstance(batch, PackedSequence):
        raise CannotSplit("a PackedSequence cannot be cut: its rows are steps in time; pad instead")
    _refuse_packed(getattr(batch, "_fields", ()))
    return batch


def _refuse_packed(names: Iterable[Any]) -> None:
    for name in names:
        if isinstance(name, str) and PACKED_NAMES.search(name):
            raise CannotSplit(
                f"samples packed one behind the other cannot be cut: {name!r} tells where they "
                "begin; wanted samples along the first axis of every tensor"
            )
