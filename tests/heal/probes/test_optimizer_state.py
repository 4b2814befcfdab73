import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import zclip
from heal.lab.probes import optimizer_health


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
        assert optimizer_health(optimizer).problems == ["1 elements of the state are NaN or Inf"]


def test_a_wrapped_optimizer_is_looked_through():
    _, optimizer = stepped(lambda p: zclip.wrap(torch.optim.AdamW(p, fused=True), "zclip"))
    assert optimizer_health(optimizer).fewest_steps == 20


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (lambda s: s["exp_avg"].fill_(math.nan), "are NaN or Inf"),
        (lambda s: s["exp_avg_sq"].neg_(), "below zero"),
        (lambda s: s["step"].zero_(), "1 parameters have moments and a step count below 1"),
        (
            lambda s: s["exp_avg_sq"].mul_(1e-6),
            "expected updates of at most 10 learning rates, got one of",
        ),
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


MEMORIES = {
    "amsgrad": (lambda p: torch.optim.Adam(p, amsgrad=True), "max_exp_avg_sq"),
    "rmsprop": (lambda p: torch.optim.RMSprop(p, centered=True), "grad_avg"),
    "adamax": (torch.optim.Adamax, "exp_inf"),
    "adafactor-rows": (torch.optim.Adafactor, "row_var"),
    "adafactor-columns": (torch.optim.Adafactor, "col_var"),
    "adadelta": (torch.optim.Adadelta, "acc_delta"),
    "rprop": (torch.optim.Rprop, "step_size"),
    "nadam": (torch.optim.NAdam, "mu_product"),
    "asgd": (torch.optim.ASGD, "ax"),
}


@pytest.mark.parametrize(("make", "name"), MEMORIES.values(), ids=MEMORIES)
def test_nan_is_seen_in_whatever_an_optimizer_remembers(make, name):
    weight = torch.nn.Parameter(torch.ones(3, 4))
    optimizer = make([weight])
    for _ in range(3):
        weight.grad = torch.full((3, 4), 0.5)
        optimizer.step()
    assert optimizer_health(optimizer).is_ok
    optimizer.state[weight][name].view(-1)[0] = math.nan
    assert "1 elements of the state are NaN or Inf" in optimizer_health(optimizer).problems


@pytest.mark.parametrize("name", ["row_var", "exp_inf", "max_exp_avg_sq"])
def test_what_can_never_be_negative_is_told(name):
    make = next(make for make, kept in MEMORIES.values() if kept == name)
    weight = torch.nn.Parameter(torch.ones(3, 4))
    optimizer = make([weight])
    weight.grad = torch.full((3, 4), 0.5)
    optimizer.step()
    optimizer.state[weight][name].view(-1)[0] = -1.0
    assert optimizer_health(optimizer).negative == 1


def test_amsgrad_divides_by_the_largest_second_moment():
    params, optimizer = stepped(lambda p: torch.optim.Adam(p, amsgrad=True))
    assert optimizer_health(optimizer).update_rms == pytest.approx(1.0, rel=1e-3)
    for param in params:
        optimizer.state[param]["max_exp_avg_sq"].mul_(4.0)
    assert optimizer_health(optimizer).update_rms == pytest.approx(0.5, rel=1e-3)


def test_an_optimizer_that_keeps_no_state_has_lost_none():
    _, optimizer = stepped(lambda p: torch.optim.SGD(p, lr=0.1))
    assert optimizer_health(optimizer).is_ok
    _, wrapped = stepped(lambda p: zclip.wrap(torch.optim.SGD(p, lr=0.1), "zclip"))
    assert optimizer_health(wrapped).is_ok
    groups = [torch.nn.Parameter(torch.zeros(4)) for _ in range(2)]
    mixed = torch.optim.SGD([{"params": groups[:1], "momentum": 0.9}, {"params": groups[1:]}], 0.1)
    for param in groups:
        param.grad = torch.ones(4)
    mixed.step()
    assert optimizer_health(mixed).is_ok
    mixed.state.clear()
    assert "was reset" in optimizer_health(mixed).problems[0]


def test_a_layer_that_was_unfrozen_late_is_in_order():
    params, optimizer = stepped(adam)
    late = torch.nn.Parameter(torch.zeros(4))
    optimizer.add_param_group({"params": [late]})
    for _ in range(3):
        for param in (*params, late):
            param.grad = torch.full((4,), 3.0)
        optimizer.step()
    health = optimizer_health(optimizer)
    assert (health.fewest_steps, health.most_steps) == (3, 23)
    assert health.is_ok


def test_sparse_gradients_are_looked_at():
    table = torch.nn.Embedding(10, 4, sparse=True)
    optimizer = torch.optim.SparseAdam(table.parameters())
    for row in range(5):
        optimizer.zero_grad()
        table(torch.tensor([row, 9])).square().sum().backward()
        optimizer.step()
    assert optimizer_health(optimizer).is_ok
    optimizer.state[table.weight]["exp_avg"][9, 0] = math.nan
    assert optimizer_health(optimizer).nonfinite == 1


def test_an_empty_parameter_is_passed_over():
    params = [torch.nn.Parameter(torch.zeros(4)), torch.nn.Parameter(torch.zeros(0))]
    optimizer = torch.optim.AdamW(params, lr=1e-3)
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    assert optimizer_health(optimizer).is_ok


class Reads(TorchDispatchMode):
    """Counts how often the host asks the device for a number."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("count", [2, 20])
def test_the_number_of_reads_does_not_grow_with_the_parameters(count):
    params = [torch.nn.Parameter(torch.ones(4)) for _ in range(count)]
    optimizer = torch.optim.AdamW(params, lr=torch.tensor(1e-3), fused=True)
    for param in params:
        param.grad = torch.ones(4)
    optimizer.step()
    with Reads() as reads:
        optimizer_health(optimizer)
    assert reads.count <= 8  # of the one row of sums that came over, which is in host memory
