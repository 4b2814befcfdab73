"""Heal a loop of your own: ``python examples/plain_pytorch.py``.

One batch is NaN: it costs one step. Later a weight becomes NaN: the run rolls back to a snapshot.
The script prints what was done and the final loss.
"""

import math

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from heal import Healer, HealingConfig

torch.manual_seed(0)
inputs = torch.randn(512, 16)
targets = inputs[:, :1].sin() + inputs[:, 1:2].cos()
loader = DataLoader(TensorDataset(inputs, targets), batch_size=32, shuffle=True)

model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)  # fused: no sync
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=160)
config = HealingConfig(snapshot_interval=20, check_interval=20, quarantine_steps=5)  # a short run
healer = Healer(model, optimizer, schedule, config)

drawn = 0
for _ in range(10):
    for x, y in healer.batches(loader):
        drawn += 1
        if drawn == 50:
            y = y * math.nan  # a bad batch
        if drawn == 100:
            model[2].weight.data[0, 0] = math.nan  # a bad model
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        healer.step(loss)  # clips, steps unless skipped, steps the schedule, polls records
        optimizer.zero_grad()

healer.close()
for step, diagnosis, plan in healer.history:
    print(f"step {step}: {diagnosis.summary} Done: {[type(action).__name__ for action in plan]}")
with torch.no_grad():
    final_loss = float(nn.functional.mse_loss(model(inputs), targets))
print(f"loss after {healer.last_step + 1} steps that count, {drawn} batches: {final_loss:.4f}")
