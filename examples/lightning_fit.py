"""Heal under Lightning: ``python examples/lightning_fit.py``.

One batch is NaN, and later a weight is.
"""

import math

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from heal import HealingConfig, SelfHealingLightningCallback


class Regression(pl.LightningModule):
    """Makes its 50th batch NaN, and a weight before its 100th batch."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 1))
        self.drawn = 0

    def training_step(self, batch, batch_idx):
        """Return the loss."""
        self.drawn += 1
        x, y = batch
        if self.drawn == 50:
            y = y * math.nan
        if self.drawn == 100:
            self.net[2].weight.data[0, 0] = math.nan
        return nn.functional.mse_loss(self.net(x), y)

    def configure_optimizers(self):
        """Return the optimizer; fused, so that no step synchronises."""
        return torch.optim.AdamW(self.parameters(), lr=3e-3, fused=True)


torch.manual_seed(0)
inputs = torch.randn(512, 16)
targets = inputs[:, :1].sin() + inputs[:, 1:2].cos()
loader = DataLoader(TensorDataset(inputs, targets), batch_size=32, shuffle=True)
config = HealingConfig(snapshot_interval=20, check_interval=20, quarantine_steps=5)  # a short run
callback = SelfHealingLightningCallback(config)
trainer = pl.Trainer(
    max_steps=150,
    accelerator="cpu",
    callbacks=[callback],
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
module = Regression()
trainer.fit(module, loader)

for step, diagnosis, plan in callback.healer.history:
    print(f"step {step}: {diagnosis.summary} Done: {[type(action).__name__ for action in plan]}")
with torch.no_grad():
    final_loss = float(nn.functional.mse_loss(module.net(inputs), targets))
print(f"loss after {trainer.global_step} steps, {module.drawn} batches: {final_loss:.4f}")
