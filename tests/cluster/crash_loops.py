"""What a rank does in ``test_crash_loops.py``: it meets the same trouble in every start."""

import json
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from heal import Healer, HealingConfig
from heal.actions import HealingError
from tests.cluster.ranks import join

STEPS = 24
BAD_BATCH = 13
FITS = 4  # samples, where memory is short
MARK = 77.0


class InBackward(torch.autograd.Function):
    """Raises while gradients are sent."""

    @staticmethod
    def forward(ctx, x, error):
        ctx.error = error
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ctx.error


class Fragile(nn.Module):
    """Raises on a batch that is marked, on a rank that it does not agree with."""

    def __init__(self, where, what):
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 1)
        self.where, self.what = where, what

    def forward(self, x):
        h = self.first(x).relu()
        error = self.error(x)
        if error is not None and self.where == "forward":
            raise error
        out = self.last(h)
        is_late = error is not None and self.where == "backward"
        return InBackward.apply(out, error) if is_late else out

    def error(self, x):
        if dist.get_rank() != 1 or not bool((x == MARK).any()):
            return None
        if self.what == "bug":
            return ValueError("the program is wrong")
        if self.what == "data":
            return IndexError("index 9 is out of range")
        return torch.OutOfMemoryError("CUDA out of memory.") if len(x) > FITS else None


def batches(rank):
    generator = torch.Generator().manual_seed(rank)
    made = [torch.randn(8, 4, generator=generator) for _ in range(STEPS * 2)]
    made[BAD_BATCH][:, 0] = MARK  # every piece of it has the mark
    return made


def train_step(model, fragile):
    def mean_loss(batch):
        error = fragile.error(batch)
        if error is not None and fragile.where == "before":
            raise error
        return model(batch).square().mean()

    return mean_loss


def main(folder, wrap, where, what):
    rank = join().rank
    torch.manual_seed(0)
    model = Fragile(where, what)
    fragile = model
    if wrap == "ddp":
        model = DistributedDataParallel(model)
    elif wrap == "tp":
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        plan = {"first": ColwiseParallel(), "last": RowwiseParallel()}
        model = parallelize_module(model, mesh, plan)
    else:
        fully_shard(model.first)
        model = fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    settings = {"checkpoint_interval": 5, "checkpoint_async": False, "snapshot_interval": 5}
    config = HealingConfig(**settings, check_interval=0, nccl_health_check_interval=0)
    healer = Healer(
        model,
        optimizer,
        config=config,
        rank=rank,
        run_dir=f"{folder}/run",
        checkpoint_dir=f"{folder}/checkpoints",
    )
    began = healer.resume()
    told = {"began": began, "pieces": healer.micro_batches}
    code = 0
    try:
        healer.run(
            train_step(model, fragile), batches(rank if wrap != "tp" else 0), STEPS, progress=False
        )
    except HealingError as halt:
        code = halt.exit_code
        told |= {"code": code, "halt": str(halt)}
    told |= {"step": healer.last_step, "skipped": healer.stream.skipped}
    told["notes"] = list(healer.notes)
    Path(folder, f"told{rank}").write_text(json.dumps(told))
    if code == 0:
        dist.destroy_process_group()
    raise SystemExit(code)
