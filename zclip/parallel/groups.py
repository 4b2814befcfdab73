"""Which process group spans a set of tensors, so that one all-reduce serves them all."""

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_made: "dict[tuple[int, ...], ProcessGroup]" = {}
_made_in: list[Any] = [None]  # the world that the groups above belong to


def spanning_group(
    rank_sets: Collection[tuple[int, ...]],
    process_group: "ProcessGroup | None",
    in_pipeline: bool,
) -> "ProcessGroup | None":
    """Return the smallest group that holds all of ``rank_sets``; None if there is nothing to span.

    If one mesh holds all others (experts beside FSDP, norms sharded by data beside weights sharded
    by data and tensor), it is the group of that mesh. If none does, it is the world, to which every
    rank then has to come. All ranks must see the same meshes, or their likes, as they do when all
    run the same program.

    Raises:
        ValueError: ``process_group`` leaves out a rank that holds a piece; or the meshes lie in a
            pipeline, where the world has ranks with other tensors.
    """
    if process_group is not None:
        members = set(dist.get_process_group_ranks(process_group))
        for ranks in rank_sets:
            if not set(ranks) <= members:
                raise ValueError(
                    f"process_group: expected all ranks of a parameter, {list(ranks)}, "
                    f"got ranks {sorted(members)}"
                )
        return process_group
    if not rank_sets:
        return None
    largest = max(rank_sets, key=len)
    if not all(set(ranks) <= set(largest) for ranks in rank_sets):
        if in_pipeline:
            raise ValueError(
                f"expected one mesh that holds all others, got {sorted(rank_sets)}; give "
                "process_group=, the group of this pipeline stage"
            )
        largest = tuple(range(dist.get_world_size()))
    return _group_of(largest)


def _group_of(ranks: tuple[int, ...]) -> "ProcessGroup | None":
    if dist.get_rank() not in ranks:
        return None
    world = dist.group.WORLD
    if len(ranks) == dist.get_world_size():
        return world
    if _made_in[0] is not world:
        _made.clear()
        _made_in[0] = world
    if ranks not in _made:
        # Only those who are in it take part: in a pipeline each stage makes its own.
        _made[ranks] = dist.new_group(list(ranks), use_local_synchronization=True)
    return _made[ranks]
