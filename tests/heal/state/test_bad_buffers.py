"""NaN and Inf in the buffers that forward writes: skipped, found by checks, in no good snapshot."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import zclip
from heal import Healer, HealingConfig
from heal.buffers import BufferCopies
from heal.causes import Cause
from heal.detectors.weights import StateHealth
from heal.ranks import Ranks
from heal.snapshots import SnapshotRing
from heal.state_checks import HealthCheck
from heal.training_state import TrainingState

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


def done(healer):
    return [(entry["failure"], entry["actions"]) for entry in healer.recoveries]


@pytest.mark.parametrize("data", ["skip_data", "replay_data"])
def test_a_batch_that_overflows_statistics_under_a_finite_loss_costs_one_step(data):
    torch.manual_seed(0)
    model = normed()
    healer, losses = train(model, spoil=1e25, epochs=2, after_rollback=data)
    assert torch.tensor(losses).isfinite().all()
    assert model[1].running_var.isfinite().all()
    assert done(healer) == [("nonfinite_gradient", ["skip"])] * 2
    assert "running statistics" in healer.recoveries[0]["evidence"]["blames"]
    assert 600 in healer.recoveries[0]["evidence"]["samples"]
    assert healer.last_step == 199
    assert healer.snapshots()


def test_a_batch_that_leaves_nan_in_a_moving_average_of_ones_own_costs_one_step():
    torch.manual_seed(0)
    model = Averager(0.0)
    healer, _ = train(model, spoil=float("nan"))
    assert model.average.isfinite().all()
    assert done(healer) == [("nonfinite_gradient", ["skip"])]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_check_finds_bad_statistics_and_blames_them(bad):
    model = normed()
    optimizer = zclip.wrap(torch.optim.SGD(model.parameters(), lr=0.1), "zclip")
    buffers, ranks = BufferCopies(model), Ranks(torch.device("cpu"))
    check = HealthCheck([optimizer], {}, buffers, lag=0, ranks=ranks)
    detector = StateHealth(HealingConfig())
    check.post(1)
    assert detector.observe_health(*check.read(1)) is None
    model[1].running_var[3] = bad
    check.post(2)
    finding = detector.observe_health(*check.read(2))
    assert finding.cause is Cause.WEIGHT_CORRUPTION
    assert finding.evidence["tensor"] == "buffer 1.running_var"
    assert finding.bad_step == 1  # the batch is one of those since the last sound check


def test_no_snapshot_with_nan_in_a_buffer_is_good():
    model = Averager(0.0)
    optimizer = zclip.wrap(torch.optim.SGD(model.parameters(), lr=0.1), "zclip")
    state = TrainingState(model, [optimizer])
    ring = SnapshotRing(interval=1, count=4, memory_fraction=4.0, quarantine_steps=1)
    for step in range(4):
        model(torch.full((2, 8), float("nan") if step == 2 else 1.0))
        state.notice_changes()
        ring.capture(step, state.tensors(), state.values(), without_nan=state.without_nan())
        ring.note_clean(step)
    assert ring.good_steps() == [1, 0]


def test_a_buffer_that_held_nan_before_training_may_go_on_to():
    torch.manual_seed(0)
    healer, _ = train(Averager(float("nan")))
    assert done(healer) == []
    assert healer.snapshots()


def test_a_mask_of_inf_that_forward_writes_is_no_fault():
    class Masked(Averager):
        def forward(self, x):
            self.average.copy_(torch.full((8,), -torch.inf))
            return self.linear(x)

    torch.manual_seed(0)
    healer, _ = train(Masked(0.0))
    assert done(healer) == []
    assert healer.snapshots()
