"""What a fused step reports about weights and state, and when its plan is made anew."""

import math

import pytest
import torch
from torch import nn

from zclip.layout import (
    BAD_STATE,
    BAD_WEIGHT,
    FOREIGN_FIRST,
    FOREIGN_SECOND,
    FOREIGN_WEIGHT,
    FOREIGN_WRITE,
)
from zclip.optim import SGD, AdamW, Lion


def make(kind=AdamW, **settings):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 50), nn.Tanh(), nn.Linear(50, 2))
    return model, kind(model.named_parameters(), lr=1e-3, **settings)


def step(model, optimizer):
    optimizer.zero_grad()
    model(torch.randn(8, 6)).square().mean().backward()
    optimizer.step()
    return optimizer.result


@pytest.mark.parametrize("clipper", [None, "zclip"])
def test_norms_are_those_of_weights_and_of_updates(clipper):
    model, optimizer = make(clipper=clipper)
    step(model, optimizer)
    before = [p.detach().double().clone() for p in model.parameters()]
    result = step(model, optimizer)
    for i, (p, old) in enumerate(zip(model.parameters(), before, strict=True)):
        weight, update = p.detach().double().norm(), (old - p.detach().double()).norm()
        torch.testing.assert_close(result.weight_norms[i], weight, rtol=1e-6, atol=0)
        torch.testing.assert_close(result.update_norms[i], update, rtol=1e-3, atol=0)
    assert result.names == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert result.first_bad() is None
    assert result.first_foreign() is None


@pytest.mark.parametrize("clipper", [None, "zclip", "agc"])
def test_a_healthy_run_raises_no_flag(clipper):
    model, optimizer = make(clipper=clipper)
    for _ in range(20):
        assert float(step(model, optimizer).health_flags) == 0.0


@pytest.mark.parametrize(
    ("change", "bit"),
    [
        (lambda m, s: m[2].weight.data.mul_(1000), FOREIGN_WEIGHT),
        (lambda m, s: s["exp_avg"].mul_(1e4), FOREIGN_FIRST),
        (lambda m, s: s["exp_avg_sq"].view(-1)[3].mul_(2), FOREIGN_SECOND),
        (lambda m, s: s.update(exp_avg=torch.rand_like(s["exp_avg"])), FOREIGN_FIRST),
        (lambda m, s: setattr(m[2].weight, "data", m[2].weight.data + 1), FOREIGN_WEIGHT),
    ],
)
def test_a_change_from_outside_is_named_in_that_very_step(change, bit):
    model, optimizer = make()
    step(model, optimizer)
    change(model, optimizer.state[model[2].weight])
    result = step(model, optimizer)
    assert result.first_foreign() == "2.weight"
    assert int(result.foreign[2]) == bit
    assert int(result.health_flags) == FOREIGN_WRITE
    assert int(step(model, optimizer).health_flags) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("factor", [2.0, 0.5, 1024.0, -1.0])
@pytest.mark.parametrize(("key", "bit"), [(None, FOREIGN_WEIGHT), ("exp_avg", FOREIGN_FIRST)])
def test_a_multiple_is_seen_whatever_the_number_of_elements(key, bit, factor, dtype):
    """A power of two adds the same to all patterns, which a power of two of them would hide."""
    torch.manual_seed(0)
    param = nn.Parameter(torch.randn(1024, 64, dtype=dtype))
    optimizer = AdamW([param])
    param.grad = torch.randn_like(param)
    optimizer.step()
    (param.data if key is None else optimizer.state[param][key]).mul_(factor)
    optimizer.step()
    assert optimizer.result.foreign.tolist() == [bit]


def apart(optimizer):
    """Have it take the path of several devices and ranks."""
    optimizer._step_natively = lambda loss, guard: optimizer._step_apart(loss, None, guard)


@pytest.mark.parametrize("prepare", [lambda optimizer: None, apart], ids=["native", "apart"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_converted_model_is_not_compared_with_what_it_was(dtype, prepare):
    model, optimizer = make()
    prepare(optimizer)
    step(model, optimizer)
    model.to(dtype)
    for is_seen in (False, True):
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
        assert (optimizer.result.first_foreign() is not None) == is_seen
        model[0].weight.data.mul_(2)


def test_a_parameter_of_another_dtype_in_the_same_memory_makes_a_new_plan():
    """Conversions to and fro may reuse memory: bytes behind the smaller tensor belong to others."""
    memory = torch.ones(64)
    param = nn.Parameter(torch.empty(0))
    param.data = memory
    optimizer = AdamW([param])
    param.grad = torch.ones(64)
    optimizer.step()
    memory.fill_(1.0)
    param.data = memory.view(torch.bfloat16)[:64]
    param.grad = torch.ones(64, dtype=torch.bfloat16)
    optimizer.step()
    assert torch.equal(memory[32:], torch.ones(32))
    assert int(optimizer.result.health_flags) == 0


def test_telemetry_may_be_switched_in_the_middle_of_a_run():
    model, optimizer = make()
    step(model, optimizer)
    optimizer.telemetry = False
    assert len(step(model, optimizer).rows) == 0
    optimizer.telemetry = True
    assert float(step(model, optimizer).weight_norm) > 0.0


def test_an_infinite_moment_is_seen_in_the_step_it_happens():
    model, optimizer = make()
    step(model, optimizer)
    optimizer.state[model[0].bias]["exp_avg_sq"][7] = math.inf
    result = step(model, optimizer)
    assert result.first_bad() == "0.bias"
    assert result.nonfinite[1].tolist() == [0.0, 0.0, 1.0]
    assert int(result.health_flags) & BAD_STATE


@pytest.mark.parametrize("kind", [AdamW, SGD, Lion])
def test_a_nan_weight_is_seen(kind):
    model, optimizer = make(kind)
    step(model, optimizer)
    with torch.no_grad():
        model[0].weight[0, 0] = math.nan
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert optimizer.result.first_bad() == "0.weight"
    assert int(optimizer.result.health_flags) & BAD_WEIGHT


def test_a_skipped_step_reports_nothing_and_loses_no_knowledge():
    model, optimizer = make(clipper="zclip")
    step(model, optimizer)
    model[0].bias.data[0] += 1
    for p in model.parameters():
        p.grad = torch.full_like(p, math.nan)
    optimizer.step()
    assert float(optimizer.result.taken) == 0.0
    assert optimizer.result.first_foreign() is None
    assert step(model, optimizer).first_foreign() == "0.bias"


def test_loading_a_state_begins_a_new_comparison():
    model, optimizer = make()
    step(model, optimizer)
    saved = optimizer.state_dict()
    optimizer.load_state_dict(saved)
    assert step(model, optimizer).first_foreign() is None


def test_parameters_that_join_do_not_make_others_forget():
    model, optimizer = make()
    step(model, optimizer)
    extra = nn.Parameter(torch.ones(3))
    optimizer.add_param_group({"params": [("extra", extra)]})
    model[0].bias.data[0] += 1
    extra.grad = torch.ones(3)
    optimizer.step()
    assert optimizer.result.first_foreign() == "0.bias"
    assert optimizer.result.names[-1] == "extra"


def test_an_idle_parameter_keeps_what_is_known_of_it():
    model, optimizer = make()
    step(model, optimizer)
    model[0].weight.grad = None
    optimizer.step()
    model[0].weight.data[0, 0] += 1
    assert step(model, optimizer).first_foreign() == "0.weight"


def test_memory_that_moves_makes_a_new_plan():
    model, optimizer = make(clipper="zclip")
    step(model, optimizer)
    for p in model.parameters():
        p.data = p.data.clone()
        state = optimizer.state[p]
        state["exp_avg"].data = state["exp_avg"].data.clone()
    before = model[0].weight.detach().clone()
    result = step(model, optimizer)
    assert not torch.equal(model[0].weight, before)
    assert int(result.health_flags) == 0


def test_a_cleared_state_begins_anew():
    model, optimizer = make()
    step(model, optimizer)
    optimizer.state.clear()
    step(model, optimizer)
    assert float(optimizer.state[model[0].weight]["step"]) == 1.0


def test_telemetry_changes_no_bit_of_the_weights():
    def run(telemetry):
        model, optimizer = make(clipper="zclip", telemetry=telemetry)
        for seed in range(5):
            torch.manual_seed(seed)
            step(model, optimizer)
        return model, optimizer.result

    (watched, _), (bare, result) = run(True), run(False)
    for a, b in zip(watched.parameters(), bare.parameters(), strict=True):
        assert torch.equal(a, b)
    assert len(result.rows) == 0
    assert float(result.taken) == 1.0


def test_plans_of_optimizers_that_are_gone_hold_no_memory():
    import gc
    import weakref

    model, optimizer = make()
    step(model, optimizer)
    moment = weakref.ref(optimizer.state[model[0].weight]["exp_avg"])
    del optimizer
    gc.collect()
    assert moment() is None
