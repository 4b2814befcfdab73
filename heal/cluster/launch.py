"""Joining the other ranks, at the first start and after every restart; groups beside theirs."""

import os
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary, ref

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from heal.checkpoint.manifest import from_bytes, to_bytes
from heal.cluster.slurm import get_slurm_info
from heal.former import names_of

TIMEOUT = timedelta(minutes=10)
SHORTEST_PAUSE, LONGEST_PAUSE = 0.005, 0.2  # seconds between two looks at the store
QUICK_PAUSES = 0.0002, 0.02  # the same where an answer is a matter of milliseconds


class RanksMissing(TimeoutError):
    """Ranks of this attempt did not appear in time; the message names them."""


class Lobby:
    """Where ranks that were started together agree on a name that no attempt had before.

    A restarted job meets the keys of the attempt before in the store of its launcher, and dials
    ranks that are dead. The launcher's count of restarts does not distinguish attempts: every node
    keeps its own, and a node that joins or leaves is not counted at all.

    Every rank says hello with a number that it drew; rank 0 offers the name to each such number,
    again if a rank is replaced, and says go when all have accepted. Hellos of the dead do no harm,
    because they never accept.
    """

    def __init__(self, store: Any, world_size: int, timeout: timedelta) -> None:
        self._store = store
        self._size = world_size
        self._seconds = timeout.total_seconds()
        self._own = self._name = uuid.uuid4().hex

    def agree(self, rank: int) -> str:
        """Return a new name, the same on every rank; raise RanksMissing if not all come in time."""
        until, pause = time.monotonic() + self._seconds, SHORTEST_PAUSE
        for waits_for in self._host() if rank == 0 else self._join(rank):
            if time.monotonic() > until:
                raise RanksMissing(
                    f"expected {self._size} ranks within {self._seconds:g} s, got fewer: "
                    f"{waits_for}; check the logs of the others, and that MASTER_ADDR and "
                    "MASTER_PORT are the same everywhere"
                )
            time.sleep(pause)
            pause = min(pause * 1.5, LONGEST_PAUSE)
        return self._name

    def _host(self) -> Iterator[str]:
        """As rank 0: offer a name until all others have taken it; yield what is missing."""
        offered: dict[int, str] = {}
        missing = set(range(1, self._size))
        while missing:
            for rank in sorted(missing):
                number = self._read(f"hello/{rank}")
                if number is None:
                    continue
                if offered.get(rank) != number:
                    self._write(f"offer/{number}", self._own)
                    offered[rank] = number
                if self._read(f"accept/{self._own}/{number}") is not None:
                    missing.discard(rank)
            if missing:
                yield f"rank {', '.join(map(str, sorted(missing)))} did not come"
        self._write(f"go/{self._own}", "go")

    def _join(self, rank: int) -> Iterator[str]:
        """As any other rank: take the newest offer until one is final; yield what is missing."""
        self._write(f"hello/{rank}", self._own)
        accepted = None
        while accepted is None or self._read(f"go/{accepted}") is None:
            offer = self._read(f"offer/{self._own}")
            if offer is not None and offer != accepted:
                self._write(f"accept/{offer}/{self._own}", str(rank))
                accepted = offer
            yield "rank 0 did not come" if accepted is None else "rank 0 still waits for others"
        self._name = accepted

    def _write(self, key: str, value: str) -> None:
        self._store.set(f"{self._size}/{key}", value)

    def _read(self, key: str) -> str | None:
        """Return a value, None if it is not there: ``get`` alone would wait for it."""
        key = f"{self._size}/{key}"
        if not self._store.check([key]):
            return None
        value: bytes = self._store.get(key)
        return value.decode()


@dataclass(frozen=True, slots=True)
class Attempt:
    """Where this process stands in the group that it joined.

    Attributes:
        rank: of this process, from 0.
        world_size: how many there are, in this attempt.
        local_rank: of this process on its node; the index of its GPU.
        restart: how often the launcher restarted this node's ranks, as far as it says.
        name: of the attempt: the same on every rank, and new for each.
        store: of torch.distributed, of this attempt alone.
    """

    rank: int
    world_size: int
    local_rank: int
    restart: int
    name: str
    store: Any


def init_process_group(
    backend: str | None = None,
    *,
    timeout: timedelta = TIMEOUT,
    join_timeout: timedelta | None = None,
    **options: Any,
) -> Attempt:
    """Make the default process group, reliably after a restart too, whatever its size by then.

    For ``torch.distributed.init_process_group()`` in a script that torchrun or srun starts. The
    store gets a prefix that is new for each attempt, so that no rank dials the dead.

    Args:
        backend: of the group; ``nccl`` where there are GPUs and ``gloo`` where not, if None.
        timeout: of its collectives.
        join_timeout: how long to wait for all ranks to come; ``timeout`` if None.
        options: for ``torch.distributed.init_process_group``.

    Raises:
        RuntimeError: neither torchrun nor SLURM says which rank this is.
        heal.cluster.launch.RanksMissing: ranks are missing; the message names them.

    Example:
        >>> attempt = init_process_group("gloo")
        >>> torch.manual_seed(attempt.rank)
    """
    join_timeout = join_timeout or timeout
    where = find_place(os.environ)
    if backend is None:
        backend = "nccl" if torch.cuda.is_available() else "gloo"
    if "nccl" in backend and torch.cuda.is_available():
        torch.cuda.set_device(where.local_rank)
    shared = TCPStore(
        where.master_addr,
        where.master_port,
        world_size=where.world_size,
        is_master=where.rank == 0 and not where.store_is_hosted,
        timeout=join_timeout,
        multi_tenant=True,
        wait_for_workers=False,
    )
    lobby = Lobby(PrefixStore("heal/lobby", shared), where.world_size, join_timeout)
    name = lobby.agree(where.rank)
    store = PrefixStore(f"heal/{name}", shared)
    dist.init_process_group(
        backend,
        store=store,
        rank=where.rank,
        world_size=where.world_size,
        timeout=timeout,
        **options,
    )
    if where.world_size > 1:
        # Now, when all are there: making a group with a rank that has died waits for ever. And no
        # rank goes on, or leaves with the store, before all are connected.
        dist.barrier(side_group())
    _joined.append(ref(dist.group.WORLD))
    del _joined[:-1]
    return Attempt(where.rank, where.world_size, where.local_rank, where.restart, name, store)


_joined: "list[ref[Any]]" = []  # the default group that was made here last


def cannot_come_back(environment: Mapping[str, str]) -> str:
    """Return why ranks that torchrun restarts may not find each other again; empty if they will."""
    restarts = environment.get("TORCHELASTIC_MAX_RESTARTS", "0")
    if not restarts.isdecimal() or int(restarts) == 0 or not dist.is_initialized():
        return ""
    if dist.get_world_size() == 1 or (_joined and _joined[0]() is dist.group.WORLD):
        return ""
    return (
        f"torchrun may restart this job {restarts} times, but its process group was made by "
        "torch.distributed: after a SIGKILL its ranks may dial the dead and never come back. Use "
        "heal.cluster.init_process_group instead"
    )


_made: "WeakValueDictionary[tuple[Any, ...], dist.ProcessGroup]" = WeakValueDictionary()
"""Weakly, so that ``destroy_process_group`` ends their threads: those must not outlive Python."""

_made_in: "list[ref[Any] | None]" = [None]  # the world that the groups above belong to


def has_peers(group: "dist.ProcessGroup | None" = None) -> bool:
    """Return whether there are other ranks."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1


class RankGroup:
    """All ranks of a process group, the default one if None; this process alone if there is none.

    Every rank has to call :meth:`gather`, in the same order. Ranks exchange JSON, not pickle.
    """

    def __init__(self, group: Any = None) -> None:
        self._group = group
        together = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank(group) if together else 0
        self.size = dist.get_world_size(group) if together else 1

    def gather(self, value: Any) -> list[Any]:
        """Return the plain value of every rank, by rank; tuples of other ranks are lists."""
        if self.size == 1:
            return [value]
        payload = to_bytes(value)
        is_gloo = "gloo" in str(dist.get_backend_config(self._group))
        device = "cpu" if is_gloo else torch.device("cuda", torch.cuda.current_device())
        length = torch.tensor([len(payload)], device=device)
        lengths = [torch.zeros_like(length) for _ in range(self.size)]
        dist.all_gather(lengths, length, group=self._group)
        sizes = [int(size) for size in lengths]
        padded = bytearray(payload.ljust(max(sizes), b"\0"))
        mine = torch.frombuffer(padded, dtype=torch.uint8).to(device)
        gathered = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(gathered, mine, group=self._group)
        found = zip(gathered, sizes, strict=True)
        return [from_bytes(bytes(t.tolist()[:size]), Path("ranks")) for t, size in found]


def side_group(group: "dist.ProcessGroup | None" = None) -> "dist.ProcessGroup":
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


def wait_for(is_so: Callable[[], bool], seconds: float) -> bool:
    """Return whether something becomes true in time; look often at first, then less often."""
    until, (pause, longest) = time.monotonic() + seconds, QUICK_PAUSES
    while not is_so():
        if time.monotonic() > until:
            return False
        time.sleep(pause)
        pause = min(2 * pause, longest)
    return True


def own_store() -> Any:
    """Return a new client of the default group's store, whose own is locked while one waits."""
    store: Any = dist.distributed_c10d._get_default_store()
    return store.clone()


@dataclass(frozen=True, slots=True)
class Place:
    """What the launcher's environment says about this process."""

    rank: int
    world_size: int
    local_rank: int
    restart: int
    master_addr: str
    master_port: int
    store_is_hosted: bool  # by the launcher; else rank 0 has to


def find_place(environment: Mapping[str, str]) -> Place:
    """Return what torchrun says, or else SLURM; raise RuntimeError if neither does."""
    slurm = get_slurm_info(environment)
    given = {"RANK": "", "WORLD_SIZE": "", "MASTER_ADDR": "", "MASTER_PORT": "", "LOCAL_RANK": "0"}
    if slurm is not None and "RANK" not in environment:
        given |= slurm.as_torchrun()
    given |= {name: environment[name] for name in given if environment.get(name)}
    missing = [name for name, value in given.items() if not value]
    if missing:
        raise RuntimeError(
            f"expected {', '.join(missing)} in the environment, got none; start with torchrun or "
            "srun, or set the variables by hand"
        )
    restart = environment.get("TORCHELASTIC_RESTART_COUNT") or (
        str(slurm.restart_count) if slurm is not None else "0"
    )
    return Place(
        rank=_number("RANK", given["RANK"]),
        world_size=_number("WORLD_SIZE", given["WORLD_SIZE"]),
        local_rank=_number("LOCAL_RANK", given["LOCAL_RANK"]),
        restart=_number("TORCHELASTIC_RESTART_COUNT", restart),
        master_addr=given["MASTER_ADDR"],
        master_port=_number("MASTER_PORT", given["MASTER_PORT"]),
        store_is_hosted=environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


def _number(name: str, text: str) -> int:
    if not text.isdecimal():
        raise RuntimeError(f"{name} in the environment: expected a whole number, got {text!r}")
    return int(text)


__getattr__ = names_of(__name__, {}, {"NobodyCame": "RanksMissing"})
