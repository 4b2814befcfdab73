"""With a fused optimizer a healed step is one operator: clip, loss watch and update."""

import math

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import zclip
from heal import Healer, HealingConfig
from heal.record import Flag


class Operators(TorchDispatchMode):
    """Notes which of our operators run."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "zclip":
            self.names.append(func._schema.name.removeprefix("zclip::"))
        return func(*args, **(kwargs or {}))


class Run:
    """A small model with a healer whose records are polled at once."""

    def __init__(self, kind=zclip.optim.AdamW, model=None, **settings):
        torch.manual_seed(0)
        self.model = model or nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
        self.optimizer = kind(self.model.parameters(), lr=1e-2)
        config = HealingConfig(lag=0, **settings)
        self.healer = Healer(self.model, self.optimizer, config=config)
        self.records = []
        self.healer.on_record(self.records.append)

    def backward(self, factor=1.0):
        self.optimizer.zero_grad()
        loss = factor * self.model(torch.randn(32, 8)).square().mean()
        loss.backward()
        return loss.detach()

    def step(self, factor=1.0, loss=None):
        found = self.backward(factor)
        self.healer.step(found if loss is None else torch.tensor(loss))

    def weights(self):
        return torch.cat([p.detach().flatten() for p in self.model.parameters()])


@pytest.fixture
def run():
    run = Run()
    for _ in range(3):
        run.step()
    return run


def test_one_operator_is_called(run):
    run.backward()
    with Operators() as operators:
        run.healer.guarded.step(3, torch.tensor(1.0))
    assert operators.names == ["fused_step_"]


def test_the_gradients_stay_as_backward_left_them():
    run = Run(max_grad_norm=1e-3)
    run.backward()
    before = [p.grad.clone() for p in run.model.parameters()]
    run.healer.step(torch.tensor(1.0))
    assert run.optimizer.result.clip.coefs[0] < 1.0
    assert all(map(torch.equal, before, (p.grad for p in run.model.parameters())))


def test_it_trains_as_a_healed_torch_optimizer_does():
    ours, theirs = Run(), Run(lambda params, lr: torch.optim.AdamW(params, lr=lr, fused=True))
    for run in (ours, theirs):
        torch.manual_seed(1)
        for step in range(40):
            run.step(factor=50.0 if step % 7 == 6 else 1.0)
    torch.testing.assert_close(ours.weights(), theirs.weights(), rtol=1e-4, atol=1e-6)
    pairs = list(zip(ours.records, theirs.records, strict=True))
    assert [a.flags for a, _ in pairs] == [b.flags for _, b in pairs]
    for a, b in pairs:
        assert a.norm == pytest.approx(b.norm, rel=1e-4)
        assert a.loss == pytest.approx(b.loss, rel=1e-4)
        assert a.loss_ratio == pytest.approx(b.loss_ratio, rel=1e-4)


@pytest.mark.parametrize(
    ("factor", "loss", "flag"),
    [(1.0, math.nan, Flag.LOSS_NAN), (1.0, math.inf, Flag.LOSS_NAN), (math.nan, 1.0, Flag.HAS_NAN)],
)
def test_a_bad_loss_or_gradient_skips_the_step(run, factor, loss, flag):
    before = run.weights()
    run.step(factor, loss)
    assert torch.equal(run.weights(), before)
    run.step()
    bad = next(record for record in run.records if record.step == 3)
    assert bad.blocked
    assert bad.has(flag)


def test_a_lower_rate_after_a_rollback_holds(run):
    run.healer.training.lr_scale = 0.5
    run.backward()
    before = run.weights()
    run.healer.step(torch.tensor(1.0))
    moved = (run.weights() - before).abs().max()
    assert 0.0 < moved <= 0.5 * 1e-2 * 1.2
    assert run.optimizer.param_groups[0]["lr"] == 1e-2


def test_buffers_are_put_back_where_the_step_is_skipped():
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 1))
    run = Run(model=model)
    for _ in range(3):
        run.step()
    before = model[1].running_mean.clone()
    run.step(loss=math.nan)
    assert torch.equal(model[1].running_mean, before)


def test_no_gradients_are_no_step(run):
    run.optimizer.zero_grad()
    before = run.weights()
    run.healer.step(torch.tensor(1.0))
    assert torch.equal(run.weights(), before)
    assert len(run.records) == 3
