"""A gloo group beside the group of training: for small messages that must not touch the device."""

import time
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary, ref

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

CLOSE_SECONDS = 1.0

_made: "WeakValueDictionary[tuple[Any, ...], ProcessGroup]" = WeakValueDictionary()
"""Weakly, so that ``destroy_process_group`` ends their threads: those must not outlive Python."""

_made_in: "list[ref[Any] | None]" = [None]  # the world that the groups above belong to


def has_peers(group: "ProcessGroup | None" = None) -> bool:
    """Return whether there are other ranks."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1


def side_group(group: "ProcessGroup | None" = None) -> "ProcessGroup":
    """Return the gloo group with the same ranks; made by all of them when first asked for."""
    if _made_in[0] is None or _made_in[0]() is not dist.group.WORLD:
        _made.clear()
        _made_in[0] = ref(dist.group.WORLD)
    ranks = tuple(dist.get_process_group_ranks(group or dist.group.WORLD))
    made = _made.get(ranks)
    if made is None:
        is_local = group is not None
        made = dist.new_group(list(ranks), backend="gloo", use_local_synchronization=is_local)
        _made[ranks] = made
    return made


def own_store() -> Any:
    """Return a new client of the default group's store, whose own is locked while one waits."""
    store: Any = dist.distributed_c10d._get_default_store()
    return store.clone()


class Agreement:
    """Whether any rank says yes, by an all-reduce over gloo that no rank has to wait for.

    The device takes no part, whatever the backend of training: nothing is enqueued on it, nothing
    waits for it. All ranks of the group call :meth:`any` equally often.
    """

    def __init__(self, group: "ProcessGroup | None" = None) -> None:
        self._group = group
        self._under_way: tuple[Any, Tensor] | None = None

    def any(self, vote: bool, wait: bool = False) -> bool:
        """Send the vote of this rank; return the result of the call before, or of this one."""
        if not has_peers(self._group):
            return vote
        if not wait and self._collect():
            return True  # on every rank, so that none starts a message that others miss
        votes = torch.full((1,), int(vote), dtype=torch.int32)
        group = side_group(self._group)
        work = dist.all_reduce(votes, dist.ReduceOp.MAX, group=group, async_op=True)
        earlier = self._collect() if wait else False
        self._under_way = work, votes
        return (self._collect() or earlier) if wait else False

    def close(self) -> None:
        """Wait a second for what is under way: a thread must not write to memory that is gone."""
        until = time.monotonic() + CLOSE_SECONDS  # no longer: the peers may be gone already
        while self._under_way and time.monotonic() < until:
            if self._under_way[0].is_completed():
                break
            time.sleep(0.001)
        self._under_way = None

    def _collect(self) -> bool:
        if self._under_way is None:
            return False
        (work, votes), self._under_way = self._under_way, None
        work.wait()
        return bool(votes.item())
