"""Under a GradScaler: gradients arrive scaled, and flags and scales arrive as attributes."""

import copy
import math
import pickle
import warnings

import pytest
import torch
from torch.amp import GradScaler

import zclip
from tests.models import make_model
from tests.op_graph import OpGraph

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
        # Only who unscales the optimizer inside has to name the scaler.
        known = {"scaler": scaler} if unscale == "inside" else {}
        optimizer = zclip.ClippedOptimizer(
            make(list(model.parameters())), clipper, apply=apply, **known
        )
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


def test_a_scaler_that_is_none_is_named():
    with pytest.raises(TypeError, match=r"expected a torch\.amp\.GradScaler, got float"):
        zclip.wrap(torch.optim.AdamW(make_model().parameters()), scaler=2.0**16)


def test_a_copy_does_not_take_the_scaler_along():
    """The copy would be stepped by another one, or by none."""
    scaler = GradScaler("cpu", init_scale=2.0**10)
    model = make_model()
    optimizer = zclip.wrap(torch.optim.AdamW(model.parameters(), fused=True), scaler=scaler)
    scaler.scale(model(torch.ones(1, 5)).sum()).backward()
    scaler.unscale_(optimizer.inner)  # a scaler in this stage cannot be copied
    other = copy.deepcopy(optimizer)
    scaler.step(optimizer)
    scaler.update()
    other.step()
    assert pickle.loads(pickle.dumps(optimizer)).guards_on_device


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


def scaled_parameters(dtype, scale):
    params = [torch.nn.Parameter(torch.zeros(1000, dtype=dtype)) for _ in range(2)]
    for i, param in enumerate(params):
        generator = torch.Generator().manual_seed(i)
        param.grad = (scale * torch.randn(1000, generator=generator)).to(dtype)
    return params


@pytest.mark.parametrize("limit", [1.0, math.inf], ids=["clipped", "not clipped"])
@pytest.mark.parametrize("make", [zclip.GlobalNorm, lambda n: zclip.AdaGC(lambda_abs=n)])
def test_dividing_by_the_scale_and_clipping_are_one_pass_and_one_rounding(make, limit):
    scale = torch.tensor(3.0)
    params, same = (scaled_parameters(torch.bfloat16, 3.0) for _ in range(2))
    clipper = make(limit)
    with OpGraph() as graph:
        norm = clipper.step(params, grad_scale=scale)
    writes = [func for func, *_ in graph.calls if func in PASSES_THAT_WRITE]
    assert len(writes) == 1
    exact = torch.cat([p.grad.double() / 3.0 for p in same]).norm()
    torch.testing.assert_close(norm.double(), exact, rtol=1e-6, atol=0)
    coefs = clipper.result.coefs
    assert bool((coefs < 1).all()) == math.isfinite(limit)
    for param, twin, coef in zip(params, same, coefs, strict=True):
        wanted = (twin.grad.float() * (coef / 3.0).float()).to(torch.bfloat16)
        assert torch.equal(param.grad, wanted)


PASSES_THAT_WRITE = (torch.ops.zclip.scale_.default, torch.ops.zclip.clip_by_.default)


def test_a_skipped_step_is_zeros_under_a_scale_too():
    params = scaled_parameters(torch.float32, 8.0)
    params[0].grad[7] = math.inf
    clipper = zclip.ZClip()
    clipper.step(params, grad_scale=torch.tensor(8.0))
    assert clipper.result.coefs.tolist() == [-1.0, -1.0]
    assert not any(p.grad.any() for p in params)


def test_a_scale_of_one_touches_nothing():
    params, same = (scaled_parameters(torch.float32, 1.0) for _ in range(2))
    zclip.GlobalNorm(math.inf).step(params, grad_scale=torch.tensor(1.0))
    for param, twin in zip(params, same, strict=True):
        assert torch.equal(param.grad, twin.grad)


def test_a_rule_that_looks_at_weights_sees_gradients_of_their_true_size():
    params, same = (scaled_parameters(torch.float32, s) for s in (4.0, 1.0))
    for param, twin in zip(params, same, strict=True):
        param.data.fill_(0.5)
        twin.data.fill_(0.5)
    zclip.AGC().step(params, grad_scale=torch.tensor(4.0))
    zclip.AGC().step(same)
    for param, twin in zip(params, same, strict=True):
        torch.testing.assert_close(param.grad, twin.grad)
