"""Tensors under keys, each part of memory once: tied weights, views and expanded ones."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

Key = tuple[str | int, ...]


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, else the tensor; detached."""
    local: Tensor = getattr(tensor, "_local_tensor", tensor).detach()
    return local


def version_of(tensor: Tensor) -> int:
    """How often a tensor was written in place; 0 for one of inference mode, where no one counts."""
    return 0 if tensor.is_inference() else tensor._version


def without_duplicates(named: Iterable[tuple[Key, Tensor]]) -> dict[Key, Tensor]:
    """Keep one tensor for each place in memory, and one view of storage that many overlap in.

    That is the tensor which all others are views of, if there is one: its numbers can be checked.
    Else it is the bytes.
    """
    by_storage: dict[int, list[tuple[Key, Tensor]]] = {}
    places: set[tuple[Any, ...]] = set()
    for key, tensor in named:
        tensor = _once_each(local_part(tensor))
        storage = tensor.untyped_storage()._cdata
        place = (storage, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
        if place not in places:
            places.add(place)
            by_storage.setdefault(storage, []).append((key, tensor))
    kept: dict[Key, Tensor] = {}
    for sharers in by_storage.values():
        if len(sharers) > 1:
            storage_bytes = sharers[0][1].untyped_storage().nbytes()
            if sum(t.nbytes for _, t in sharers) > storage_bytes:
                sharers = [_all_of(sharers)]
        kept.update(sharers)
    return kept


def _all_of(sharers: Sequence[tuple[Key, Tensor]]) -> tuple[Key, Tensor]:
    """Return one tensor in place of several of one storage."""
    first, tensor = sharers[0]
    key, largest = max(sharers, key=lambda pair: pair[1].nbytes)
    begin, end = _span(largest)
    spans = [_span(t) for _, t in sharers]
    if largest.is_contiguous() and all(begin <= b and e <= end for b, e in spans):
        return (key if key[0] in ("parameter", "state") else first), largest
    whole = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return first, whole.set_(tensor.untyped_storage())


def _span(tensor: Tensor) -> tuple[int, int]:
    """First byte in the storage, and that after the last; a view has no negative strides."""
    begin = int(tensor.storage_offset()) * tensor.itemsize
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((int(size) - 1) * int(stride) for size, stride in pairs) if tensor.numel() else -1
    return begin, begin + (last + 1) * tensor.itemsize


def _once_each(tensor: Tensor) -> Tensor:
    """Drop repetitions of an expanded tensor: they could be read but not written."""
    if tensor.is_contiguous():
        return tensor
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor
