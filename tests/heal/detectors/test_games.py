"""Two networks that learn against each other: neither loss measures progress, and none is sick."""

import math

import pytest
import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits as entropy

from heal.verdict import Record
from tests.heal.detectors.streams import alarms

STEPS, ROWS = 1200, 64


def network(inputs, outputs):
    return nn.Sequential(nn.Linear(inputs, 32), nn.ReLU(), nn.Linear(32, outputs))


def stepped(step, loss, model, optimizer):
    optimizer.zero_grad()
    loss.backward()
    norm = math.sqrt(sum(float(p.grad.square().sum()) for p in model.parameters()))
    optimizer.step()
    return Record(step=step, loss=float(loss.detach()), norm=norm)


def penalty(critic, real, fake):
    mixed = torch.lerp(fake, real, torch.rand(ROWS, 1)).requires_grad_()
    (slope,) = torch.autograd.grad(critic(mixed).sum(), mixed, create_graph=True)
    return 10 * (slope.norm(dim=1) - 1).square().mean()


def game(kind, seed):
    """Train a GAN; return the records of its generator and of its critic."""
    torch.manual_seed(seed)
    generator, critic = network(4, 2), network(2, 1)
    rate = 5e-4 if kind == "non-saturating" else 1e-3
    adam = [
        torch.optim.Adam(m.parameters(), lr=rate, betas=(0.5, 0.9)) for m in (generator, critic)
    ]
    ones, records = torch.ones(ROWS, 1), ([], [])
    for step in range(STEPS):
        real = 0.3 * torch.randn(ROWS, 2) + torch.tensor([1.0, -1.0])
        noise = torch.randn(ROWS, 4)
        fake = generator(noise).detach()
        loss = critic(fake).mean() - critic(real).mean()
        if kind == "non-saturating":
            loss = entropy(critic(real), ones) + entropy(critic(fake), 0 * ones)
        elif kind == "gradient penalty":
            loss = loss + penalty(critic, real, fake)
        records[1].append(stepped(step, loss, critic, adam[1]))
        if kind == "clipped weights":
            for param in critic.parameters():
                param.data.clamp_(-0.1, 0.1)
        said = critic(generator(noise))
        loss = entropy(said, ones) if kind == "non-saturating" else -said.mean()
        records[0].append(stepped(step, loss, generator, adam[0]))
    return records


KINDS = ["clipped weights", "gradient penalty", "non-saturating"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_game_of_two_networks_is_left_alone(kind):
    for records in game(kind, seed=0):
        assert alarms(records) == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_next_to_no_game_is_taken_for_sick(kind):
    """One loss in forty may be: those of a critic with a penalty swing as a divergence does."""
    losses = [records for seed in range(20) for records in game(kind, seed)]
    assert sum(bool(alarms(records)) for records in losses) <= 1
