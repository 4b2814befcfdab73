"""Cuts a batch into pieces along its samples, whatever kind of container it is.

What is not understood is not cut: a wrong cut would silently train on something else.
"""

import copy
import dataclasses
import itertools
import re
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence, Sized
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

__all__ = ["CannotSplit", "count_samples", "num_samples", "own_copy", "rebuilt", "split"]


class CannotSplit(TypeError):
    """A batch is of a kind that cannot be cut, or it is not clear what its samples are."""


def num_samples(batch: Any) -> int:
    """Return how many samples a batch has; 1 if that is not clear."""
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
    is_list_of_samples = isinstance(batch, (list, tuple)) and are_samples(batch)
    bounds = [total * i // parts for i in range(parts + 1)]
    pieces = []
    for begin, end in itertools.pairwise(bounds):
        part = slice(begin, end)
        piece = batch[part] if is_list_of_samples else _cut(batch, total, part, is_outermost=True)
        pieces.append((piece, end - begin))
    return pieces


def own_copy(batch: Any) -> Any:
    """Return the batch with dicts, lists and dataclasses of its own, at every depth.

    A train step that pops the labels, and then fails, must find them when it is tried again. What
    cannot be copied is returned as it is: it may fail when tried again, but not before.
    """
    try:
        return _copied(batch)
    except Exception:  # containers of other libraries
        return batch


def _copied(value: Any) -> Any:
    if isinstance(value, Mapping) and not isinstance(value, (dict, UserDict)):
        return value
    return rebuilt(value, _copied)


# What a batch is made of: its tensors and lists, through whatever containers hold them.


PACKED_NAMES = re.compile(r"cu_?seq|edge_index|row_splits", re.IGNORECASE)
"""Fields that hold where samples begin in packed sequences or graphs."""


def _is_dataclass(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def rebuilt(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return a container of the same kind with changed entries; anything else as it is."""
    if isinstance(value, Mapping):
        entries = {key: change(entry) for key, entry in value.items()}
        if not isinstance(value, MutableMapping):
            return type(value)(entries)  # type: ignore[call-arg]
        copied: Any = copy.copy(value)  # constructors differ: BatchEncoding, defaultdict
        copied.update(entries)
        return copied
    if isinstance(value, list):
        copied = copy.copy(value)
        copied[:] = map(change, value)
        return copied
    if isinstance(value, tuple):
        changed = [change(entry) for entry in value]
        if all(new is old for new, old in zip(changed, value, strict=True)):
            return value
        return type(value)(*changed) if hasattr(value, "_fields") else tuple(changed)
    if _is_dataclass(value):
        copied = copy.copy(value)
        for field in dataclasses.fields(value):
            # Past frozen and __post_init__: the fields were valid, and changed ones are.
            object.__setattr__(copied, field.name, change(getattr(value, field.name)))
        return copied
    return value


def entries_of(batch: Any) -> Iterable[Any]:
    """Return what a container holds, nothing if it is none; raise CannotSplit if it is packed."""
    if isinstance(batch, PackedSequence):
        raise CannotSplit(
            "expected samples along the first axis, got a PackedSequence, whose rows are steps in "
            "time; pad instead"
        )
    names: Iterable[Any] = ()
    entries: Iterable[Any] = ()
    if isinstance(batch, Mapping):
        names, entries = batch, batch.values()
    elif isinstance(batch, (list, tuple)):
        names, entries = getattr(batch, "_fields", ()), batch
    elif _is_dataclass(batch):
        names = [field.name for field in dataclasses.fields(batch)]
        entries = [getattr(batch, name) for name in names]
    for name in names:
        if isinstance(name, str) and PACKED_NAMES.search(name):
            raise CannotSplit(
                "expected samples along the first axis of every tensor, got samples packed one "
                f"behind the other ({name!r} holds where they begin); pad instead"
            )
    return entries


def tensors_in(batch: Any) -> Iterator[Tensor]:
    """Yield every tensor of a batch."""
    if isinstance(batch, Tensor):
        yield batch
    else:
        for value in entries_of(batch):
            yield from tensors_in(value)


def first_tensor(batch: Any) -> Tensor | None:
    """Return the first tensor of a batch, None if there is none."""
    return next(tensors_in(batch), None)


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
    """Return whether something is an array of numpy, which need not be installed."""
    return type(value).__module__ == "numpy" and getattr(value, "ndim", 0) > 0


# Which length the fields of a batch agree on, as that of its samples. The first tensor may have
# time for its first axis, or be weights of classes. Without a majority there is no cut.


def agreed_length(fields: Sequence[Any]) -> int | None:
    """Return the length that more than half of the fields have; None if no field is a tensor.

    A list that holds tensors may mean its own length or theirs; texts count only where they agree.
    Empty tensors and those of one number do not count, unless there are no other ones.
    """
    tensors = [v for v in fields if isinstance(v, Tensor) and v.dim() > 0]
    if not tensors:
        return None
    own = [t for t in tensors if t.numel() > 1 and not _serves_all_samples(t, tensors)]
    meant = [{len(t)} for t in own or tensors]
    candidates = set().union(*meant)
    meant += [{len(v)} for v in fields if is_array(v)]
    for entries in (v for v in fields if isinstance(v, (list, tuple))):
        lengths = rows(entries)
        if lengths or len(entries) in candidates:
            meant.append({len(entries), *lengths})
    agreed = [n for n in candidates if 2 * sum(n in one for one in meant) > len(meant)]
    if len(agreed) == 1:
        return agreed[0]
    raise CannotSplit(
        "expected samples along the first axis of most tensors, got tensors of the lengths "
        f"{', '.join(map(str, sorted(set().union(*meant))))}, any of which may be the number of "
        "samples; collate with batch_first"
    )


def _serves_all_samples(tensor: Tensor, others: Sequence[Tensor]) -> bool:
    """Return whether a tensor fits inner axes of others, as masks [T, T] or [1, T] do."""
    if tensor.is_nested or tensor.dim() < 2:
        return False
    is_square = tensor.dim() == 2 and tensor.shape[0] == tensor.shape[1]
    if not is_square and len(tensor) > 1:
        return False
    longer = [t for t in others if not t.is_nested and len(t) not in (1, len(tensor))]
    inner = {size for t in longer for size in t.shape[1:]}
    return inner.issuperset(tensor.shape[1:])


# How many samples a batch has, and whether the entries of a list are samples or fields.
#
# Collating makes ``[inputs, targets]``, fields that each hold all samples; a ``collate_fn`` of the
# user's may leave ``[image, image, image, image]``. Both are lists of tensors.


MOST_FIELDS = 3  # anchor, positive and negative are alike; more entries of one kind may be samples
MOST_CHANNELS = 4  # tensors of three dimensions with no more rows than this may be images


def count_samples(batch: Any) -> int:
    """Return the number of samples; 1 for a batch without tensors.

    The tensors that are in no list decide, by their majority. If there are none, the lists do:
    their entries are samples if the tensors in them cannot be fields, having several lengths.
    """
    if isinstance(batch, (list, tuple)) and not hasattr(batch, "_fields"):
        if are_samples(batch):
            return len(batch)
        fields: list[Any] = list(batch)
    else:
        fields = [batch]
    found = list(outside_lists(fields))
    agreed = agreed_length(found)
    if agreed is not None:
        return agreed
    lists = [v for v in found if isinstance(v, (list, tuple)) and first_tensor(v) is not None]
    if _can_only_be_samples(lists):
        return len(lists[0])
    for entries in lists:
        _hold_samples(entries)  # raises if that is not clear
    agreed = agreed_length([t for entries in lists for t in tensors_in(entries)])
    return 1 if agreed is None else agreed


def are_samples(batch: Sequence[Any]) -> bool:
    """Return whether the entries of an outermost list are samples and not fields."""
    if hasattr(batch, "_fields") or (isinstance(batch, tuple) and len(rows(batch)) > 1):
        return False
    if _can_only_be_samples([entry for entry in batch if isinstance(entry, (list, tuple))]):
        return False  # a list of lists of samples: (images, targets)
    return _hold_samples(batch)


def _hold_samples(entries: Sequence[Any]) -> bool:
    answer = guess(entries)
    if answer is None:
        raise CannotSplit(
            f"expected samples or fields, got a {type(entries).__name__} of {len(entries)} "
            f"entries of the type {type(entries[0]).__name__}, which may be either; put a tensor "
            "beside it that has the number of samples, or all samples into one tensor"
        )
    return answer


def guess(entries: Sequence[Any]) -> bool | None:
    """Return whether the entries of a list are samples, not fields; None if that is not clear."""
    firsts = [first_tensor(entry) for entry in entries]
    if len(entries) < 2 or any(t is None for t in firsts) or len(set(map(_kind, entries))) > 1:
        return False
    if len(rows(entries)) > 1:
        shapes = {t.shape[1:] for t in entries if isinstance(t, Tensor)}
        return True if len(shapes) <= 1 else None
    may_be_images = all(t is not None and t.dim() == 3 and len(t) <= MOST_CHANNELS for t in firsts)
    return None if may_be_images or len(entries) > MOST_FIELDS else False


def _can_only_be_samples(lists: Sequence[Sequence[Any]]) -> bool:
    """Return whether lists of one length hold tensors that cannot all be fields."""
    answers = [guess(entries) for entries in lists]
    if not lists or len({len(entries) for entries in lists}) > 1 or False in answers:
        return False
    differ = len(set().union(*map(rows, lists))) > 1
    return True in answers or (differ and len(lists[0]) > MOST_FIELDS)


def _kind(entry: Any) -> tuple[Any, ...]:
    if isinstance(entry, Tensor):
        return Tensor, entry.dim(), entry.dtype
    if isinstance(entry, Mapping):
        return type(entry), frozenset(entry)
    if isinstance(entry, (list, tuple)):
        return type(entry), len(entry)
    return (type(entry),)


def _cut(value: Any, total: int, part: slice, *, is_outermost: bool = False) -> Any:
    if isinstance(value, Tensor):
        if value.is_nested or value.layout is not torch.strided:
            raise CannotSplit(f"expected a dense tensor to cut, got a {value.layout} one")
        return value[part] if value.dim() > 0 and len(value) == total else value
    if type(value).__module__ == "numpy":
        return value[part] if is_array(value) and len(value) == total else value
    if isinstance(value, (list, tuple)) and not is_outermost:
        return _cut_sequence(value, total, part)
    if isinstance(value, (list, tuple, Mapping)) or _is_dataclass(value):
        return _cut_fields(value, total, part)
    if isinstance(value, (str, bytes)) or not _may_hold_samples(value):
        return value
    raise CannotSplit(
        "expected tensors, arrays, texts and numbers in lists, tuples, dicts and dataclasses, "
        f"got a {_name(value)}"
    )


def _cut_fields(value: Any, total: int, part: slice) -> Any:
    entries_of(value)  # raises for what is packed
    try:
        return rebuilt(value, lambda entry: _cut(entry, total, part))
    except CannotSplit:
        raise
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
            f"expected a number for each of {total} samples, or a size that all have, got {value}, "
            "which may be either; use a tensor in the first case, and keep the size outside of "
            "the batch in the second"
        )
    lengths = [rows(v) for v in value if v is not None]
    if lengths and all(found == {total} for found in lengths):
        raise CannotSplit(
            f"expected samples or fields, got a {_name(value)} of {total} entries with tensors of "
            f"length {total}, which may be either"
        )
    return value[part]


def _coarse_kind(entry: Any) -> Any:
    for kind, classes in ((float, (int, float)), (Mapping, Mapping), (list, (list, tuple))):
        if isinstance(entry, classes):
            return kind
    return (Tensor, entry.dim()) if isinstance(entry, Tensor) else type(entry)


def _may_hold_samples(value: Any) -> bool:
    held = (first_tensor(attribute) for attribute in _attributes(value))
    return isinstance(value, Sized) or any(tensor is not None for tensor in held)


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
