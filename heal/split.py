"""Cuts a batch into pieces along its samples, whatever kind of container it is."""

import copy
import dataclasses
import itertools
from collections import UserDict
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor


def num_samples(batch: Any) -> int:
    """Return the length of the first dimension of the first tensor in the batch.

    A batch without such a tensor counts as one sample and cannot be cut.
    """
    return next((len(t) for t in _tensors(batch) if t.dim() > 0), 1)


def split(batch: Any, parts: int) -> list[tuple[Any, int]]:
    """Cut a batch into at most ``parts`` pieces of nearly equal size.

    Tensors whose first dimension is the number of samples are cut, as are lists of so many things
    that are no tensors (texts, for example). All else goes whole into every piece. Dicts,
    dataclasses, tuples, named tuples, lists and mappings like BatchEncoding stay what they are.

    Returns:
        Pieces in order, each with its number of samples; none is empty.
    """
    total = num_samples(batch)
    parts = max(1, min(parts, total))
    if parts == 1:
        return [(batch, total)]
    bounds = [total * i // parts for i in range(parts + 1)]
    return [
        (_cut(batch, total, slice(begin, end)), end - begin)
        for begin, end in itertools.pairwise(bounds)
    ]


def _tensors(batch: Any) -> Iterator[Tensor]:
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from _tensors(value)
    elif isinstance(batch, (list, tuple)):
        for value in batch:
            yield from _tensors(value)
    elif dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        for field in dataclasses.fields(batch):
            yield from _tensors(getattr(batch, field.name))


def _cut(batch: Any, total: int, part: slice) -> Any:
    if isinstance(batch, Tensor):
        return batch[part] if batch.dim() > 0 and len(batch) == total else batch
    if isinstance(batch, UserDict):  # BatchEncoding is one; its constructor wants more than data
        piece = copy.copy(batch)
        piece.data = {key: _cut(value, total, part) for key, value in batch.data.items()}
        return piece
    if isinstance(batch, Mapping):
        values = {key: _cut(value, total, part) for key, value in batch.items()}
        return values if type(batch) is dict else type(batch)(values)  # type: ignore[call-arg]
    if isinstance(batch, (list, tuple)):
        return _cut_sequence(batch, total, part)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        part_of: Any = copy.copy(batch)
        for field in dataclasses.fields(batch):
            # Past frozen, past __post_init__: the fields were valid and a part of them is.
            object.__setattr__(part_of, field.name, _cut(getattr(batch, field.name), total, part))
        return part_of
    return batch


def _cut_sequence(batch: list[Any] | tuple[Any, ...], total: int, part: slice) -> Any:
    if len(batch) == total and next(_tensors(batch), None) is None:
        return batch[part]
    pieces = [_cut(value, total, part) for value in batch]
    if isinstance(batch, tuple):
        return type(batch)(*pieces) if hasattr(batch, "_fields") else tuple(pieces)
    return pieces
