"""scale_, zero_nonfinite_ and clamp_: what may be done to a gradient in place."""

import math

import pytest
import torch

from tests.backends import BACKENDS
from tests.grads import DTYPES, SIZES, dtype_name, make_grads
from tests.test_grad_stats import strided_views
from zclip.layout import KEEP, REFUSE


def coefs_of(*values):
    return torch.tensor(values, dtype=torch.float64)


def rounded_once(grad, coef):
    """The product of the exact numbers, rounded to the dtype; float32 may pass through float."""
    if grad.dtype == torch.float64:
        return grad * coef
    return (grad.float() * torch.tensor(coef, dtype=torch.float32)).to(grad.dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@pytest.mark.parametrize("size", SIZES)
def test_each_gradient_gets_its_own_coefficient(backend, size, dtype):
    grads = make_grads([(size,), (5,), (size,)], dtype)
    wanted = [rounded_once(g, c) for g, c in zip(grads, (0.3, 0.7, 0.011), strict=True)]
    backend.scale_(grads, coefs_of(0.3, 0.7, 0.011))
    for grad, want in zip(grads, wanted, strict=True):
        # The reference multiplies in float64; one ulp lies between the two roundings.
        torch.testing.assert_close(grad, want, rtol=2 * torch.finfo(dtype).eps, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=dtype_name)
@pytest.mark.parametrize("path", ["native-portable", "native-avx2"])
@pytest.mark.parametrize("coef", [0.1, 0.5, 1.5, 3.0, 1e-3, 1e-7, 70_000.0])
def test_all_16_bit_numbers_round_as_torch_does(path, dtype, coef):
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    grads = [every.clone(), every[:13].clone()]
    BACKENDS[path].scale_(grads, coefs_of(coef, coef))
    for grad, source in zip(grads, (every, every[:13]), strict=True):
        want = rounded_once(source, coef)
        assert torch.equal(grad.isnan(), want.isnan())
        assert torch.equal(grad.nan_to_num(0.0), want.nan_to_num(0.0))


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
def test_the_vector_path_has_the_bits_of_the_portable_one(dtype):
    def scaled(path):
        grads = make_grads([(s,) for s in SIZES], dtype)
        BACKENDS[path].scale_(grads, torch.linspace(0, 2, len(grads), dtype=torch.float64))
        return torch.cat(grads)

    assert torch.equal(scaled("native-portable"), scaled("native-avx2"))


@pytest.mark.parametrize("path", ["native-portable", "native-avx2"])
def test_rounding_does_not_carry_a_nan_into_zero(path):
    all_ones = torch.tensor([-1], dtype=torch.int64).view(torch.float64)  # a NaN, every bit set
    grad = torch.ones(45, dtype=torch.bfloat16)
    BACKENDS[path].scale_([grad], all_ones)
    assert grad.isnan().all()


def test_a_coefficient_of_one_leaves_every_bit(backend):
    bits = torch.tensor([0x7F800001, 0x7FC00000, 1, 0x80000000, 0x3F800000], dtype=torch.int64)
    grad = bits.to(torch.int32).view(torch.float32).repeat(9)
    before = grad.view(torch.int32).clone()
    backend.scale_([grad], coefs_of(KEEP))
    assert torch.equal(grad.view(torch.int32), before)


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
def test_a_refused_gradient_becomes_zero_even_where_it_was_infinite(backend, dtype):
    grads = make_grads([(100,), (100,)], dtype)
    grads[0][3], grads[0][70] = math.nan, math.inf
    kept = grads[1].clone()
    backend.scale_(grads, coefs_of(REFUSE, KEEP))
    assert not grads[0].any()
    assert torch.equal(grads[1], kept)


def test_multiplying_by_zero_is_ieee_multiplication(backend):
    grad = torch.tensor([1.0, math.inf, -2.0])
    backend.scale_([grad], coefs_of(0.0))
    assert grad.isnan().tolist() == [False, True, False]
    assert grad[[0, 2]].tolist() == [0, 0]


def test_a_coefficient_too_small_for_float32_is_still_exact(backend):
    grad = torch.full((40,), 3e38)
    backend.scale_([grad], coefs_of(1e-41))
    torch.testing.assert_close(grad, torch.full((40,), 3e-3), rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", [n for n, _ in strided_views() if n != "expanded"])
@pytest.mark.parametrize("op", ["scale_", "clamp_", "zero_nonfinite_"])
def test_strides_do_not_matter_and_gaps_stay_untouched(backend, op, name):
    view = dict(strided_views())[name]
    whole = torch.zeros(0).set_(view.untyped_storage())
    mask = torch.zeros_like(whole, dtype=torch.bool)
    mask.as_strided(view.shape, view.stride(), view.storage_offset()).fill_(True)
    outside = whole[~mask].clone()
    if op == "scale_":
        want = view * 0.5
        backend.scale_([view], coefs_of(0.5))
    elif op == "clamp_":
        want = view.clamp(-0.5, 0.5)
        backend.clamp_([view], 0.5)
    else:
        view.masked_fill_(view > 1, math.nan)
        want = view.nan_to_num(0.0)
        backend.zero_nonfinite_([view], backend.grad_stats([view]))
    assert torch.equal(view, want)
    assert torch.equal(whole[~mask], outside)


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
def test_only_bad_elements_become_zero(backend, dtype):
    grads = make_grads([(20_000,), (50,)], dtype)
    for where, value in ((0, math.nan), (16_384, math.inf), (19_999, -math.inf)):
        grads[0][where] = value
    want = [g.nan_to_num(0.0, 0.0, 0.0) for g in grads]
    backend.zero_nonfinite_(grads, backend.grad_stats(grads))
    assert all(torch.equal(g, w) for g, w in zip(grads, want, strict=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@pytest.mark.parametrize("limit", [0.0, 0.1, 0.5, 1e30, math.inf])
def test_clamp_does_what_torch_does(backend, limit, dtype):
    grads = make_grads([(513,), (7,)], dtype)
    grads[0][:3] = torch.tensor([math.nan, math.inf, -math.inf])
    bounds = limit  # torch refuses a limit that float16 cannot hold; it bounds nothing
    if limit > torch.finfo(dtype).max:
        bounds = math.inf
    want = [g.clamp(-bounds, bounds) for g in grads]
    backend.clamp_(grads, limit)
    for grad, clamped in zip(grads, want, strict=True):
        torch.testing.assert_close(grad, clamped, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("value", [-2.0, 2.0])
def test_one_element_beyond_its_bounds_is_clamped_wherever_it_is(backend, value):
    grads = [torch.full((97,), 0.25) for _ in range(97)]
    for at, grad in enumerate(grads):
        grad[at] = value
    want = [g.clamp(-1.0, 1.0) for g in grads]
    backend.clamp_(grads, 1.0)
    assert all(torch.equal(g, w) for g, w in zip(grads, want, strict=True))
