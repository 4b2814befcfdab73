"""Under a GradScaler: gradients arrive scaled, and flags and scales arrive as attributes."""

import math
import warnings

import pytest
import torch
from torch.amp import GradScaler

import zclip
from tests.models import make_model

MAKE = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9, fused=True),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=0.01, fused=True),
    "AdamW-foreach": lambda params: torch.optim.AdamW(params, lr=0.01),
}


UNSCALE = pytest.mark.parametrize(
    "unscale",
    [False, True, "inside"],
    ids=["in step", "unscale_ by hand", "unscale_ the one inside"],
)


@pytest.fixture(params=MAKE, ids=str)
def make_optimizer(request):
    return MAKE[request.param]


def train(make, scaler, apply="inplace", unscale=False, batches=range(6)):
    """Train on random batches, numbered; "bad" is one whose loss overflows."""
    model = make_model()
    clipper = zclip.ZClip(warmup_steps=2, max_grad_norm=0.1)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*is not fused")
        optimizer = zclip.ClippedOptimizer(make(list(model.parameters())), clipper, apply=apply)
        for batch in batches:
            optimizer.zero_grad()
            generator = torch.Generator().manual_seed(99 if batch == "bad" else batch)
            loss = model(torch.randn(6, 5, generator=generator)).square().mean()
            if batch == "bad":
                loss = loss * math.inf
            scaler.scale(loss).backward()
            if unscale:
                scaler.unscale_(optimizer.inner if unscale == "inside" else optimizer)
            scaler.step(optimizer)
            scaler.update()
    return [p.detach().clone() for p in model.parameters()], optimizer


@UNSCALE
def test_the_scale_leaves_no_trace(make_optimizer, unscale):
    plain, _ = train(make_optimizer, GradScaler("cpu", enabled=False))
    scaler = GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    scaled, optimizer = train(make_optimizer, scaler, unscale=unscale)
    for one, two in zip(plain, scaled, strict=True):
        torch.testing.assert_close(two, one, rtol=1e-5, atol=1e-7)
    assert scaler.get_scale() == 2.0**13
    assert not hasattr(optimizer, "grad_scale")
    assert not hasattr(optimizer.inner, "found_inf")


@UNSCALE
def test_the_clip_and_the_scale_ride_together(unscale):
    plain, _ = train(MAKE["AdamW"], GradScaler("cpu", enabled=False))
    scaler = GradScaler("cpu", init_scale=2.0**10)
    folded, _ = train(MAKE["AdamW"], scaler, apply="grad_scale", unscale=unscale)
    for one, two in zip(plain, folded, strict=True):
        torch.testing.assert_close(two, one, rtol=1e-5, atol=1e-7)


def test_an_overflow_is_refused_and_backs_the_scale_off(make_optimizer):
    calm, _ = train(make_optimizer, GradScaler("cpu", init_scale=2.0**10, growth_interval=99))
    scaler = GradScaler("cpu", init_scale=2.0**10, growth_interval=99)
    shaken, _ = train(make_optimizer, scaler, batches=["bad", 0, 1, 2, "bad", 3, 4, 5])
    assert scaler.get_scale() == 2.0**8
    for one, two in zip(calm, shaken, strict=True):
        assert torch.equal(one, two)


def test_an_overflow_that_was_found_inside_is_refused_and_backs_the_scale_off(make_optimizer):
    calm, _ = train(make_optimizer, GradScaler("cpu", init_scale=2.0**10, growth_interval=99))
    scaler = GradScaler("cpu", init_scale=2.0**10, growth_interval=99)
    batches = ["bad", 0, 1, 2, "bad", 3, 4, 5]
    shaken, _ = train(make_optimizer, scaler, unscale="inside", batches=batches)
    assert scaler.get_scale() == 2.0**8
    for one, two in zip(calm, shaken, strict=True):
        assert torch.equal(one, two)


def test_flags_from_several_devices_still_make_exactly_one():
    """GradScaler adds up the flags of its devices; the fused kernels know only 0 and 1."""
    model = make_model()
    optimizer = zclip.wrap(torch.optim.AdamW(model.parameters(), fused=True))
    model(torch.ones(1, 5)).sum().backward()
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.found_inf, optimizer.grad_scale = torch.tensor(2.0), None
    optimizer.step()
    for old, param in zip(before, model.parameters(), strict=True):
        assert torch.equal(old, param)
        assert float(optimizer.state[param]["step"]) == 0
