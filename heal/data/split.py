"""Cuts a batch into pieces along its samples, whatever kind of container it is.

What is not understood is not cut: a wrong cut would train on something else without a word. What
the samples of a batch are is found out in :mod:`heal.data.sample_count`.
"""

import copy
import dataclasses
import itertools
from collections import UserDict
from collections.abc import Iterator, Mapping, MutableMapping, Sized
from typing import Any

import torch
from torch import Tensor

from heal.data.batch_fields import CannotSplit, is_array, rows, tensors_in
from heal.data.sample_count import MOST_CHANNELS, are_samples, count_samples, has_tensors

__all__ = ["CannotSplit", "count_samples", "num_samples", "split"]


def num_samples(batch: Any) -> int:
    """Return how many samples a batch has.

    That is the length of most of its tensors, or of its lists if their entries are samples. A batch
    without tensors, or of which it is not clear, counts as one sample and cannot be cut.
    """
    try:
        return count_samples(batch)
    except CannotSplit:
        return 1


def split(batch: Any, parts: int) -> list[tuple[Any, int]]:
    """Cut a batch into at most ``parts`` pieces of nearly equal size.

    Tensors whose first dimension is the number of samples are cut, as are arrays of that length and
    lists and tuples if their entries are of one kind; texts, numbers and all tensors of other
    lengths go whole into every piece. Dicts, dataclasses, tuples, named tuples, lists and mappings
    like BatchEncoding stay what they are. An outermost list or tuple is one of fields, as collating
    makes it, unless its entries can only be samples.

    Returns:
        Pieces in order, each with its number of samples; none is empty.

    Raises:
        CannotSplit: names what is not understood. Never raised for ``parts=1``.
    """
    if parts <= 1:
        return [(batch, num_samples(batch))]
    total = count_samples(batch)
    parts = min(parts, total)
    if parts <= 1:
        return [(batch, total)]
    bounds = [total * i // parts for i in range(parts + 1)]
    return [
        (_cut_outermost(batch, total, slice(begin, end)), end - begin)
        for begin, end in itertools.pairwise(bounds)
    ]


def _cut_outermost(batch: Any, total: int, part: slice) -> Any:
    if not isinstance(batch, (list, tuple)):
        return _cut(batch, total, part)
    return batch[part] if are_samples(batch) else _cut_fields(batch, total, part)


def _cut(value: Any, total: int, part: slice) -> Any:
    if isinstance(value, Tensor):
        if value.is_nested or value.layout is not torch.strided:
            raise CannotSplit(f"a {value.layout} tensor cannot be cut; wanted a dense one")
        return value[part] if value.dim() > 0 and len(value) == total else value
    if isinstance(value, Mapping):
        return _cut_mapping(value, total, part)
    if isinstance(value, (list, tuple)):
        return _cut_sequence(value, total, part)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        part_of: Any = copy.copy(value)
        for field in dataclasses.fields(value):
            # Past frozen, past __post_init__: the fields were valid and a part of them is.
            object.__setattr__(part_of, field.name, _cut(getattr(value, field.name), total, part))
        return part_of
    if type(value).__module__ == "numpy":
        return value[part] if is_array(value) and len(value) == total else value
    if isinstance(value, (str, bytes)) or not _may_hold_samples(value):
        return value
    raise CannotSplit(
        f"a {_name(value)} cannot be cut into samples; wanted tensors, arrays, texts and numbers "
        "in lists, tuples, dicts and dataclasses"
    )


def _cut_mapping(value: Mapping[Any, Any], total: int, part: slice) -> Any:
    pieces = {key: _cut(entry, total, part) for key, entry in value.items()}
    if isinstance(value, (UserDict, MutableMapping)):
        # A copy, for constructors want other things: BatchEncoding, defaultdict.
        copied: Any = copy.copy(value)
        if isinstance(value, UserDict):
            copied.data = pieces  # the copy shares its data with the original
        else:
            copied.update(pieces)
        return copied
    try:
        return type(value)(pieces)  # type: ignore[call-arg]
    except Exception as error:
        raise CannotSplit(f"a {_name(value)} cannot be made of a part of its entries") from error


def _cut_sequence(value: list[Any] | tuple[Any, ...], total: int, part: slice) -> Any:
    if len(value) != total or hasattr(value, "_fields"):
        return _cut_fields(value, total, part)
    kinds = {_coarse_kind(entry) for entry in value if entry is not None}
    if len(kinds) > 1 and total in rows(value):
        return _cut_fields(value, total, part)
    if kinds == {float} and total <= MOST_CHANNELS:
        raise CannotSplit(
            f"{value} may be a number for each of {total} samples, or a size that all have; wanted "
            "a tensor in the first case, and the size outside of the batch in the second"
        )
    if has_tensors(value) and all(rows(v) == {total} for v in value if v is not None):
        raise CannotSplit(
            f"a {_name(value)} of {total} entries with tensors of length {total} may be samples or "
            "fields"
        )
    return value[part]


def _coarse_kind(entry: Any) -> Any:
    for kind, classes in ((float, (int, float)), (Mapping, Mapping), (list, (list, tuple))):
        if isinstance(entry, classes):
            return kind
    return (Tensor, entry.dim()) if isinstance(entry, Tensor) else type(entry)


def _cut_fields(value: list[Any] | tuple[Any, ...], total: int, part: slice) -> Any:
    next(tensors_in(value), None)  # refuses what only looks like a tuple
    pieces = [_cut(entry, total, part) for entry in value]
    if isinstance(value, tuple):
        return type(value)(*pieces) if hasattr(value, "_fields") else tuple(pieces)
    return pieces


def _may_hold_samples(value: Any) -> bool:
    return isinstance(value, Sized) or any(has_tensors(held) for held in _attributes(value))


def _attributes(value: Any) -> Iterator[Any]:
    if callable(value):  # a function, or a module: what it has is its own
        return
    yield from getattr(value, "__dict__", {}).values()
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            yield getattr(value, name, None)


def _name(value: Any) -> str:
    kind = type(value)
    return f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")
