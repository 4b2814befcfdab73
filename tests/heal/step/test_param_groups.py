"""Parameters that join a run under way are stepped, clipped, watched and rolled back like all."""

import math

import pytest
import torch
from torch import nn

from heal import Healer
from heal.actions import Rollback
from heal.causes import Cause
from tests.heal.runs import quick

JOINS = 30


class Growing:
    """A body that is trained alone at first; its head joins the optimizer at step ``JOINS``."""

    def __init__(self, through, *, is_new=False, **config):
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 1)
        self.model = nn.Module()
        self.model.body = self.body
        if not is_new:
            self.model.head = self.head
        self.optimizer = torch.optim.AdamW(self.body.parameters(), lr=1e-2, fused=True)
        self.healer = Healer(self.model, self.optimizer, config=quick(**config))
        self.healer.exits.dismiss()
        self.owner = self.optimizer if through == "bare" else self.healer.optimizers[0]

    def grow(self):
        self.model.head = self.head
        self.owner.add_param_group({"params": list(self.head.parameters()), "lr": 1e-2})

    def run(self, steps, disturb=lambda step: None):
        for step, x in enumerate(self.healer.batches([torch.randn(8, 4) for _ in range(steps)])):
            if step == JOINS:
                self.grow()
            self.model.zero_grad()
            loss = (self.head(self.body(x).tanh()) - x.sum(1, keepdim=True)).square().mean()
            loss.backward()
            disturb(step)
            self.healer.step(loss)
        return self.healer


@pytest.fixture(params=["bare", "wrapper"])
def through(request):
    """Whom the user asks to add a group."""
    return request.param


def test_a_healer_leaves_the_groups_of_the_user_as_they_are():
    growing = Growing("bare")
    assert "param_names" not in growing.optimizer.param_groups[0]


def test_a_group_that_joins_is_trained(through):
    growing = Growing(through)
    start = growing.head.weight.detach().clone()
    healer = growing.run(60)
    assert not torch.equal(growing.head.weight, start)
    assert float(growing.optimizer.state[growing.head.weight]["step"]) == 30
    assert healer.notes == []
    assert not any(plan for _, _, plan in healer.history)


def test_a_group_that_joins_is_clipped(through):
    growing = Growing(through, zclip_enabled=True, max_grad_norm=1.0)
    norms = []

    def enlarge(step):
        if step == 55:
            growing.head.weight.grad.mul_(1e6)
            growing.optimizer.register_step_pre_hook(
                lambda *_: norms.append(float(growing.head.weight.grad.norm()))
            )

    growing.run(57, enlarge)
    assert norms[0] <= 1.0


@pytest.mark.parametrize("is_new", [False, True], ids=["of the model", "new in the model"])
def test_a_group_that_joins_is_watched_by_name(through, is_new):
    growing = Growing(through, is_new=is_new)

    def spoil(step):
        if step == 50:
            growing.head.weight.grad[0, 0] = math.nan

    healer = growing.run(60, spoil)
    (diagnosis,) = [d for _, d, _ in healer.history]
    assert diagnosis.cause is Cause.NONFINITE_GRADIENT
    assert diagnosis.evidence["tensor"] == "head.weight"
    assert healer.metrics()["healing/nan_count"] == 1


def test_a_group_that_joins_is_kept_in_snapshots_and_rolled_back(through):
    growing = Growing(through)
    struck = []

    def corrupt(step):
        if step == 65 and not struck:
            struck.append(step)
            growing.head.weight.data[0, 0] = math.nan

    healer = growing.run(100, corrupt)
    assert healer.notes == []
    assert any(isinstance(action, Rollback) for _, _, plan in healer.history for action in plan)
    assert min(healer.snapshots()) > JOINS
    assert growing.head.weight.isfinite().all()
    assert growing.optimizer.state[growing.head.weight]["exp_avg"].isfinite().all()
