"""What a rank with a healer does in ``test_healer.py``."""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from heal import Healer, HealingConfig
from heal.actions import HealingError
from tests.cluster.ranks import flip_bit, join, tell
from tests.cluster.trainer import digest

CONFIG = {
    "snapshot_interval": 5,
    "quarantine_steps": 2,
    "check_interval": 0,
    "nccl_health_check_interval": 5,
    "after_rollback": "replay_data",
}


def build(folder, rank, is_replicated=True, **changes):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    model = DistributedDataParallel(model) if is_replicated else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    config = HealingConfig(**{**CONFIG, **changes})
    return Healer(model, optimizer, config=config, run_dir=folder, rank=rank)


def batches(rank, count=10):
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(8, 4, generator=generator) for _ in range(count)]


def told_to_stop(folder):
    """Train for ever, until all ranks raise after the same step; exit as the halt says."""
    rank = join().rank
    healer = build(folder, rank)

    def on_step(step):
        Path(folder, f"step{rank}").write_text(str(step))
        time.sleep(0.005)

    try:
        healer.run(
            lambda batch: healer.model(batch).square().mean(),
            batches(rank),
            10_000_000,
            progress=False,
            on_step=on_step,
        )
    except HealingError as halt:
        tell(folder, rank, [healer.last_step, digest(healer.model.state_dict().values())])
        sys.exit(halt.exit_code)


def silent_flip(folder, victim, at):
    """Train with a bit of one replica flipped before step ``at``; -1: never."""
    rank = join().rank
    healer = build(folder, rank)
    flipped = []

    def train_step(batch):
        if healer.last_step + 1 == at and rank == victim and not flipped:
            flip_bit(healer.model.module.weight, 2, 18)
            flipped.append(at)
        return healer.model(batch).square().mean()

    healer.run(train_step, batches(rank), 30, progress=False)
    causes = [d.cause.value for _, d, _ in healer.history]
    plans = [[type(action).__name__ for action in plan] for _, _, plan in healer.history]
    weights = digest(healer.model.state_dict().values())
    tell(folder, rank, {"causes": causes, "plans": plans, "digest": weights})
    dist.destroy_process_group()


def spoilt_statistics(folder, victim, at):
    """Train with the running statistics of one rank spoilt once, before step ``at``."""
    rank = join().rank
    torch.manual_seed(0)
    layers = (torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1))
    # Else each forward copies the statistics of rank 0 to all, which heals them, or spoils all.
    model = DistributedDataParallel(torch.nn.Sequential(*layers), broadcast_buffers=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    healer = Healer(model, optimizer, config=CONFIG, run_dir=folder, rank=rank)
    spoilt = []

    def on_step(step):
        if step == at - 1 and rank == victim and not spoilt:
            spoilt.append(step)
            layers[1].running_mean.add_(50.0)

    def train_step(batch):
        return (healer.model(batch) - batch.sum(1, keepdim=True)).square().mean()

    healer.run(train_step, batches(rank), 60, progress=False, on_step=on_step)
    causes = [d.cause.value for _, d, _ in healer.history]
    plans = [[type(action).__name__ for action in plan] for _, _, plan in healer.history]
    told = {"causes": causes, "plans": plans, "weights": digest(healer.model.parameters())}
    tell(folder, rank, {**told, "largest": float(layers[1].running_mean.max())})
    dist.destroy_process_group()


def differing_from_the_start(folder):
    """Replicas that were never the same, as in local SGD: not to be healed."""
    rank = join().rank
    healer = build(folder, rank)
    with torch.no_grad():
        healer.model.module.bias.add_(rank)
    healer.run(lambda b: healer.model(b).square().mean(), batches(rank), 20, progress=False)
    tell(folder, rank, {"notes": healer.notes, "history": len(healer.history)})
    dist.destroy_process_group()


def absent_at_the_ping(folder, absent, interval, steps, is_replicated):
    """One rank does not come to pings from step 11 on; ``steps`` is when the first is read."""
    rank = join().rank
    healer = build(folder, rank, is_replicated, nccl_health_check_interval=interval)
    watch = healer.monitor.cluster
    look = watch.look
    if rank == absent:
        watch.look = lambda step: look(step) if step < 11 else []
    try:
        healer.run(lambda b: healer.model(b).square().mean(), batches(rank), steps, progress=False)
        tell(folder, rank, None)
    except HealingError as halt:
        tell(folder, rank, [halt.exit_code, str(halt)])
    others = [Path(folder, f"told{r}") for r in range(dist.get_world_size())]
    until = time.monotonic() + 120
    while not all(path.exists() for path in others) and time.monotonic() < until:
        time.sleep(0.05)  # they are to hear it from their ping, not from our leaving


def joined(folder, how):
    """Tell what a healer notes where torchrun may restart the ranks."""
    os.environ["TORCHELASTIC_MAX_RESTARTS"] = "3"
    rank = int(os.environ["RANK"])
    if how == "torch":
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
    else:
        join()
    healer = build(folder, rank)
    healer.exits.dismiss()
    tell(folder, rank, healer.notes)
    dist.barrier()
    dist.destroy_process_group()
