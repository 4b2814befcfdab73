"""NaN and Inf in the buffers that forward writes: found by checks, in no good snapshot, healed."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from heal import Healer, HealingConfig

QUICK = {"snapshot_interval": 10, "check_interval": 10, "quarantine_steps": 4}


class Averager(nn.Module):
    """Keeps a moving average of its inputs in a buffer of its own."""

    def __init__(self, start):
        super().__init__()
        self.register_buffer("average", torch.full((8,), start))
        self.linear = nn.Linear(8, 1)

    def forward(self, x):
        self.average.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return self.linear(x.clamp(-5, 5).nan_to_num())


def normed():
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1))


def train(model, spoil=None, epochs=1, **settings):
    """Train on batches one of which is spoiled; return the healer and the losses."""
    torch.manual_seed(0)
    inputs = torch.randn(1000, 8)
    targets = inputs[:, :1].sin()
    if spoil is not None:
        inputs[600] = spoil
    loader = DataLoader(TensorDataset(inputs, targets), batch_size=10)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    healer = Healer(model, optimizer, config=HealingConfig(**{**QUICK, **settings}))
    losses = []
    for _ in range(epochs):
        for x, y in healer.batches(loader):
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            healer.step(loss)
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
    return healer, losses


def blamed(healer):
    return [entry["evidence"].get("tensor") for entry in healer.recoveries]


@pytest.mark.parametrize("data", ["skip", "replay"])
def test_statistics_that_overflow_under_a_finite_loss_are_healed(data):
    torch.manual_seed(0)
    model = normed()
    healer, losses = train(model, spoil=1e25, data=data)
    assert torch.tensor(losses).isfinite().all()
    assert model[1].running_var.isfinite().all()
    assert "buffer 1.running_var" in blamed(healer)
    assert healer.snapshots()


def test_nan_in_a_moving_average_of_ones_own_is_healed():
    torch.manual_seed(0)
    model = Averager(0.0)
    healer, _ = train(model, spoil=float("nan"))
    assert model.average.isfinite().all()
    assert "buffer average" in blamed(healer)


def test_no_snapshot_with_nan_in_a_buffer_is_good():
    torch.manual_seed(0)
    model = Averager(0.0)
    healer, _ = train(model, check_interval=0)
    model.average.fill_(float("nan"))
    for _ in range(30):
        loss = model(torch.ones(10, 8)).square().mean()
        loss.backward()
        healer.step(loss)
    assert healer.snapshots()[0] == 100  # that of 110 and 120 hold NaN


def test_a_buffer_that_held_nan_before_training_may_go_on_to():
    torch.manual_seed(0)
    healer, _ = train(Averager(float("nan")))
    assert blamed(healer) == []
    assert healer.snapshots()


def test_a_mask_of_inf_that_forward_writes_is_no_fault():
    class Masked(Averager):
        def forward(self, x):
            self.average.copy_(torch.full((8,), -torch.inf))
            return self.linear(x)

    torch.manual_seed(0)
    healer, _ = train(Masked(0.0))
    assert blamed(healer) == []
    assert healer.snapshots()
