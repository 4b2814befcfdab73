"""A clip rule that learns only from what it accepts must not refuse a new level for ever."""

import torch

import zclip
from heal import Healer, HealingConfig


def run(shift, steps=120, **config):
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    inner = torch.optim.SGD(model.parameters(), lr=1e-4, fused=True)
    optimizer = zclip.wrap(inner, zclip.SpikeSkip(window=32, sigma=6.0, min_count=16))
    settings = HealingConfig(snapshot_interval=10, quarantine_steps=4, **config)
    healer = Healer(model, optimizer, config=settings)
    healer.exits.dismiss()
    taken = []
    for step in range(steps):
        model.zero_grad()
        before = model.weight.detach().clone()
        loss = (model(torch.randn(16, 8)) - 1.0).square().mean()
        (loss * (shift if step >= 60 else 1.0)).backward()
        healer.step(loss)
        taken.append(not torch.equal(before, model.weight))
    return healer, taken


def test_a_new_level_of_gradients_is_learned_within_the_budget():
    healer, taken = run(shift=100.0)
    assert not any(taken[60:78])
    assert all(taken[-30:])
    done = {type(action).__name__ for _, _, plan in healer.history for action in plan}
    assert done == {"Refuse", "RelearnClip", "ScaleLr"}
    assert healer.metrics()["healing/recovery_attempts"] == 1


def test_without_patience_left_nothing_is_learned_anew():
    _, taken = run(shift=100.0, refused_patience=90)
    assert not any(taken[60:])
