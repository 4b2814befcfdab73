"""Buffers that an evaluation made anew under inference_mode: no versions, and not to be written."""

import pytest
import torch
from torch import nn

import zclip
from heal.actions import Rollback
from heal.buffers import SMALL_BYTES, BufferCopies
from heal.training_state import TrainingState
from tests.heal.runs import regression, roll_back_after_skipped

EVALUATED, STEPS = 7, 60


class Rotary(nn.Module):
    """Keeps a table as long as the longest input so far, and replaces it by a longer one."""

    def __init__(self, width=1):
        super().__init__()
        self.layer = nn.Linear(8, 1)
        self.width = width
        self.register_buffer("table", torch.ones(4, width), persistent=False)
        self.register_buffer("mask", torch.zeros(3))

    def forward(self, x):
        if len(x) > len(self.table):
            self.table = torch.ones(len(x), self.width)
        return self.layer(x)


@pytest.mark.parametrize("width", [1, SMALL_BYTES], ids=["small", "large"])
@pytest.mark.parametrize("by_hand", [False, True], ids=["run", "by hand"])
def test_a_buffer_made_in_an_evaluation_costs_neither_the_run_nor_its_snapshots(by_hand, width):
    setup = regression(model=lambda: Rotary(width), nan_patience=2)
    healer = setup.healer()
    roll_back_after_skipped(healer, 2)
    calls = iter(range(1000))

    def evaluate(step):
        if step == EVALUATED:
            with torch.inference_mode():
                setup.model(torch.randn(64, 8))
        elif step == EVALUATED + 1:
            with torch.inference_mode():
                setup.model.mask = torch.zeros(3)

    def train_step(batch):
        return setup.train_step(batch) * (float("nan") if next(calls) in (40, 41) else 1.0)

    if by_hand:
        while healer.last_step < STEPS - 1:
            for batch in healer.batches(setup.loader):
                loss = train_step(batch)
                loss.backward()
                healer.step(loss)
                setup.optimizer.zero_grad()
                evaluate(healer.last_step)
    else:
        healer.run(train_step, setup.loader, STEPS, progress=False, on_step=evaluate)
    assert any(isinstance(a, Rollback) for _, _, plan in healer.history for a in plan)
    assert healer.snapshots()[0] > EVALUATED
    assert not any("not put back" in note or "left out" in note for note in healer.notes)
    healer.exits.dismiss()


@pytest.mark.parametrize("refused", [False, True, torch.tensor(1.0)], ids=["taken", "no", "device"])
def test_such_a_buffer_is_put_back_with_a_refused_step(refused):
    model, notes = Rotary(), []
    copies = BufferCopies(model, notes.append)
    for scale in (2.0, 3.0):
        with torch.inference_mode():
            model.table = torch.full((4, 1), scale)
        copies.settle(False)
    with torch.inference_mode():
        model.table.fill_(torch.nan)
    copies.settle(refused)
    assert model.table.isnan().all() == (refused is False)
    assert not notes


@pytest.mark.parametrize("call", ["begin", "put_back", "restored"])
def test_copies_that_fail_are_told_of_and_do_not_end_the_run(call, monkeypatch):
    notes = []
    copies = BufferCopies(nn.BatchNorm1d(4), notes.append)
    monkeypatch.setattr(copies, "_look", lambda: 1 / 0)
    getattr(copies, call)()
    assert "ZeroDivisionError" in notes[0]


def test_a_buffer_that_inference_mode_keeps_from_being_written_is_replaced():
    model = nn.Linear(2, 2)
    model.register_buffer("cache", torch.zeros(4, 2)[::2])
    state = TrainingState(model, [zclip.wrap(torch.optim.SGD(model.parameters(), lr=0.1), "zclip")])
    saved = {key: tensor.clone() for key, tensor in state.everything().items()}
    with torch.inference_mode():
        model.cache = torch.ones(4, 2)[::2]
    state.restore(saved, state.values())
    assert torch.equal(model.cache, torch.zeros(2, 2))
    assert not model.cache.is_inference()
