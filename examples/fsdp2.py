"""Heal under FSDP2: ``torchrun --nproc-per-node 2 examples/fsdp2.py``.

Every rank holds a shard of each weight. The norm covers the whole model, and a NaN in one shard
skips the step on all ranks. That costs one all-reduce of one small vector per step. Snapshots hold
the shards. On GPUs: ``init_device_mesh("cuda", ...)``.
"""

import gc
import math

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from heal import Healer, HealingConfig


def train():
    """Train on all ranks, with one NaN batch on rank 1."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    inputs = torch.randn(512, 16)
    targets = inputs[:, :1].sin() + inputs[:, 1:2].cos()
    dataset = TensorDataset(inputs, targets)
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=16, sampler=sampler)

    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 1))
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)  # after sharding
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

    with torch.no_grad():
        final_loss = float(nn.functional.mse_loss(model(inputs), targets))
    if dist.get_rank() == 0:
        for step, diagnosis, _ in healer.history:
            print(f"step {step}: {diagnosis.summary}")
        print(f"loss after {healer.last_step + 1} steps: {final_loss:.4f}")


if __name__ == "__main__":
    train()
    gc.collect()  # a model that lives on keeps its group, and gloo's threads then outlive Python
    dist.destroy_process_group()
