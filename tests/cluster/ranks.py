"""What the ranks of small worlds do in the tests of health: each function is one rank's part."""

import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard, init_device_mesh

from heal import checkpoint
from heal.checkpoint import saving
from heal.cluster import (
    HangWatchdog,
    ReplicaCheck,
    StragglerWatch,
    check_nccl_health,
    init_process_group,
)
from heal.cluster import launch as side_groups
from heal.exit_codes import ExitCode


def join():
    torch.set_num_threads(1)
    return init_process_group("gloo")


def tell(folder, rank, value):
    Path(folder, f"told{rank}").write_text(json.dumps(value))


def watched_training(folder, timeout, pause):
    """Train for ever under a watchdog; a rank that finds a file ``sleep<rank>`` dozes off."""
    attempt = join()
    value = torch.ones(1)
    with HangWatchdog.for_group(timeout, run_dir=folder, exit_code=ExitCode.HUNG) as watchdog:
        for step in range(10_000_000):
            watchdog.beat(step)
            Path(folder, f"step{attempt.rank}").write_text(str(step))
            if Path(folder, f"sleep{attempt.rank}").exists():
                doze_off()
            dist.all_reduce(value)
            value.fill_(1)
            time.sleep(pause)


def doze_off():
    time.sleep(1000)


def join_and_look(folder):
    """Tell how many side groups there are before anybody has asked for one."""
    tell(folder, join().rank, len(side_groups._made))


def die_while_saving(folder, victim, where):
    """The victim is gone in the middle of its second save, as after SIGKILL."""
    rank = join().rank
    model = torch.nn.Linear(3, 2)
    checkpoint.save(folder, 1, model)
    if rank == victim:
        setattr(saving.Job, where, lambda job: os._exit(9))
    checkpoint.save(folder, 2, model)


def ping(folder, absent, timeout):
    """Ping twice; the second time ``absent`` does not come."""
    rank = join().rank
    first = check_nccl_health(timeout)
    time.sleep(0.1)
    told = [first.ok, first.missing]
    if rank != absent:
        for _ in range(2):
            later = check_nccl_health(timeout)
            told += [later.ok, later.missing, later.reason]
    tell(folder, rank, told)
    dist.distributed_c10d._get_default_store().set(f"over/{rank}", "")
    others = [r for r in range(dist.get_world_size()) if r != absent]
    dist.distributed_c10d._get_default_store().wait([f"over/{r}" for r in others])
    if rank == 0:
        time.sleep(2)  # it hosts the store, from which the others may not have heard yet
    os._exit(0)  # its group is broken, and would be waited for


def flip_bit(tensor, at, bit):
    """Flip one bit of an element; 4-byte ones only."""
    bits = tensor.detach().view(-1).view(torch.int32)
    bits[at] ^= 1 << bit


def replicas(folder, victim):
    """Flip one bit on one rank, and tell what every check found."""
    rank = join().rank
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(40, 30), torch.nn.Linear(30, 2))
    check = ReplicaCheck(model.named_parameters(), lag=2)
    told = []
    for step in range(9):
        if step == 3 and rank == victim:
            flip_bit(model[1].weight, 17, 3)
        if step == 6 and rank == victim:
            flip_bit(model[1].weight, 17, 3)  # healed
        if step % 2 == 0:
            check.post(step)
        told += [[step, m.step, m.name, list(m.odd_ranks), str(m)] for m in check.read()]
    tell(folder, rank, told)
    dist.destroy_process_group()


def sharded_replicas(folder, victim):
    """HSDP on a mesh of 2 x 2: every shard has one copy; plain tensors have three."""
    rank = join().rank
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0)
    whole = torch.randn(8, 4)
    shard = whole[4 * (rank % 2) : 4 * (rank % 2) + 4].clone()
    sharded = DTensor.from_local(shard, mesh, [Replicate(), Shard(0)])
    only_sharded = DTensor.from_local(torch.full((2,), float(rank)), mesh, [Shard(0), Shard(0)])
    plain = torch.ones(3)
    named = [("sharded", sharded), ("different", only_sharded), ("plain", plain)]
    check = ReplicaCheck(named, lag=0)
    check.post(0)
    told = [str(m) for m in check.read()]
    if rank == victim:
        flip_bit(shard, 0, 0)
        flip_bit(plain, 2, 22)
    check.post(1)
    told += [[m.name, [r for r, _ in m.hashes], list(m.odd_ranks)] for m in check.read()]
    tell(folder, rank, told)
    dist.destroy_process_group()


def slow_rank(folder, victim):
    """One rank works three times as long as the others for a while."""
    rank = join().rank
    stragglers = StragglerWatch(every=5, factor=2.0, patience=2)
    told = []
    value = torch.ones(1)
    for step in range(40):
        slow = rank == victim and step < 30
        with stragglers.working():
            time.sleep(0.2 if slow else 0.02)
        dist.all_reduce(value)
        told += [[step, found.rank, found.windows] for found in stragglers.note()]
    tell(folder, rank, told)
    dist.destroy_process_group()
