"""The smallest run that can be healed, for tests of when records are polled."""

import torch
from torch import nn

from heal import Healer, HealingConfig

LAG = 2


class Counter:
    """A detector that counts the records it has observed."""

    def __init__(self):
        self.seen = 0

    def observe(self, record):
        self.seen += 1

    def state(self):
        return {"seen": self.seen}

    def load_state(self, state):
        self.seen = state["seen"]


def build(checkpoint_dir=None, **settings):
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    config = HealingConfig(**settings)
    healer = Healer(model, optimizer, config=config, checkpoint_dir=checkpoint_dir)
    healer.exits.dismiss()
    healer.monitor.watch.detectors["counter"] = Counter()
    return model, optimizer, healer


def step_of(model, healer, times=1):
    for _ in range(times):
        loss = model(torch.ones(2, 4)).square().mean()
        loss.backward()
        healer.step(loss)
        model.zero_grad()


def nan_step(model, healer):
    """Take a step whose loss and gradients are NaN."""
    (model(torch.ones(2, 4)).square().mean() * float("nan")).backward()
    healer.step(torch.tensor(float("nan")))
    model.zero_grad()


def observed(healer):
    """Return how many records the detectors have observed."""
    return healer.monitor.watch.detectors["counter"].seen
