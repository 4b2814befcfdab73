"""Is every rank still there, and does the network between the devices still carry numbers?"""

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from heal.cluster.side_group import has_peers, own_store

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

TIMEOUT_SECONDS = 10.0
SHORTEST_PAUSE, LONGEST_PAUSE = 0.0002, 0.02  # seconds between two looks at a ping under way


@dataclass(frozen=True, slots=True)
class GroupHealth:
    """What a ping brought back.

    Attributes:
        ok: every rank answered in time, and the sum was right.
        seconds: from the start of the ping to its answer, or to the timeout.
        missing: ranks that did not come to the ping.
        reason: in words; "" if all is well.
    """

    ok: bool
    seconds: float
    missing: tuple[int, ...] = ()
    reason: str = ""


class GroupPing:
    """Pings the ranks of a group, over a group of its own so that training is not disturbed.

    Everybody adds a one on its device: what works is the path that gradients take, gloo or NCCL.
    A ping that failed leaves its group behind in an unknown state, and no other is sent.

    Args:
        group: the ranks that have to answer; all of them if None.
        timeout_seconds: how long they may take.

    Raises:
        ValueError: the timeout is not positive.
    """

    def __init__(
        self, group: "ProcessGroup | None" = None, timeout_seconds: float = TIMEOUT_SECONDS
    ) -> None:
        if not timeout_seconds > 0:
            raise ValueError(f"timeout_seconds is {timeout_seconds!r}; wanted more than 0")
        self._group = group
        self._timeout = timeout_seconds
        self._count = 0
        self._began = 0.0
        self._failed = ""
        self._under_way: Any = None
        self._peers: tuple[Any, Any, Tensor] | None = None

    def connect(self) -> None:
        """Make the group now; else the first ping does, which a rank that is gone would hold up."""
        if has_peers(self._group):
            self._connect()

    def ping(self) -> GroupHealth:
        """Wait until all have answered, or the time is up; all ranks have to call it alike."""
        self.start()
        return self.finish()

    def start(self) -> None:
        """Send a ping and go on; all ranks have to call it alike."""
        if self._under_way is not None:
            self.finish()
        if self._failed or not has_peers(self._group):
            return
        side, store, one = self._connect()
        self._count += 1
        self._began = time.monotonic()
        store.set(f"{self._count}/{dist.get_rank()}", "here")
        one.fill_(1)
        try:
            self._under_way = dist.all_reduce(one, group=side, async_op=True)
        except RuntimeError as error:
            self._failed = f"the ping could not be sent: {error}"

    def finish(self) -> GroupHealth:
        """Return what came back of the ping that was sent; waits if it is still under way."""
        if self._under_way is None:
            reason = f"an earlier ping failed: {self._failed}" if self._failed else ""
            return GroupHealth(not self._failed, 0.0, (), reason)
        _, store, one = self._connect()
        work, self._under_way = self._under_way, None
        began = time.monotonic()
        try:
            arrived = self._wait(work, began)
        except RuntimeError as error:  # gloo raises at once if a peer's connection is closed
            return self._failure(store, f"the ping failed: {error}")
        if not arrived:
            return self._failure(store, f"no answer within {self._timeout:g} s")
        size, total = dist.get_world_size(self._group), int(one.item())
        if total != size:
            return self._failure(store, f"{size} ranks sent a 1 and the sum is {total}")
        # Only now, for a rank that still waits may look for it: the keys of the ping before.
        store.delete_key(f"{self._count - 1}/{dist.get_rank()}")
        return GroupHealth(True, time.monotonic() - self._began)

    def _wait(self, work: Any, began: float) -> bool:
        pause = SHORTEST_PAUSE
        while not work.is_completed():
            if time.monotonic() - began > self._timeout:
                return False
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
        work.wait()  # raises if it ended badly
        return True

    def _failure(self, store: Any, reason: str) -> GroupHealth:
        self._failed = reason
        ranks = dist.get_process_group_ranks(self._group or dist.group.WORLD)
        missing = tuple(r for r in ranks if not store.check([f"{self._count}/{r}"]))
        if missing:
            reason += f"; missing: rank {', '.join(map(str, missing))}"
        return GroupHealth(False, time.monotonic() - self._began, missing, reason)

    def _connect(self) -> tuple[Any, Any, Tensor]:
        """Make group and number when first needed, by all ranks together."""
        if self._peers is None:
            group = self._group or dist.group.WORLD
            ranks = dist.get_process_group_ranks(group)
            backend = dist.get_backend(group)
            device = torch.device(
                torch.accelerator.current_accelerator() or "cpu" if backend != "gloo" else "cpu"
            )
            side = dist.new_group(
                ranks, backend=backend, use_local_synchronization=self._group is not None
            )
            store = PrefixStore(f"heal/ping/{side.group_name}", own_store())
            self._peers = side, store, torch.ones(1, dtype=torch.int32, device=device)
        return self._peers


_pings: dict[Any, GroupPing] = {}


def check_nccl_health(
    timeout_seconds: float = TIMEOUT_SECONDS, group: "ProcessGroup | None" = None
) -> GroupHealth:
    """Ping every rank once, over NCCL or gloo, whichever the group has; never hangs.

    All ranks have to call it at the same place, say every hundred steps. It waits for the slowest,
    on a GPU also for what is enqueued before it.

    Args:
        timeout_seconds: how long the answer may take.
        group: the ranks that have to answer; all of them if None.

    Example:
        >>> health = check_nccl_health(timeout_seconds=10.0)
        >>> if not health.ok:
        ...     raise SystemExit(f"{health.reason}")
    """
    world = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    key = (world, group)
    if key not in _pings:
        for other in [k for k in _pings if k[0] is not world]:
            del _pings[other]  # of a world that is gone
        _pings[key] = GroupPing(group, timeout_seconds)
    _pings[key]._timeout = timeout_seconds
    return _pings[key].ping()
