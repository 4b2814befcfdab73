"""Joining the other ranks, at the first start and after every restart."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from heal.cluster.attempt import agree_on_attempt
from heal.cluster.side_group import side_group
from heal.cluster.slurm import get_slurm_info

TIMEOUT = timedelta(minutes=10)
LOBBY = "heal/lobby"


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
        heal.cluster.attempt.NobodyCame: ranks are missing; the message names them.

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
    shared = _shared_store(where, join_timeout)
    lobby = PrefixStore(LOBBY, shared)
    name = agree_on_attempt(lobby, where.rank, where.world_size, join_timeout)
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
        # Now, when all are there: whoever makes a group with a rank that has died waits for ever.
        # And nobody goes on, or leaves with the store, before all are connected.
        dist.barrier(side_group())
    _joined.append(ref(dist.group.WORLD))
    del _joined[:-1]
    return Attempt(where.rank, where.world_size, where.local_rank, where.restart, name, store)


_joined: "list[ref[Any]]" = []  # the default group that was made here last


def cannot_come_back(environment: Mapping[str, str]) -> str:
    """Return why ranks that torchrun restarts may not find each other again; empty if they will.

    Args:
        environment: of this process.
    """
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


@dataclass(frozen=True, slots=True)
class Place:
    """What the launcher says about this process."""

    rank: int
    world_size: int
    local_rank: int
    restart: int
    master_addr: str
    master_port: int
    store_is_hosted: bool  # by the launcher; else rank 0 has to


def find_place(environment: Mapping[str, str]) -> Place:
    """Return what torchrun says, or else SLURM.

    Raises:
        RuntimeError: neither says it, or a variable is not a number.
    """
    slurm = get_slurm_info(environment)
    told = {"RANK": "", "WORLD_SIZE": "", "MASTER_ADDR": "", "MASTER_PORT": "", "LOCAL_RANK": "0"}
    if slurm is not None and "RANK" not in environment:
        told |= slurm.as_torchrun()
    told |= {name: environment[name] for name in told if environment.get(name)}
    missing = [name for name, value in told.items() if not value]
    if missing:
        raise RuntimeError(
            f"{', '.join(missing)} not in the environment; wanted a start by torchrun or by srun, "
            "or the variables set by hand"
        )
    restart = environment.get("TORCHELASTIC_RESTART_COUNT") or (
        str(slurm.restart_count) if slurm is not None else "0"
    )
    return Place(
        rank=_number("RANK", told["RANK"]),
        world_size=_number("WORLD_SIZE", told["WORLD_SIZE"]),
        local_rank=_number("LOCAL_RANK", told["LOCAL_RANK"]),
        restart=_number("TORCHELASTIC_RESTART_COUNT", restart),
        master_addr=told["MASTER_ADDR"],
        master_port=_number("MASTER_PORT", told["MASTER_PORT"]),
        store_is_hosted=environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


def _number(name: str, text: str) -> int:
    if not text.isdecimal():
        raise RuntimeError(f"{name} is {text!r} in the environment; wanted a whole number")
    return int(text)


def _shared_store(where: Place, timeout: timedelta) -> Any:
    return TCPStore(
        where.master_addr,
        where.master_port,
        world_size=where.world_size,
        is_master=where.rank == 0 and not where.store_is_hosted,
        timeout=timeout,
        multi_tenant=True,
        wait_for_workers=False,
    )
