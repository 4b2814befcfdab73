"""A gloo group beside the group of training: for small talk that must not touch the device."""

import time
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary, ref

import torch
import torch.distributed as dist
from torch import Tensor

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


# One bit that all ranks come to know in the same call.


CLOSE_SECONDS = 1.0


class Agreement:
    """Whether any rank says yes, by an all-reduce over gloo that nobody has to wait for.

    The device takes no part, whatever the backend of training: nothing is enqueued on it, nothing
    waits for it. All ranks call :meth:`any` equally often.

    Args:
        group: the ranks that agree; all of them if None.
    """

    def __init__(self, group: "ProcessGroup | None" = None) -> None:
        self._group = group
        self._under_way: list[tuple[Any, Tensor]] = []

    def any(self, said: bool, wait: bool = False) -> bool:
        """Tell what this rank says; return what all said in the call before, or in this one."""
        if not has_peers(self._group):
            return said
        answers = [] if wait else self._collect()
        if any(answers):
            return True  # on every rank, so that none starts a message that others miss
        vote = torch.full((1,), int(said), dtype=torch.int32)
        work = dist.all_reduce(
            vote, dist.ReduceOp.MAX, group=side_group(self._group), async_op=True
        )
        self._under_way.append((work, vote))
        return any(self._collect()) if wait else False

    def close(self) -> None:
        """Wait a little for what is under way: a thread must not write to memory that is gone.

        Not for long, for the peers may be gone already.
        """
        until = time.monotonic() + CLOSE_SECONDS
        while self._under_way and time.monotonic() < until:
            if self._under_way[0][0].is_completed():
                self._under_way.pop(0)
            else:
                time.sleep(0.001)
        self._under_way.clear()

    def _collect(self) -> list[bool]:
        answers = []
        for work, vote in self._under_way:
            work.wait()
            answers.append(bool(vote.item()))
        self._under_way.clear()
        return answers
