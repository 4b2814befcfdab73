"""What a user may add: callbacks for rollbacks and for records."""

import math

import pytest
import torch

from heal import Healer, HealingConfig
from tests.heal.runs import roll_back_after_skipped


def build(**settings):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    config = HealingConfig(snapshot_interval=4, quarantine_steps=1, **settings)
    return model, Healer(model, optimizer, config=config)


def train(model, healer, count, scale=1.0):
    for _ in range(count):
        model.zero_grad()
        loss = model(torch.ones(2, 4)).square().mean() * scale
        loss.backward()
        healer.step(loss.detach())


def test_a_callback_is_called_after_a_rollback_when_all_has_returned():
    model, healer = build()
    roll_back_after_skipped(healer, 2)
    seen = []

    @healer.on_rollback
    def note(step):
        seen.append((step, healer.last_step + 1, model.weight.detach().clone()))

    train(model, healer, 12)
    assert seen == []
    train(model, healer, 8, scale=math.nan)
    assert seen
    step, comes_next, weight = seen[0]
    assert step == comes_next
    assert step <= 12
    assert weight.isfinite().all()


def test_a_callback_sees_every_record_once_and_in_order():
    model, healer = build()
    steps, losses = [], []

    @healer.on_record
    def note(record):
        steps.append(record.step)
        losses.append(record.loss)

    train(model, healer, 60)
    healer.snapshots()  # polls
    assert steps == list(range(len(steps)))
    assert len(steps) > 50
    assert losses[0] > losses[-1] > 0.0


def test_a_callback_that_fails_is_noted_and_training_goes_on():
    model, healer = build()

    @healer.on_record
    def fails(record):
        raise ValueError("no room")

    train(model, healer, 60)
    assert healer.last_step == 59
    assert [note for note in healer.notes if "no room" in note] == [
        note for note in healer.notes if "of on_record failed" in note
    ]
    assert len([note for note in healer.notes if "no room" in note]) == 1


@pytest.mark.parametrize("count", [1, 3, 40])
def test_every_step_has_a_record_by_the_time_the_run_is_closed(count):
    model, healer = build()
    steps = []
    healer.on_record(lambda record: steps.append(record.step))
    train(model, healer, count)
    healer.close()
    assert steps == list(range(count))
