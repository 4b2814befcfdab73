"""The trainings: three real networks with an optimizer each, of the table of failures but longer.

The corpus of the forecast has dense, convolutional and attending networks too; these are ten to a
hundred times larger, see real data, and no limit and no weight of the forecast was set on them.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.failures.families import FAMILIES as NETWORKS
from benchmarks.failures.families import Training

STEPS = 280
WARMUP_STEPS = 20
LAST_SHARE = 0.1  # of the learning rate, at the end
BATCH = 32
PROBED = 32  # samples that probes look at, the same all the time
SMOOTHING = 0.1  # of labels: no loss falls so low that doubling means nothing

FAMILIES: dict[str, Callable[[Any], Optimizer]] = {
    "MLP": lambda params: SGD(params, lr=0.4, fused=True),
    "CNN": lambda params: SGD(params, lr=0.01, momentum=0.9, fused=True),
    "ViT": lambda params: AdamW(params, lr=2e-3, fused=True),
}
"""By name, with the optimizer of each: sharpness has a limit of theory for the first two."""


def schedule(step: int) -> float:
    """Warm up, then a cosine."""
    warm = min(1.0, (step + 1) / WARMUP_STEPS)
    fall = 0.5 * (1.0 + math.cos(math.pi * min(step / STEPS, 1.0)))
    return warm * (LAST_SHARE + (1.0 - LAST_SHARE) * fall)


def make(family: str, seed: int) -> tuple[Training, tuple[Tensor, Tensor]]:
    """Build a training and the batch that probes look at; all follows from the seed."""
    torch.manual_seed(seed)
    build, load = NETWORKS[family]
    (inputs, targets), held_out = load()
    model = build()
    optimizer = FAMILIES[family](model.parameters())
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)
    data = TensorDataset(inputs, targets)
    loader = DataLoader(data, batch_size=BATCH, shuffle=True, drop_last=True)

    def train_step(batch: Any) -> Tensor:
        logits, target = model(batch[0]).flatten(0, -2), batch[1].flatten()
        return nn.functional.cross_entropy(logits, target, label_smoothing=SMOOTHING)

    @torch.no_grad()
    def evaluate() -> float:
        model.eval()
        loss = float(train_step(held_out))
        model.train()
        return loss

    chosen = slice(0, None, len(inputs) // PROBED)
    probed = inputs[chosen][:PROBED], targets[chosen][:PROBED]
    return Training(model, optimizer, scheduler, loader, train_step, evaluate), probed
