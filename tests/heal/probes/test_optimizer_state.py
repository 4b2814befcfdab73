import math

import pytest
import torch

import zclip
from heal.probes import optimizer_health


def stepped(make, steps=20, size=4, gradient=3.0):
    params = [torch.nn.Parameter(torch.zeros(size)), torch.nn.Parameter(torch.zeros(size))]
    optimizer = make(params)
    for _ in range(steps):
        for param in params:
            param.grad = torch.full((size,), gradient)
        optimizer.step()
    return params, optimizer


def adam(params):
    return torch.optim.AdamW(params, lr=1e-3)


@pytest.mark.parametrize("steps", [1, 5, 200])
@pytest.mark.parametrize("gradient", [1e-3, 3.0, 1e4])
def test_a_constant_gradient_makes_updates_of_exactly_one_learning_rate(steps, gradient):
    _, optimizer = stepped(adam, steps, gradient=gradient)
    health = optimizer_health(optimizer)
    assert health.update_rms == pytest.approx(1.0, rel=1e-3)
    assert health.update_max == pytest.approx(1.0, rel=1e-3)
    assert health.fewest_steps == health.most_steps == steps
    assert health.is_ok


def test_other_optimizers_have_no_such_update_but_are_looked_at():
    for make in (
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: torch.optim.RMSprop(p, lr=0.1),
        lambda p: torch.optim.Adagrad(p, lr=0.1),
    ):
        params, optimizer = stepped(make)
        assert optimizer_health(optimizer).is_ok
        assert math.isnan(optimizer_health(optimizer).update_rms)
        kept = next(v for v in optimizer.state[params[0]].values() if v.numel() > 1)
        kept[1] = math.inf
        assert optimizer_health(optimizer).problems == ["1 elements of the moments are NaN or Inf"]


def test_a_wrapped_optimizer_is_looked_through():
    _, optimizer = stepped(lambda p: zclip.wrap(torch.optim.AdamW(p, fused=True), "zclip"))
    assert optimizer_health(optimizer).fewest_steps == 20


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (lambda s: s["exp_avg"].fill_(math.nan), "are NaN or Inf"),
        (lambda s: s["exp_avg_sq"].neg_(), "below zero"),
        (lambda s: s["step"].zero_(), "step counts differ: 0 to 20"),
        (lambda s: s["exp_avg_sq"].mul_(1e-6), "learning rates; wanted at most 10"),
        (lambda s: s["exp_avg_sq"].mul_(1e-6), "do not know of gradients as large"),
    ],
)
def test_what_is_wrong_is_named(spoil, told):
    params, optimizer = stepped(adam)
    spoil(optimizer.state[params[0]])
    assert any(told in problem for problem in optimizer_health(optimizer).problems)


def test_a_state_that_is_gone_is_noticed():
    params, optimizer = stepped(adam)
    del optimizer.state[params[1]]
    health = optimizer_health(optimizer)
    assert health.missing == 1
    assert "1 parameters with a gradient have no state" in health.problems
    optimizer.state.clear()
    assert "was reset" in optimizer_health(optimizer).problems[0]
