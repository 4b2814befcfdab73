"""Heal an accelerate loop: ``python examples/accelerate_loop.py``, or ``accelerate launch``.

accelerate prepares the model and the loader; the healer gets the optimizer unprepared. The healer
clips, so there is no ``accelerator.clip_grad_norm_``.
"""

import math

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from heal import Healer, HealingConfig

ACCUMULATE = 2

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATE)
torch.manual_seed(0)
inputs = torch.randn(512, 16)
targets = inputs[:, :1].sin() + inputs[:, 1:2].cos()
model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 1))
loader = DataLoader(TensorDataset(inputs, targets), batch_size=16, shuffle=True)
model, loader = accelerator.prepare(model, loader)

optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)  # of the prepared model
config = HealingConfig(snapshot_interval=20, check_interval=20, quarantine_steps=5)  # a short run
healer = Healer(model, optimizer, config=config)

drawn = 0
for _ in range(8):
    mean_loss = torch.zeros((), device=accelerator.device)
    for x, y in healer.batches(loader):
        drawn += 1
        if drawn == 60:
            y = y * math.nan  # a bad batch
        with accelerator.accumulate(model):
            loss = nn.functional.mse_loss(model(x), y)
            accelerator.backward(loss)
            mean_loss += loss.detach() / ACCUMULATE
            if accelerator.sync_gradients:
                healer.step(mean_loss)
                optimizer.zero_grad()
                mean_loss = torch.zeros_like(mean_loss)

healer.close()
if accelerator.is_main_process:
    for step, diagnosis, plan in healer.history:
        done = [type(action).__name__ for action in plan]
        print(f"step {step}: {diagnosis.summary} Done: {done}")
with torch.no_grad():
    final_loss = float(nn.functional.mse_loss(model(inputs), targets))
accelerator.print(f"loss after {healer.last_step + 1} steps: {final_loss:.4f}")
