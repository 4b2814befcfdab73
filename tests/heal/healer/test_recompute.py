"""Steps are computed again to tell a passing fault of the machine from data and model."""

import json
import random

import pytest
import torch

from heal.dry_run import CannotRecompute, Origin
from tests.heal.runs import assert_same, fingerprint, regression


def trained(steps=13, *, hit=None, draw=False, train_step=None, **options):
    """Train by hand and keep the batches since the snapshot of step 10."""
    setup = regression()
    healer = setup.healer(**options)
    healer.exits.dismiss()
    kept, losses = [], []
    for batch in healer.batches(setup.loader):
        setup.optimizer.zero_grad()
        loss = (train_step or (lambda s, b: s.train_step(b)))(setup, batch)
        loss.backward()
        if hit is not None:
            hit(setup, healer.last_step + 1, "backward")
        healer.step(loss)
        if hit is not None:
            hit(setup, healer.last_step, "step")
        if draw:
            torch.rand(1)
        if healer.last_step >= 10:
            kept.append(batch)
            losses.append(loss.detach())
        if healer.last_step == steps - 1:
            return setup, healer, kept, losses


def flip(tensor, bit=20):
    with torch.no_grad():
        tensor.view(-1)[:1].view(torch.int32).bitwise_xor_(1 << bit)


def test_a_sound_state_is_reproducible_and_every_byte_is_put_back(tmp_path):
    setup, healer, kept, losses = trained(run_dir=tmp_path)
    before, mailbox = fingerprint(setup), healer.guarded.mailbox
    found = healer.recompute(setup.train_step, kept, losses)
    assert (found.origin, found.ranks, found.tensor) == (Origin.REPRODUCIBLE, (), "")
    assert (found.first_step, found.last_step) == (10, 12)
    assert "data or the model" in found.reason
    assert_same(fingerprint(setup), before)
    assert healer.guarded.mailbox is mailbox
    lines = (tmp_path / "events.jsonl").read_text().splitlines()
    told = next(e for e in map(json.loads, lines) if e["event"] == "recompute")
    assert (told["origin"], told["first_step"], told["step"]) == ("reproducible", 10, 12)


@pytest.mark.parametrize("step", [10, 11, 12])
@pytest.mark.parametrize("place", ["weight", "gradient", "moment"])
def test_a_flipped_bit_is_a_passing_fault(step, place):
    def hit(setup, at, phase):
        param = next(setup.model.parameters())
        if at == step and phase == ("backward" if place == "gradient" else "step"):
            target = {
                "weight": lambda: param,
                "gradient": lambda: param.grad,
                "moment": lambda: setup.optimizer.state[param]["exp_avg"],
            }[place]()
            flip(target)

    setup, healer, kept, losses = trained(hit=hit)
    before = fingerprint(setup)
    found = healer.recompute(setup.train_step, kept, losses)
    assert found.origin is Origin.TRANSIENT
    assert found.ranks == (0,)
    assert found.tensor
    assert "rank 0 computed something else" in found.reason
    assert_same(fingerprint(setup), before)


def test_a_bad_batch_is_the_fault_of_the_data():
    def spiked(setup, batch):
        return setup.train_step(batch) * (1e4 if batch[0].sum() > 0 else 1.0)

    setup, healer, kept, losses = trained(train_step=spiked)
    found = healer.recompute(lambda batch: spiked(setup, batch), kept, losses)
    assert found.origin is Origin.REPRODUCIBLE


def test_a_computation_that_is_never_the_same_decides_nothing():
    chance = random.Random(0)

    def noisy(setup, batch):
        return setup.train_step(batch) * (1 + chance.random())

    setup, healer, kept, _ = trained(train_step=noisy)
    found = healer.recompute(lambda batch: noisy(setup, batch), kept)
    assert found.origin is Origin.UNDECIDED
    assert "use_deterministic_algorithms" in found.reason


def test_random_numbers_drawn_elsewhere_decide_nothing():
    setup, healer, kept, losses = trained(draw=True)
    found = healer.recompute(setup.train_step, kept, losses)
    assert found.origin is Origin.UNDECIDED
    assert "drawn outside of train_step" in found.reason


def test_a_recomputation_that_fails_puts_every_byte_back():
    setup, healer, kept, losses = trained(draw=True)
    before, grads = fingerprint(setup), [p.grad for p in setup.model.parameters()]

    def fails(batch):
        raise ValueError("no such layer")

    with pytest.raises(ValueError, match="no such layer"):
        healer.recompute(fails, kept, losses)
    assert_same(fingerprint(setup), before)
    assert all(p.grad is g for p, g in zip(setup.model.parameters(), grads, strict=True))


def test_without_a_snapshot_of_the_first_step_there_is_an_error():
    setup, healer, kept, _ = trained()
    with pytest.raises(CannotRecompute, match="no snapshot of step 11"):
        healer.recompute(setup.train_step, kept[1:])
    with pytest.raises(CannotRecompute, match="no snapshot"):
        healer.recompute(setup.train_step, [])
    healer.training.scale_lr(0.5, 0.1, 20)
    with pytest.raises(CannotRecompute, match=r"learning rate at 0\.5 of its schedule"):
        healer.recompute(setup.train_step, kept)


def test_training_goes_on_as_if_nothing_had_been_asked():
    plain, healer, _, _ = trained()
    for batch in list(plain.loader)[:3]:
        plain.optimizer.zero_grad()
        loss = plain.train_step(batch)
        loss.backward()
        healer.step(loss)
    expected = fingerprint(plain)
    asked, healer, kept, losses = trained()
    healer.recompute(asked.train_step, kept, losses)
    for batch in list(asked.loader)[:3]:
        asked.optimizer.zero_grad()
        loss = asked.train_step(batch)
        loss.backward()
        healer.step(loss)
    assert_same(fingerprint(asked), expected)
