"""The drop-in functions do what torch's do, and more exactly."""

import copy
import math

import pytest
import torch
from torch.nn import utils as torch_utils

import zclip
from tests.grads import DTYPES, dtype_name, make_grads


def parameters(shapes=((20, 30), (7,), (3, 1, 2)), dtype=torch.float32, scale=1.0, seed=0):
    result = []
    for grad in make_grads(shapes, dtype, seed, scale):
        result.append(torch.nn.Parameter(torch.zeros_like(grad)))
        result[-1].grad = grad
    return result


def grads_of(params):
    return [p.grad for p in params]


def exact_norm(params):
    return math.sqrt(sum(p.grad.double().square().sum().item() for p in params))


@pytest.mark.parametrize("norm_type", [2.0, 2, "inf", math.inf, 1.0, 3.0, 0.5])
@pytest.mark.parametrize("max_norm", [0.0, 0.5, 1e6, math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=dtype_name)
def test_it_agrees_with_torch(dtype, max_norm, norm_type):
    ours, theirs = parameters(dtype=dtype), parameters(dtype=dtype)
    norm = zclip.clip_grad_norm_(ours, max_norm, norm_type)
    expected = torch_utils.clip_grad_norm_(theirs, max_norm, float(norm_type))
    torch.testing.assert_close(norm, expected, rtol=1e-6, atol=0)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("bad", [[math.nan], [math.inf], [-math.inf], [math.nan, math.inf]])
@pytest.mark.parametrize("norm_type", [2.0, math.inf, 1.0])
def test_propagating_a_bad_element_is_what_torch_does(norm_type, bad):
    ours, theirs = parameters(), parameters()
    for params in (ours, theirs):
        params[0].grad.flatten()[: len(bad)] = torch.tensor(bad)
    norm = zclip.clip_grad_norm_(ours, 1.0, norm_type)
    expected = torch_utils.clip_grad_norm_(theirs, 1.0, norm_type)
    torch.testing.assert_close(norm, expected, equal_nan=True)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.grad, b.grad, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
def test_the_norm_is_exact_for_every_dtype(dtype):
    params = parameters([(300, 301)] * 5, dtype)
    exact = exact_norm(params)
    for norm in (
        zclip.clip_grad_norm_(params, math.inf),
        zclip.get_total_norm(grads_of(params)),
    ):
        assert norm.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert norm.shape == ()
        assert norm.item() == pytest.approx(exact, rel=1e-6)
    zclip.clip_grad_norm_(params, 1.0)
    assert exact_norm(params) == pytest.approx(1.0, rel=2 * torch.finfo(dtype).eps + 2e-6)


def test_gradients_whose_norm_overflows_float32_are_clipped_not_lost():
    params = parameters(scale=3e37)
    params[0].grad[0, :20] = 3e38
    exact, direction = exact_norm(params), params[1].grad.double() / exact_norm(params)
    assert exact > torch.finfo(torch.float32).max
    assert zclip.clip_grad_norm_(params, 1.0).isinf()
    torch.testing.assert_close(params[1].grad.double(), direction, rtol=1e-6, atol=0)


def test_skip_makes_every_gradient_zero():
    params = parameters()
    params[1].grad[0] = math.inf
    assert zclip.clip_grad_norm_(params, 1.0, nonfinite="skip").isinf()
    assert not any(p.grad.any() for p in params)


@pytest.mark.parametrize("norm_type", [2.0, 1.0, math.inf])
def test_zero_drops_the_bad_elements_and_clips_the_rest(norm_type):
    ours, clean = parameters(), parameters()
    for params, value in ((ours, math.nan), (clean, 0.0)):
        params[0].grad[2, 3] = value
    norm = zclip.clip_grad_norm_(ours, 0.5, norm_type, nonfinite="zero")
    torch.testing.assert_close(norm, zclip.clip_grad_norm_(clean, 0.5, norm_type))
    for a, b in zip(ours, clean, strict=True):
        torch.testing.assert_close(a.grad, b.grad)


@pytest.mark.parametrize("norm_type", [2.0, 1.0, math.inf])
@pytest.mark.parametrize("how", [{"error_if_nonfinite": True}, {"nonfinite": "error"}])
def test_the_error_names_the_bad_parameters_and_nothing_is_changed(how, norm_type):
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    model[1].weight.grad[0, :2] = torch.tensor([math.nan, math.inf])
    before = [p.grad.clone() for p in model.parameters()]

    with pytest.raises(RuntimeError, match=r"parameters\[2\] \(2, 4\): 1 NaN, 1 Inf"):
        zclip.clip_grad_norm_(model.parameters(), 1.0, norm_type, **how)
    with pytest.raises(RuntimeError, match=r"1\.weight \(2, 4\): 1 NaN, 1 Inf"):
        zclip.clip_grad_norm_(model.named_parameters(), 1.0, norm_type, **how)

    for p, was in zip(model.parameters(), before, strict=True):
        torch.testing.assert_close(p.grad, was, rtol=0, atol=0, equal_nan=True)


def test_the_error_for_an_overflowing_norm_names_the_largest():
    params = parameters([(5,), (5,)], scale=1e38)
    params[1].grad.fill_(3e38)
    with pytest.raises(RuntimeError, match=r"norm overflows; largest: parameters\[1\]"):
        zclip.clip_grad_norm_(params, 1.0, error_if_nonfinite=True)


def test_many_bad_parameters_are_named_in_short():
    params = parameters([(2,)] * 30)
    for p in params:
        p.grad[0] = math.nan
    with pytest.raises(RuntimeError, match="and 22 more"):
        zclip.clip_grad_norm_(params, 1.0, error_if_nonfinite=True)


def test_a_good_step_raises_nothing_in_mode_error():
    ours, theirs = parameters(), parameters()
    zclip.clip_grad_norm_(ours, 0.1, error_if_nonfinite=True)
    torch_utils.clip_grad_norm_(theirs, 0.1)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def test_parameters_may_come_in_any_form():
    single = parameters([(40,)])[0]
    expected = exact_norm([single])
    for form in (single, [single], (single,), iter([single]), (p for p in [single]), {single}):
        assert zclip.clip_grad_norm_(form, 1e9).item() == pytest.approx(expected, rel=1e-6)
    assert zclip.clip_grad_norm_([("w", single)], 1e9).item() == pytest.approx(expected, rel=1e-6)
    assert zclip.get_total_norm(single.grad).item() == pytest.approx(expected, rel=1e-6)


def test_parameters_without_gradients_are_passed_over():
    params = parameters()
    params.insert(1, torch.nn.Parameter(torch.ones(3)))
    assert zclip.clip_grad_norm_(params, 1.0).item() == pytest.approx(
        exact_norm(parameters()), rel=1e-6
    )


@pytest.mark.parametrize("nothing", [[], [torch.nn.Parameter(torch.ones(3))]], ids=["none", "bare"])
def test_without_any_gradient_the_norm_is_zero(nothing):
    assert torch.equal(zclip.clip_grad_norm_(nothing, 1.0), torch.tensor(0.0))
    assert torch.equal(zclip.get_total_norm([]), torch.tensor(0.0))
    zclip.clip_grad_value_(nothing, 1.0)


def test_an_empty_generator_is_worth_a_warning():
    with pytest.warns(UserWarning, match="empty generator"):
        zclip.clip_grad_norm_((p for p in ()), 1.0)


def test_tied_parameters_count_and_scale_once():
    params = parameters()
    alone = copy.deepcopy(params)
    for p, q in zip(params, alone, strict=True):
        q.grad = p.grad.clone()
    shared = torch.nn.Parameter(torch.zeros_like(params[0]))
    shared.grad = params[0].grad

    norm = zclip.clip_grad_norm_([*params, params[1], shared], 0.5)

    torch.testing.assert_close(norm, zclip.clip_grad_norm_(alone, 0.5), rtol=0, atol=0)
    for p, q in zip(params, alone, strict=True):
        assert torch.equal(p.grad, q.grad)


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
def test_clip_grad_value_agrees_with_torch(dtype):
    ours, theirs = parameters(dtype=dtype), parameters(dtype=dtype)
    zclip.clip_grad_value_(ours, 0.3)
    torch_utils.clip_grad_value_(theirs, 0.3)
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a.grad, b.grad)


def test_get_total_norm_raises_only_when_asked():
    tensors = [torch.ones(3), torch.tensor([1.0, math.nan])]
    assert zclip.get_total_norm(tensors).isnan()
    with pytest.raises(RuntimeError, match=r"tensors\[1\] \(2,\): 1 NaN, 0 Inf"):
        zclip.get_total_norm(tensors, error_if_nonfinite=True)


def test_gradients_that_carry_a_graph_are_clipped_without_growing_it():
    x = torch.ones(3, requires_grad=True)
    (grad,) = torch.autograd.grad((x**3).sum(), x, create_graph=True)
    x.grad = grad
    norm = zclip.clip_grad_norm_(x, 1.0)
    assert not norm.requires_grad
    assert norm.item() == pytest.approx(math.sqrt(27))


def test_it_compiles_without_a_graph_break():
    def step(params):
        return zclip.clip_grad_norm_(params, 0.5)

    ours, theirs = parameters(), parameters()
    norm = torch.compile(step, fullgraph=True, backend="aot_eager")(ours)
    torch.testing.assert_close(norm, step(theirs))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.grad, b.grad)
