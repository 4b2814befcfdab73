"""Which attempt is this? Ranks started together find each other in a store that is not new.

A restarted job meets the keys of the attempt before in the store of its launcher, and dials ranks
that are dead. The launcher's count of restarts does not tell attempts apart: every node keeps its
own, and a node that joins or leaves is not counted at all. So the ranks agree on a name that no
attempt had before.
"""

import time
import uuid
from datetime import timedelta
from typing import Any

SHORTEST_PAUSE, LONGEST_PAUSE = 0.005, 0.2  # seconds between two looks at the store


class NobodyCame(TimeoutError):
    """Ranks of this attempt did not appear in time; the message names them."""


def agree_on_attempt(store: Any, rank: int, world_size: int, timeout: timedelta) -> str:
    """Return a name for this attempt, the same on every rank, and new.

    Every rank says hello with a number that it drew; rank 0 offers the name to each such number,
    again if a rank is replaced, and says go when all have accepted. Hellos of the dead do no harm,
    for they never accept.

    Args:
        store: of torch.distributed, shared by all ranks; may hold the keys of earlier attempts.
        rank: of this process.
        world_size: how many have to come.
        timeout: how long to wait for them.

    Raises:
        NobodyCame: not all came in time.
    """
    lobby = _Lobby(store, world_size, timeout)
    return lobby.host() if rank == 0 else lobby.join(rank)


class _Lobby:
    def __init__(self, store: Any, world_size: int, timeout: timedelta) -> None:
        self._store = store
        self._size = world_size
        self._seconds = timeout.total_seconds()
        self._until = time.monotonic() + self._seconds
        self._own = uuid.uuid4().hex

    def host(self) -> str:
        """As rank 0: offer a name until all others have taken it."""
        offered: dict[int, str] = {}
        missing = set(range(1, self._size))
        pause = SHORTEST_PAUSE
        while missing:
            for rank in sorted(missing):
                number = self._read(f"hello/{rank}")
                if number is None:
                    continue
                if offered.get(rank) != number:
                    self._write(f"offer/{number}", self._own)
                    offered[rank] = number
                    pause = SHORTEST_PAUSE
                if self._read(f"accept/{self._own}/{number}") is not None:
                    missing.discard(rank)
            if missing:
                absent = ", ".join(map(str, sorted(missing)))
                pause = self._pause(pause, f"rank {absent} did not come")
        self._write(f"go/{self._own}", "go")
        return self._own

    def join(self, rank: int) -> str:
        """As any other rank: take the newest offer until one is final."""
        self._write(f"hello/{rank}", self._own)
        accepted = None
        pause = SHORTEST_PAUSE
        while True:
            offer = self._read(f"offer/{self._own}")
            if offer is not None and offer != accepted:
                self._write(f"accept/{offer}/{self._own}", str(rank))
                accepted = offer
                pause = SHORTEST_PAUSE
            if accepted is not None and self._read(f"go/{accepted}") is not None:
                return accepted
            whom = "rank 0 did not come" if accepted is None else "rank 0 still waits for others"
            pause = self._pause(pause, whom)

    def _pause(self, seconds: float, why: str) -> float:
        if time.monotonic() > self._until:
            raise NobodyCame(
                f"{why} within {self._seconds:g} s, of {self._size} ranks wanted; see the logs of "
                "the others, and whether MASTER_ADDR and MASTER_PORT are the same everywhere"
            )
        time.sleep(seconds)
        return min(seconds * 1.5, LONGEST_PAUSE)

    def _write(self, key: str, value: str) -> None:
        self._store.set(f"{self._size}/{key}", value)

    def _read(self, key: str) -> str | None:
        """Return a value, None if it is not there: ``get`` alone would wait for it."""
        key = f"{self._size}/{key}"
        if not self._store.check([key]):
            return None
        value: bytes = self._store.get(key)
        return value.decode()
