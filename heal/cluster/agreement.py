"""One bit that all ranks come to know in the same call."""

import time
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from heal.cluster.side_group import has_peers, side_group

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

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
