"""What the piece of a tensor that this rank holds is to the whole, read off its placements."""

import functools
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeGuard

from torch import Tensor
from torch.nn import Parameter

PLAIN = {Tensor, Parameter}
"""Types that are no DTensor for sure, and nearly always all that there are."""


class Share(NamedTuple):
    """The part that one rank plays for one tensor."""

    counts: bool  # its squares are added; not those of a replica, which were counted before
    leads: bool  # it is the first of all that hold a piece, and stands for the copy
    ranks: tuple[int, ...]  # all that hold a piece, in ascending order


def is_dtensor(tensor: object) -> TypeGuard[Any]:
    """Return whether this is a DTensor, without importing what makes them."""
    if type(tensor) in PLAIN:
        return False
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def has_dtensor(entries: Sequence[object]) -> bool:
    """Return whether a DTensor is among tensors or pairs of name and tensor; 20 ns for each."""
    if set(map(type, entries)) <= PLAIN:
        return False
    return any(is_dtensor(e[1] if type(e) is tuple else e) for e in entries)


def share_of(tensor: Any, name: str) -> Share:
    """Return the share of this rank in a DTensor.

    A tensor is the sum of its shards. Where it is replicated, the rank at coordinate 0 counts and
    the others do not; that is exact, where dividing by the number of replicas would round.

    Raises:
        TypeError: it is ``Partial``: its values are not known to any rank yet.
    """
    check_not_partial(tensor, name)
    from torch.distributed.tensor import Replicate

    mesh = tensor.device_mesh
    ranks = ranks_of(mesh)
    coordinate = mesh.get_coordinate()
    if coordinate is None:  # this rank is not in the mesh and holds nothing
        return Share(False, False, ranks)
    replica = any(
        at and isinstance(placement, Replicate)
        for at, placement in zip(coordinate, tensor.placements, strict=True)
    )
    return Share(not replica, not any(coordinate), ranks)


def check_not_partial(tensor: Any, name: str) -> None:
    """Raise TypeError if a DTensor still has to be added up over a dimension of its mesh."""
    if any(placement.is_partial() for placement in tensor.placements):
        raise TypeError(
            f"{name}: expected placements Shard or Replicate, got {tensor.placements}; a Partial "
            "tensor still has to be added up, and the norm of its parts is not that of their sum. "
            "Use param.grad = param.grad.redistribute(placements=param.placements)"
        )


@functools.lru_cache(maxsize=64)
def ranks_of(mesh: Any) -> tuple[int, ...]:
    """Return the ranks in a mesh, in ascending order."""
    return tuple(sorted(mesh.mesh.flatten().tolist()))


def local_part(tensor: Any) -> Tensor:
    """Return what this rank holds of a DTensor, the same memory, once it has arrived."""
    local: Tensor = tensor.to_local()
    if type(local) is Tensor:
        return local
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    return local.wait() if isinstance(local, AsyncCollectiveTensor) else local


def local_parts(tensors: Iterable[Tensor], name: Callable[[int], str]) -> list[Tensor]:
    """Return what this rank holds of each, for what is done element by element.

    Raises:
        TypeError: one is ``Partial``.
    """
    parts = []
    for i, tensor in enumerate(tensors):
        if is_dtensor(tensor):
            check_not_partial(tensor, name(i))
            tensor = local_part(tensor)
        parts.append(tensor)
    return parts
