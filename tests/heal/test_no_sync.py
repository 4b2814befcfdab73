"""The healthy path waits for nothing: two intervals of snapshots and checks on fake CUDA."""

import pytest
import torch
from torch import nn

from heal import Healer, HealingConfig
from heal import snapshots as snapshots_module
from tests.fake_cuda import WAITS, fake_cuda
from zclip import mailbox


class Event:
    """Stands in for a CUDA event; notes when the host waits for it."""

    host_waits = 0

    def wait(self):
        pass

    def synchronize(self):
        Event.host_waits += 1


class Side:
    """Stands in for a side stream: does the work at once."""

    def __init__(self, device):
        pass

    def run(self, work):
        work()
        return Event()


@pytest.fixture
def device(monkeypatch):
    """Stand-ins for what no fake device has: streams, events, pinned memory and late mail."""
    Event.host_waits = 0

    def poll(self, lag=None):
        due = len(self._sent) - (self.lag if lag is None else lag)
        arrived = [(letter.step, [0.0] * self.width) for letter in list(self._sent)[: max(0, due)]]
        for _ in arrived:
            self._sent.popleft()
        return arrived

    monkeypatch.setattr(mailbox.Mailbox, "_new_slot", lambda self, pinned: torch.empty(self.width))
    monkeypatch.setattr(mailbox.Mailbox, "poll", poll)
    monkeypatch.setattr(mailbox, "record_event", lambda device: Event())
    monkeypatch.setattr(snapshots_module, "SideStream", Side)
    # A snapshot that leaves its quarantine is read: its copy has landed long before.
    monkeypatch.setattr(snapshots_module.SnapshotRing, "quarantine_of", lambda ring, step: 40)
    monkeypatch.setattr(torch.Tensor, "backward", lambda loss: fill_gradients())
    monkeypatch.setattr(
        snapshots_module, "host_memory", lambda like: torch.empty_like(like, device="cpu")
    )


PARAMETERS = []


def fill_gradients():
    """Stands in for autograd, which wants a real device."""
    for param in PARAMETERS:
        if param.requires_grad:
            param.grad = torch.empty_like(param)


def build(num_optimizers=1, scaler=None, **config):
    there = {"device": "cuda"}
    statistics = nn.BatchNorm1d(4, affine=False)  # made on a device it would wait
    for name, buffer in statistics._buffers.items():
        statistics._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype, **there)
    norms = nn.LayerNorm(4, **there), statistics
    model = nn.Sequential(nn.Linear(4, 4, **there), *norms, nn.Linear(4, 1, **there))
    model.register_buffer("mask", torch.empty(3, device="cuda"))
    model[3].bias.requires_grad_(False)
    PARAMETERS[:] = model.parameters()
    shares = [PARAMETERS[o::num_optimizers] for o in range(num_optimizers)]
    optimizers = [torch.optim.AdamW(share, lr=1e-3, fused=True) for share in shares]
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizers[0], 50)
    settings = {"snapshot_interval": 3, "check_interval": 2, "quarantine_steps": 40, **config}
    return model, Healer(model, optimizers, scheduler, HealingConfig(**settings), scaler=scaler)


def take_steps(model, healer, steps):
    for batch in healer.batches([torch.empty(5, 4, device="cuda") for _ in range(steps)]):
        loss = model(batch).square().mean()
        scaler = healer.guarded.scaler
        (loss if scaler is None else scaler.scale(loss)).backward()
        healer.step(loss)
        healer.model.zero_grad()


@pytest.mark.parametrize("zclip_enabled", [True, False])
def test_healthy_steps_with_snapshots_and_checks_wait_for_nothing(device, zclip_enabled):
    with fake_cuda() as mode:
        model, healer = build(zclip_enabled=zclip_enabled)
        take_steps(model, healer, 8)
    assert healer.notes == []
    assert healer.last_step == 7
    assert mode.ops.count("zclip::watch_loss_") == 8
    assert mode.ops.count("aten::where") == 2 * 8  # statistics, and how many batches they have
    assert mode.ops.count("zclip::fingerprint") >= 3
    assert Event.host_waits == 0
    healer.exits.dismiss()


@pytest.mark.parametrize("num_optimizers", [1, 3])
@pytest.mark.parametrize("is_scaled", [False, True], ids=["plain", "scaled"])
def test_several_optimizers_and_a_scaler_wait_for_nothing(
    device, monkeypatch, num_optimizers, is_scaled
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)  # else the scaler is disabled
    with fake_cuda() as mode:
        scaler = torch.amp.GradScaler("cuda") if is_scaled else None
        model, healer = build(num_optimizers, scaler)
        take_steps(model, healer, 4)
    assert healer.notes == []
    assert mode.ops.count("zclip::watch_loss_") == 4
    assert mode.ops.count("aten::_amp_update_scale_") == (4 if is_scaled else 0)
    assert Event.host_waits == 0
    healer.exits.dismiss()


def test_the_forecast_waits_for_nothing(device):
    with fake_cuda():
        model, healer = build(forecast=True, lag=0)
        take_steps(model, healer, 25)
    assert healer.notes == []
    assert healer.monitor.watch.forecast.features.steps == 25
    assert Event.host_waits == 0
    healer.exits.dismiss()


def test_an_anchor_waits_for_nothing_neither_set_nor_holding(device):
    with fake_cuda():
        model, healer = build()
        take_steps(model, healer, 2)
        assert healer.training.anchor_weights(0.1, 3)
        take_steps(model, healer, 2)
        assert healer.optimizers[0].pull is not None
        take_steps(model, healer, 2)
    assert healer.optimizers[0].pull is None
    assert healer.notes == []
    assert Event.host_waits == 0
    healer.exits.dismiss()


def test_the_whole_loop_waits_for_nothing(device):
    with fake_cuda():
        model, healer = build()
        batches = [torch.empty(5, 4, device="cuda") for _ in range(3)]
        healer.exits.dismiss()
        healer.exits.catch_signals = lambda: None
        healer.run(lambda batch: model(batch).square().mean(), batches, 7, progress=False)
    assert healer.notes == []
    assert healer.last_step == 6


def test_a_wait_would_be_noticed(device, monkeypatch):
    with fake_cuda():
        model, healer = build()
        step = healer.guarded.step
        monkeypatch.setattr(
            healer.guarded, "step", lambda n, loss, facts: (float(loss), step(n, loss))
        )
        with pytest.raises(WAITS):
            take_steps(model, healer, 1)
    healer.exits.dismiss()
