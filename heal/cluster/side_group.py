"""A gloo group beside the group of training: for small talk that must not touch the device."""

from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary, ref

import torch.distributed as dist

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_made: "WeakValueDictionary[tuple[Any, ...], ProcessGroup]" = WeakValueDictionary()
"""Weakly, so that ``destroy_process_group`` ends their threads: those must not outlive Python."""

_made_in: "list[ref[Any] | None]" = [None]  # the world that the groups above belong to


def has_peers(group: "ProcessGroup | None" = None) -> bool:
    """Return whether there is anybody to talk to."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1


def side_group(group: "ProcessGroup | None" = None, purpose: str = "talk") -> "ProcessGroup":
    """Return the gloo group with the same ranks; made when first asked for, by all of them.

    Args:
        group: whose ranks; those of the world if None.
        purpose: groups for different purposes are different, so that a broken one stays alone.
    """
    if _made_in[0] is None or _made_in[0]() is not dist.group.WORLD:
        _made.clear()
        _made_in[0] = ref(dist.group.WORLD)
    ranks = tuple(dist.get_process_group_ranks(group or dist.group.WORLD))
    key = (*ranks, purpose)
    made = _made.get(key)
    if made is None:
        made = dist.new_group(
            list(ranks), backend="gloo", use_local_synchronization=group is not None
        )
        _made[key] = made
    return made


def own_store() -> Any:
    """Return a client of one's own to the store of the default group.

    The group's own client is locked while anybody waits through it.
    """
    store: Any = dist.distributed_c10d._get_default_store()
    return store.clone()
