"""A GradScaler under the healer: gradients are divided once, whoever divides them."""

import math

import pytest
import torch
from torch import nn

import zclip
from heal import Healer
from tests.heal.runs import quick

SCALE = 1024.0
FUSED = pytest.mark.parametrize("fused", [True, False], ids=["fused", "not fused"])


def build(fused):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)
    return model, optimizer, torch.amp.GradScaler("cpu", init_scale=SCALE, growth_interval=7)


def batches(count=20):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(16, 4, generator=generator) for _ in range(count)]


def backward(model, scaler, batch):
    loss = (model(batch) - batch.sum(1, keepdim=True)).square().mean()
    scaler.scale(loss).backward()
    return loss


def bare(fused, overflows=()):
    model, optimizer, scaler = build(fused)
    for step, batch in enumerate(batches()):
        backward(model, scaler, batch)
        if step in overflows:
            model[0].weight.grad[0, 0] = math.inf
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return model, scaler


def healed(fused, unscale, overflows=(), apply="inplace"):
    model, optimizer, scaler = build(fused)
    given = optimizer
    if apply == "grad_scale":
        given = zclip.wrap(optimizer, "global_norm", max_norm=math.inf, apply=apply)
    healer = Healer(model, given, config=quick(lag=0), scaler=scaler)
    healer.exits.dismiss()
    norms = []
    for step, batch in enumerate(healer.batches(batches())):
        loss = backward(model, scaler, batch)
        if step in overflows:
            model[0].weight.grad[0, 0] = math.inf
        if unscale == "for the bare optimizer":
            scaler.unscale_(optimizer)
        elif unscale == "for the wrapper":
            scaler.unscale_(healer.optimizers[0])
        if unscale != "in step":
            grads = [p.grad for p in model.parameters()]
            norms.append(float(torch.nn.utils.get_total_norm(grads)))
        healer.step(loss)
        optimizer.zero_grad()
    if norms:
        assert healer.latest.norm == pytest.approx(norms[-1], rel=1e-5)
    return model, scaler, healer


@pytest.mark.filterwarnings("ignore:.*is not fused")
@pytest.mark.parametrize("unscale", ["in step", "for the bare optimizer", "for the wrapper"])
@pytest.mark.parametrize("overflows", [(), (3, 11)], ids=["calm", "overflows"])
@FUSED
def test_gradients_are_divided_once_whoever_does_it(fused, unscale, overflows):
    model, scaler, _ = healed(fused, unscale, overflows)
    theirs, their_scaler = bare(fused, overflows)
    for one, two in zip(model.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(one, two)
    assert scaler.get_scale() == their_scaler.get_scale()


@pytest.mark.parametrize("unscale", ["in step", "for the bare optimizer"])
def test_a_scale_that_the_fused_step_applies_is_applied_once(unscale):
    model, _, _ = healed(True, unscale, apply="grad_scale")
    theirs, _ = bare(True)
    for one, two in zip(model.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-7)


@pytest.mark.filterwarnings("ignore:.*is not fused")
@FUSED
def test_an_overflow_names_its_tensor_to_whoever_looks(fused):
    _, _, healer = healed(fused, "in step", overflows=(19,))
    assert healer.latest.blocked
    assert healer.guarded.name_of(healer.latest.worst) == "0.weight"


@FUSED
def test_a_step_without_gradients_is_none_and_does_not_raise(fused):
    model, optimizer, scaler = build(fused)
    healer = Healer(model, optimizer, config=quick(), scaler=scaler)
    healer.exits.dismiss()
    scaler.scale(torch.ones(()))
    healer.step(torch.ones(()))
    assert healer.last_step == 0
    assert scaler.get_scale() == SCALE


@pytest.mark.filterwarnings("ignore:.*is not fused")
@FUSED
def test_gradients_after_a_step_that_failed_are_divided_again(fused):
    model, optimizer, scaler = build(fused)
    healer = Healer(model, optimizer, config=quick(lag=0), scaler=scaler)
    healer.exits.dismiss()
    first, second = batches(2)
    handle = optimizer.register_step_pre_hook(lambda *_: 1 / 0)
    loss = backward(model, scaler, first)
    with pytest.raises(ZeroDivisionError):
        healer.step(loss)
    handle.remove()
    optimizer.zero_grad()
    healer.step(backward(model, scaler, second))
    norm = float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]))
    assert healer.latest.norm == pytest.approx(norm, rel=1e-5)
    assert norm < SCALE


def test_a_second_step_by_the_scaler_is_refused_with_what_was_wanted():
    model, optimizer, scaler = build(True)
    healer = Healer(model, optimizer, config=quick(), scaler=scaler)
    healer.exits.dismiss()
    loss = backward(model, scaler, batches(1)[0])
    scaler.step(optimizer)
    with pytest.raises(RuntimeError, match=r"AdamW: expected healer\.step .* leave out scaler"):
        healer.step(loss)
