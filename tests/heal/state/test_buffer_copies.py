"""Buffers that forward writes: put back with a refused step, copied only if they move."""

import pytest
import torch
from torch import nn

from heal import Healer
from heal.buffers import SMALL_BYTES, BufferCopies
from heal.micro_batch import MicroBatcher
from heal.testing import Chaos, Fault
from tests.heal.runs import quick, regression

AT = 12
STEPS = 45


class Codebook(nn.Module):
    """A moving average that forward writes, in a buffer of any size, and one that it replaces."""

    def __init__(self, size=4):
        super().__init__()
        self.layer = nn.Linear(8, 1)
        self.register_buffer("mean", torch.zeros(size))
        self.register_buffer("seen", torch.zeros(()), persistent=False)
        self.register_buffer("mask", torch.full((3,), -torch.inf))

    def forward(self, x):
        with torch.no_grad():
            self.mean.lerp_(x.mean().expand_as(self.mean), 0.1)
            self.seen = self.seen + x.sum()
        return self.layer(x)


def with_norm():
    def make():
        statistics = nn.BatchNorm1d(16), nn.InstanceNorm1d(4, track_running_stats=True)
        shaped = nn.Unflatten(1, (4, 4)), statistics[1], nn.Flatten()
        return nn.Sequential(nn.Linear(8, 16), statistics[0], *shaped, nn.Linear(16, 1))

    return regression(model=make)


MODELS = {
    "BatchNorm": with_norm,
    "own buffers": lambda: regression(model=Codebook),
    "large buffer": lambda: regression(model=lambda: Codebook(SMALL_BYTES)),
}


def by_hand(setup, is_bad, accumulate=1):
    """Train by a hand-written loop; batches for which ``is_bad`` are NaN."""
    healer = setup.healer()
    done = calls = 0
    while done < STEPS:
        for batch in healer.batches(setup.loader):
            inputs = batch[0] * float("nan") if is_bad(calls) else batch[0]
            loss = setup.train_step((inputs, batch[1]))
            loss.backward()
            calls += 1
            if calls % accumulate:
                continue
            healer.step(loss)
            setup.optimizer.zero_grad()
            done += 1
            if done == STEPS:
                break
    healer.exits.dismiss()
    return healer


def skipping(setup, is_bad):
    """The same without a healer, where bad batches are not even looked at."""
    done = 0
    while done < STEPS:
        for batch in setup.loader:
            if not is_bad(done):
                setup.optimizer.zero_grad()
                setup.train_step(batch).backward()
                setup.optimizer.step()
            done += 1
            if done == STEPS:
                break


def assert_same_model(first, second):
    names = [name for name, _ in (*first.named_parameters(), *first.named_buffers())]
    tensors = (*first.parameters(), *first.buffers()), (*second.parameters(), *second.buffers())
    for name, a, b in zip(names, *tensors, strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_a_batch_of_nan_leaves_the_model_as_if_it_had_been_skipped(make):
    healed = make()
    healer = by_hand(healed, lambda step: step == AT)
    skipped = make()
    skipping(skipped, lambda step: step == AT)
    assert_same_model(healed.model, skipped.model)
    assert [d.cause.value for _, d, _ in healer.history] == ["nonfinite_loss"]
    assert healer.notes == []


@pytest.mark.parametrize("make", [with_norm, lambda: regression(model=Codebook)])
def test_the_first_batch_of_all_may_be_the_bad_one(make):
    healed = make()
    by_hand(healed, lambda step: step == 0)
    skipped = make()
    skipping(skipped, lambda step: step == 0)
    assert_same_model(healed.model, skipped.model)


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_run_puts_buffers_back_too_and_promotes_no_ruin(make):
    healed = make()
    healer = healed.healer()
    train_step = Chaos(healer, [Fault("nan_batch", at=AT)]).wrap(healed.train_step)
    healer.run(train_step, healed.loader, STEPS, progress=False)
    skipped = make()
    skipping(skipped, lambda step: step == AT)
    assert_same_model(healed.model, skipped.model)
    snapshot = healer.newest_snapshot()
    assert snapshot.step > AT
    assert all(not tensor.isnan().any() for tensor in snapshot.tensors.values())


def test_every_forward_of_an_accumulated_step_is_taken_back():
    setup = with_norm()
    by_hand(setup, lambda call: call == 4 * AT + 2, accumulate=4)
    norm = setup.model[1]
    assert norm.num_batches_tracked == 4 * (STEPS - 1)
    assert norm.running_mean.isfinite().all()


def test_an_attempt_that_is_refused_is_taken_back():
    setup = with_norm()
    healer = setup.healer()
    for i, (inputs, targets) in enumerate(healer.batches(setup.loader)):
        before = [buffer.clone() for buffer in setup.model.buffers()]
        bad = i in (5, 6)
        with healer.attempt():
            loss = setup.train_step((inputs * float("nan") if bad else inputs, targets))
            loss.backward()
            healer.step(loss)
        setup.optimizer.zero_grad()
        same = [torch.equal(a, b) for a, b in zip(before, setup.model.buffers(), strict=True)]
        assert all(same) == bad
    healer.exits.dismiss()


def test_an_overflow_that_a_scaler_is_made_for_keeps_its_statistics():
    def build():
        setup = with_norm()
        inner = setup.train_step
        setup.train_step = lambda batch: 1000.0 * inner(batch)
        return setup, torch.amp.GradScaler("cpu", init_scale=2.0**127)

    bare, scaler = build()
    for batch in bare.loader:
        bare.optimizer.zero_grad()
        scaler.scale(bare.train_step(batch)).backward()
        scaler.step(bare.optimizer)
        scaler.update()
    healed, scaler = build()
    healer = healed.healer(scaler=scaler)
    for i, (inputs, targets) in enumerate(healer.batches(healed.loader)):
        loss = healed.train_step((inputs, targets))
        scaler.scale(loss).backward()
        healer.step(loss)
        healed.optimizer.zero_grad()
        if i == 1:
            assert scaler.get_scale() < 2.0**127  # it did overflow
    assert_same_model(healed.model, bare.model)
    loss = healed.train_step((inputs * float("nan"), targets))
    scaler.scale(loss).backward()
    healer.step(loss)
    assert_same_model(healed.model, bare.model)
    healer.exits.dismiss()


def test_buffers_that_nobody_writes_are_not_copied_in_steps():
    model = Codebook()
    model.register_buffer("table", torch.ones(SMALL_BYTES))  # four times as many bytes
    micro = MicroBatcher(model, lambda: list(model.parameters()))
    for _ in range(3):
        micro.backward([torch.ones(2, 8)], lambda x: model(x).mean(), lambda loss: loss)
    micro.begin()
    copies = micro._buffers
    assert [copies.is_moving(name) for name in ("mean", "seen", "mask", "table")] == [1, 1, 0, 0]
    assert sum(group.flat.nbytes for group in copies._groups) == model.mean.nbytes + 4
    assert copies._still["table"].copy is None


def test_a_large_buffer_that_is_loaded_once_does_not_move():
    model = Codebook(SMALL_BYTES)
    copies = BufferCopies(model)
    model.load_state_dict(model.state_dict())
    copies.settle(False)
    assert not copies.is_moving("mean")
    model(torch.ones(2, 8))
    copies.settle(False)
    assert copies.is_moving("mean")


def test_what_was_loaded_before_training_is_what_a_refused_first_step_returns_to():
    setup = with_norm()
    healer = setup.healer()
    setup.model[1].running_mean.fill_(7.0)
    inputs, targets = next(iter(healer.batches(setup.loader)))
    loss = setup.train_step((inputs * float("nan"), targets))
    loss.backward()
    healer.step(loss)
    assert (setup.model[1].running_mean == 7.0).all()
    healer.exits.dismiss()


def test_statistics_made_in_the_first_forward_are_guarded_from_then_on():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 4), nn.LazyBatchNorm1d())
    optimizer = torch.optim.SGD([p for p in model[0].parameters()], lr=0.1)
    healer = Healer(model, optimizer, config=quick())
    for factor in (1.0, 1.0, float("nan"), 1.0):
        loss = model(torch.randn(4, 8) * factor).square().mean()
        loss.backward()
        healer.step(loss)
        optimizer.zero_grad()
    assert model[1].num_batches_tracked == 3
    assert model[1].running_mean.isfinite().all()
    healer.exits.dismiss()


def test_a_graph_that_is_kept_over_a_step_can_still_be_used():
    norm, other = nn.BatchNorm1d(4), nn.Linear(4, 1)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    healer = Healer(nn.Sequential(norm, other), optimizer, config=quick())
    kept = norm(torch.randn(6, 4, requires_grad=True)).square().mean()
    loss = other(torch.randn(6, 4)).mean()
    loss.backward()
    healer.guarded.buffers.settle(torch.tensor(0.0))  # as on a device, where both are written
    healer.step(loss)
    kept.backward()
    healer.exits.dismiss()


def test_a_buffer_that_cannot_be_copied_is_told_of_and_does_not_end_the_run(monkeypatch):
    notes = []
    copies = BufferCopies(nn.BatchNorm1d(4), notes.append)
    copies.settle(False)
    monkeypatch.setattr(copies._groups[0], "renew", lambda: 1 / 0)
    copies.settle(False)
    copies.settle(True)
    assert len(notes) == 1
    assert "ZeroDivisionError" in notes[0]


@pytest.mark.parametrize("refused", [0.0, 1.0])
def test_the_choice_on_a_device_is_that_of_the_host(refused):
    model = nn.Sequential(nn.BatchNorm1d(4), Codebook())
    copies = BufferCopies(model)
    for _ in range(2):  # so that all that moves is known to
        model[0](torch.randn(6, 4))
        model[1](torch.randn(2, 8))
        copies.settle(torch.tensor(0.0))
    before = [buffer.clone() for buffer in model.buffers()]
    model[0](torch.full((6, 4), torch.nan))
    model[1](torch.full((2, 8), torch.nan))
    after = [buffer.clone() for buffer in model.buffers()]
    copies.settle(torch.tensor(refused))
    for found, wanted in zip(model.buffers(), before if refused else after, strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)
