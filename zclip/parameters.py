"""From what a user hands over to a list of gradients, and from an index back to a name."""

import types
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from zclip.reading import native

Parameters = Tensor | Iterable[Tensor] | Iterable[tuple[str, Tensor]]
"""One tensor, any iterable of them, or ``model.named_parameters()``."""


def as_list(parameters: Parameters) -> list[Tensor]:
    """Return the parameters as a list, in their order, pairs of name and tensor as they are.

    Elements are looked at by :func:`grads_of`, which costs nothing more if all is well.
    """
    if isinstance(parameters, Tensor):
        return [parameters]
    try:
        listed = list(parameters)
    except TypeError:
        if isinstance(parameters, Iterable):
            raise
        raise TypeError(
            f"parameters: expected tensors, got {type(parameters).__name__}; pass those of a model "
            "as model.parameters()"
        ) from None
    if not listed and isinstance(parameters, types.GeneratorType):
        warnings.warn(
            "parameters is an empty generator, so nothing is clipped; was it used up before?",
            stacklevel=4,
        )
    return listed


def grads_of(parameters: list[Tensor]) -> list[Tensor]:
    """Return every gradient once, in order of first appearance.

    Raises:
        TypeError: an element is neither a tensor nor a pair of name and tensor.
    """
    return each_once(all_grads_of(parameters))


def all_grads_of(parameters: list[Tensor]) -> list[Any]:
    """Return the gradient of every parameter, None where there is none."""
    if is_compiling():
        return [tensor_at(i, p).grad for i, p in enumerate(parameters)]
    try:
        return native.gradients(parameters)
    except AttributeError:
        return native.gradients([tensor_at(i, p) for i, p in enumerate(parameters)])


def each_once(found: Sequence[Tensor | None]) -> list[Tensor]:
    """Return every gradient once, in order of first appearance."""
    grads = [g for g in found if g is not None]
    if len(set(map(id, grads))) != len(grads):  # tied parameters count once
        grads = list({id(g): g for g in grads}.values())
    return grads


def name_of_grad(parameters: Sequence[Tensor], grad: Tensor) -> str:
    """Return the name of the first parameter whose gradient this is, or its place in the list."""
    for i, entry in enumerate(parameters):
        if tensor_at(i, entry).grad is grad:
            return str(entry[0]) if isinstance(entry, tuple) else f"parameters[{i}]"
    raise ValueError("this is not the gradient of any of the parameters")


def tensors_of(parameters: Sequence[Tensor]) -> list[Tensor]:
    """Return every tensor once, in order of first appearance, without its name."""
    tensors = [e if isinstance(e, Tensor) else tensor_at(i, e) for i, e in enumerate(parameters)]
    if len(set(map(id, tensors))) == len(tensors):
        return tensors
    return list({id(t): t for t in tensors}.values())


def names_of(parameters: Sequence[Tensor]) -> list[str]:
    """Return the names of :func:`tensors_of`; without one it is the place in the list."""
    names: dict[int, str] = {}
    for i, entry in enumerate(parameters):
        name = str(entry[0]) if isinstance(entry, tuple) else f"parameters[{i}]"
        names.setdefault(id(tensor_at(i, entry)), name)
    return list(names.values())


def device_of(parameters: Sequence[Tensor]) -> torch.device:
    """Return where the first parameter lives; the CPU if there is none."""
    return tensor_at(0, parameters[0]).device if parameters else torch.device("cpu")


def tensor_at(i: int, entry: object) -> Tensor:
    """Return the tensor of an entry, which may be a pair of name and tensor.

    Raises:
        TypeError: it is neither.
    """
    if isinstance(entry, tuple) and len(entry) == 2 and isinstance(entry[0], str):
        entry = entry[1]
    if not isinstance(entry, Tensor):
        raise TypeError(
            f"parameters[{i}]: expected a Tensor, got {type(entry).__name__} {entry!r:.60}"
        )
    return entry
