"""Names ranks that keep the others waiting.

In a synchronous run all steps last equally long, for the fast ranks wait for the slow one. What
tells them apart is the time that each spends on its own work, without the waiting.
"""

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from heal.cluster.side_group import has_peers, side_group

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True, slots=True)
class Straggler:
    """A rank that is slower than the others, again and again.

    Attributes:
        rank: which one.
        seconds: its median time per step in the last window.
        others: the median of the medians of all other ranks.
        windows: for how many windows in a row.
    """

    rank: int
    seconds: float
    others: float
    windows: int

    def __str__(self) -> str:
        return (
            f"rank {self.rank} takes {self.seconds:.4g} s of its own per step, the others "
            f"{self.others:.4g} s, for {self.windows} windows in a row"
        )


class StragglerWatch:
    """Gathers the ranks' own times every ``every`` steps, and compares them.

    The gathering runs beside training and is read at the next step; all ranks call :meth:`note`
    once per step, and all get the same answer in the same call.

    Args:
        every: steps in a window.
        factor: a rank that takes this many times as long as the others is slow.
        patience: windows in a row before a slow rank is named.
        group: the ranks to compare; all of them if None.

    Raises:
        ValueError: an argument is out of range.

    Example:
        >>> stragglers = StragglerWatch(every=50)
        >>> for batch in loader:
        ...     with stragglers.working():  # without the part that waits for others
        ...         loss = model(prepare(batch))
        ...     loss.backward()
        ...     optimizer.step()
        ...     for straggler in stragglers.note():
        ...         print(straggler)
    """

    def __init__(
        self,
        every: int = 50,
        factor: float = 1.5,
        patience: int = 2,
        group: "ProcessGroup | None" = None,
    ) -> None:
        for name, value, least in (("every", every, 1), ("patience", patience, 1)):
            if value < least:
                raise ValueError(f"{name} is {value}; wanted {least} or more")
        if not factor > 1:
            raise ValueError(f"factor is {factor}; wanted more than 1")
        self._every = every
        self._factor = factor
        self._patience = patience
        self._group = group
        self._own = 0.0
        self._times: list[float] = []
        self._under_way: tuple[Any, list[Tensor]] | None = None
        self._slow_for: dict[int, int] = {}

    @contextmanager
    def working(self) -> Iterator[None]:
        """Time a part of the step that waits for no other rank; may be entered several times."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._own += time.perf_counter() - began

    def note(self, seconds: float | None = None) -> list[Straggler]:
        """End a step; return the stragglers of the window that was gathered since.

        Args:
            seconds: that this rank worked in the step; what :meth:`working` timed if None.
        """
        found = self._compare()
        self._times.append(self._own if seconds is None else seconds)
        self._own = 0.0
        if len(self._times) >= self._every:
            self._gather(statistics.median(self._times))
            self._times.clear()
        return found

    def _gather(self, median: float) -> None:
        if not has_peers(self._group):
            return
        group = side_group(self._group)
        mine = torch.tensor([median], dtype=torch.float64)
        all_of_them = [torch.empty_like(mine) for _ in range(dist.get_world_size(self._group))]
        work = dist.all_gather(all_of_them, mine, group=group, async_op=True)
        self._under_way = work, all_of_them

    def _compare(self) -> list[Straggler]:
        if self._under_way is None:
            return []
        work, gathered = self._under_way
        self._under_way = None
        work.wait()
        ranks = dist.get_process_group_ranks(self._group or dist.group.WORLD)
        return self.judge(dict(zip(ranks, (t.item() for t in gathered), strict=True)))

    def judge(self, medians: dict[int, float]) -> list[Straggler]:
        """Return the ranks that were slow in this window and in enough before it."""
        found = []
        for rank, seconds in medians.items():
            others = statistics.median(s for r, s in medians.items() if r != rank)
            if seconds <= self._factor * others:
                self._slow_for.pop(rank, None)
                continue
            self._slow_for[rank] = windows = self._slow_for.get(rank, 0) + 1
            if windows >= self._patience:
                found.append(Straggler(rank, seconds, others, windows))
        return found
