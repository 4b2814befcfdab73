"""Heal under DDP: ``torchrun --nproc-per-node 2 examples/ddp.py``.

One rank gets a NaN batch. Gradients are shared, so all ranks skip the step, and the
replicas stay the same to the last bit. On GPUs: "nccl" for "gloo", and a device for each rank.
"""

import gc
import math

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from heal import Healer, HealingConfig


def train():
    """Train on all ranks, with one NaN batch on rank 1."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    inputs = torch.randn(512, 16)
    targets = inputs[:, :1].sin() + inputs[:, 1:2].cos()
    dataset = TensorDataset(inputs, targets)
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=16, sampler=sampler)

    model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
    # A short run: snapshots and checks more often than by default.
    config = HealingConfig(snapshot_interval=20, check_interval=20, quarantine_steps=5)
    healer = Healer(model, optimizer, config=config)

    for epoch in range(8):
        sampler.set_epoch(epoch)
        for number, (x, y) in enumerate(healer.batches(loader)):
            if epoch == 3 and number == 2 and dist.get_rank() == 1:
                y = y * math.nan
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            healer.step(loss)
            optimizer.zero_grad()
    healer.close()

    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    theirs = weights.clone()
    dist.broadcast(theirs, src=0)
    if dist.get_rank() == 0:
        for step, diagnosis, _ in healer.history:
            print(f"step {step}: {diagnosis.summary}")
        with torch.no_grad():
            final_loss = float(nn.functional.mse_loss(model.module(inputs), targets))
        print(f"loss after {healer.last_step + 1} steps: {final_loss:.4f}")
    same = torch.tensor([torch.equal(weights, theirs)], dtype=torch.int32)
    dist.all_reduce(same, op=dist.ReduceOp.MIN)
    if dist.get_rank() == 0:
        print(f"replicas are the same: {bool(same)}")


if __name__ == "__main__":
    train()
    gc.collect()  # a model that lives on keeps its group, and gloo's threads then outlive Python
    dist.destroy_process_group()
