"""Where every rank says how far it is, and how to tell from that who the others wait for."""

import json
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from heal.cluster.patience import Patience

CALL = "call"
LOOKS_AT_STACK = 3  # a thread that runs may change its frames under our eyes, once in a long while
STORE_SECONDS = 3.0  # a store that takes longer to answer is taken for dead
WAITING = (
    "torch/distributed/",
    "torch/autograd/graph.py",
    "torch/nn/parallel/",
    "torch/cuda/",
    "heal/cluster/agreement.py",
    "heal/cluster/group_health.py",
    "zclip/mailbox.py",
)
"""Where a rank is that waits for others, or for its device."""


@dataclass(frozen=True, slots=True)
class Standing:
    """One rank, as its watchdog last told.

    Attributes:
        rank: of the process.
        step: of its last beat; -1 before the first.
        count: of its watchdog's looks at the clock: if it stands still, so does the process.
        at: the innermost line of its main thread; "" if it was never heard of.
        waits: whether that line waits for other ranks or for the device.
        stopped: whether the count stood still while others counted on.
    """

    rank: int
    step: int = -1
    count: int = -1
    at: str = ""
    waits: bool = False
    stopped: bool = False

    def __str__(self) -> str:
        if not self.at:
            return f"rank {self.rank}: never heard of"
        state = "does not run (stopped or dead)" if self.stopped else "runs"
        return f"rank {self.rank}: {state}, step {self.step}, at {self.at}"


class ProgressBoard:
    """One entry per rank in a shared store, and a bell.

    The store may live on the very rank that hangs: every question is asked with patience, and one
    that is not answered leaves the watchdog with what it knows of itself.

    Args:
        store: of torch.distributed; None if there is nobody to tell.
        rank: of this process.
        world_size: how many ranks there are.
        hosted: whether a launcher keeps the store; else rank 0 does.
    """

    def __init__(self, store: Any, rank: int, world_size: int, hosted: bool = False) -> None:
        self._store = store
        self._rank = rank
        self._size = world_size
        self._hosted = hosted
        self._own = Standing(rank)
        self._patience = Patience(STORE_SECONDS)

    def post(self, step: int, thread: int) -> str | None:
        """Write our entry; return what another rank called out, None if none did."""
        at, waits = where_is(thread)
        self._own = Standing(self._rank, step, self._own.count + 1, at, waits)
        return self._exchange()

    def count_on(self) -> None:
        """Show that we live, and leave the rest as it was when the alarm came."""
        self._own = replace(self._own, count=self._own.count + 1)
        self._exchange()

    def call(self, news: str) -> str:
        """Call out to all ranks; return whose call was first."""
        first: str = self._ask(
            lambda: bytes(self._store.compare_set(_key(CALL), "", news)).decode(), news
        )
        return first

    def read(self) -> list[Standing]:
        """Return the entries of all ranks; only ours where the store does not answer."""
        unknown = [Standing(rank) for rank in range(self._size)]
        standings: list[Standing] = self._ask(self._read_all, unknown)
        standings[self._rank] = self._own
        return standings

    def silent_host(self) -> int | None:
        """Return the rank that keeps the store, if the store does not answer; None if it does."""
        return 0 if self._patience.silent and not self._hosted else None

    def leave(self, others: Sequence[int]) -> None:
        """Wait until all ``others`` have read too, for what ends with us may be what they read."""
        keys = [_key(f"left/{rank}") for rank in others]
        until = time.monotonic() + STORE_SECONDS
        self._ask(lambda: self._store.set(_key(f"left/{self._rank}"), ""))
        while not self._ask(lambda: self._store.check(keys), True) and time.monotonic() < until:
            time.sleep(0.01)

    def close(self) -> None:
        """Ask nothing more, and let go of the thread that asked."""
        self._patience.close()

    def _ask(self, call: Callable[[], Any], otherwise: Any = None) -> Any:
        return otherwise if self._store is None else self._patience.ask(call, otherwise)

    def _exchange(self) -> str | None:
        own = self._own
        entry = {"step": own.step, "count": own.count, "at": own.at, "waits": own.waits}

        def exchange() -> str | None:
            self._store.set(_key(self._rank), json.dumps(entry))
            if self._store.check([_key(CALL)]):
                return bytes(self._store.get(_key(CALL))).decode()
            return None

        called: str | None = self._ask(exchange)
        return called

    def _read_all(self) -> list[Standing]:
        standings = []
        for rank in range(self._size):
            known = self._store.check([_key(rank)])
            entry = json.loads(self._store.get(_key(rank))) if known else {}
            standings.append(Standing(rank, **entry))
        return standings


def _key(name: int | str) -> str:
    return f"heal/watchdog/{name}"


def blame(
    earlier: Sequence[Standing], later: Sequence[Standing]
) -> tuple[tuple[Standing, ...], tuple[int, ...]]:
    """Return where each rank is, and which ranks the others wait for.

    In this order: ranks whose process stands still; ranks at an earlier step than the furthest;
    ranks whose main thread does not wait while that of another does. Ranks that all look alike are
    not blamed.
    """
    standings = [
        replace(after, stopped=after.count == before.count)
        for before, after in zip(earlier, later, strict=True)
    ]
    furthest = max(s.step for s in standings)
    for guilty in (
        [s.rank for s in standings if s.stopped],
        [s.rank for s in standings if s.step < furthest],
        [s.rank for s in standings if not s.waits],
    ):
        if 0 < len(guilty) < len(standings):
            return tuple(standings), tuple(guilty)
    return tuple(standings), ()


def where_is(thread: int) -> tuple[str, bool]:
    """Return the innermost line of a thread that is not torch's, and whether it waits."""
    stack: traceback.StackSummary | None = None
    for _ in range(LOOKS_AT_STACK):
        frame = sys._current_frames().get(thread)
        if frame is None:
            return "the end of the thread", False
        try:
            stack = traceback.extract_stack(frame)
            break
        except Exception:  # the thread runs on, and its frames may be others by the time
            continue
    if not stack:
        return "a place that cannot be read", False
    files = [entry.filename.replace("\\", "/") for entry in stack]
    waits = any(place in files[-1] for place in WAITING)
    ours = [e for e, f in zip(stack, files, strict=True) if "/torch/" not in f] or list(stack)
    return f"{ours[-1].filename}:{ours[-1].lineno} in {ours[-1].name}", waits
