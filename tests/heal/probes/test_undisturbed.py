"""A probe leaves no trace: the run goes on bit by bit as if it had never been looked at."""

import random

import pytest
import torch

from heal.lab.probes import (
    LyapunovMeter,
    every,
    fisher_diagonal,
    noise_scale,
    optimizer_health,
    sharpness,
    undisturbed,
)
from tests.heal.probes.problems import Noisy

PROBES = {
    "fisher": lambda model, optimizer, batch: fisher_diagonal(model, model.loss, batch, pieces=4),
    "sharpness": lambda model, optimizer, batch: sharpness(model, model.loss, batch, iterations=3),
    "noise_scale": lambda model, optimizer, batch: noise_scale(model, model.loss, batch, 4),
    "optimizer": lambda model, optimizer, batch: optimizer_health(optimizer),
    "lyapunov": lambda model, optimizer, batch: LyapunovMeter(model.parameters()).observe(),
}


def train(probe, steps=6):
    torch.manual_seed(0)
    random.seed(0)
    model = Noisy()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(steps):
        batch = torch.randn(8, 4)
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        model.loss(batch).backward()
        if probe is not None:
            probe(model, optimizer, batch)
        optimizer.step()
    tensors = [*model.parameters(), *model.buffers(), torch.get_rng_state()]
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    state = [v for s in optimizer.state.values() for v in s.values()]
    modes = [m.training for m in model.modules()]
    return [*tensors, *grads, *state], modes, random.getstate()


@pytest.mark.parametrize("probe", PROBES.values(), ids=PROBES)
def test_training_is_bit_by_bit_the_same_with_a_probe_between_backward_and_step(probe):
    bare, probed = train(None), train(probe)
    assert len(bare[0]) == len(probed[0])
    assert all(torch.equal(a, b) for a, b in zip(bare[0], probed[0], strict=True))
    assert bare[1:] == probed[1:]


def test_a_probe_that_fails_leaves_no_trace_either():
    model = Noisy()
    model.loss(torch.randn(8, 4)).backward()
    before = [p.grad for p in model.parameters()]
    buffers = [b.clone() for b in model.buffers()]
    rng = torch.get_rng_state()

    def spoil():
        model.eval()
        model.layers[1].running_mean.add_(1.0)
        torch.rand(3)
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"), undisturbed(model):
        spoil()
    assert all(a is b for a, b in zip(before, (p.grad for p in model.parameters()), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(buffers, model.buffers(), strict=True))
    assert torch.equal(rng, torch.get_rng_state())
    assert model.training


def test_every_so_many_steps():
    probe = every(10, lambda: "looked")
    assert [step for step in range(31) if probe(step)] == [0, 10, 20, 30]
    with pytest.raises(ValueError, match="steps: expected at least 1, got 0"):
        every(0, lambda: None)
