"""grad_stats: every backend against float64, and against the shapes that break reductions."""

import pytest
import torch

from tests.backends import BACKENDS
from tests.grads import DTYPES, SIZES, dtype_name, exact_sumsq, make_grads
from zclip.layout import INF, NAN, SUMSQ

# Relative error of the sum of squares against float64. Inputs are cast to the dtype first, so this
# measures accumulation only, whose bound csrc/math/grad_stats.h proves.
RTOL = 1e-6


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@pytest.mark.parametrize("size", SIZES)
def test_sum_of_squares_matches_float64(backend, size, dtype):
    grads = make_grads([(size,), (3,), (size,)], dtype)

    stats = backend.grad_stats(grads)

    assert stats.dtype == torch.float64
    torch.testing.assert_close(stats[:, SUMSQ], exact_sumsq(grads), rtol=RTOL, atol=0)
    assert not stats[:, [NAN, INF]].any()


@pytest.mark.parametrize("value", [1.0, 1.1, -0.3, 3e-3, 1 + 2**-12])
def test_equal_elements_do_not_pile_up_rounding_errors(backend, value):
    grads = [torch.full((100_003,), value)]
    torch.testing.assert_close(
        backend.grad_stats(grads)[:, SUMSQ], exact_sumsq(grads), rtol=RTOL, atol=0
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=dtype_name)
@pytest.mark.parametrize("exponent", range(-40, 39, 3))
def test_no_magnitude_overflows_or_vanishes(backend, exponent, dtype):
    grads = make_grads([(700,), (17,)], dtype, scale=10.0**exponent * 0.3)
    assert all(g.isfinite().all() for g in grads)

    stats = backend.grad_stats(grads)

    torch.testing.assert_close(stats[:, SUMSQ], exact_sumsq(grads), rtol=RTOL, atol=0)
    assert not stats[:, [NAN, INF]].any()


def test_a_tiny_tail_beside_large_elements_is_not_lost(backend):
    grads = [torch.cat([torch.full((20_000,), 1e-25), torch.tensor([1e-25, 3e30])])]
    torch.testing.assert_close(
        backend.grad_stats(grads)[:, SUMSQ], exact_sumsq(grads), rtol=RTOL, atol=0
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@pytest.mark.parametrize("where", [0, 1, 63, 64, 511, 512, 16383, 16384, 19_999])
def test_one_bad_element_is_counted_and_left_out_of_the_norm(backend, where, dtype):
    grads = make_grads([(20_000,), (20_000,), (20_000,)], dtype)
    for grad in grads[:2]:
        grad[where] = 0
    healthy = exact_sumsq(grads)
    grads[0][where] = float("nan")
    grads[1][where] = float("-inf")

    stats = backend.grad_stats(grads)

    assert stats[:, NAN].tolist() == [1, 0, 0]
    assert stats[:, INF].tolist() == [0, 1, 0]
    torch.testing.assert_close(stats[:, SUMSQ], healthy, rtol=RTOL, atol=0)


def test_every_bad_element_is_counted(backend):
    grad = torch.zeros(50_000)
    grad[::3] = float("nan")
    grad[1::3] = float("inf")
    grad[4::3] = float("-inf")
    stats = backend.grad_stats([grad])
    assert stats.tolist() == [[0.0, 16_667.0, 16_667.0]]


@pytest.mark.parametrize("payload", [0x7F800001, 0x7FC00000, 0xFFFFFFFF, 0x7FFFFFFF])
def test_a_nan_is_a_nan_whatever_its_payload(backend, payload):
    bits = torch.tensor([payload], dtype=torch.int64).to(torch.int32)
    assert backend.grad_stats([bits.view(torch.float32)]).tolist() == [[0.0, 1.0, 0.0]]


def strided_views():
    base = make_grads([(24, 36)])[0]
    image = make_grads([(2, 3, 8, 8)])[0]
    yield "transposed", base.t()
    yield "channels-last", image.contiguous(memory_format=torch.channels_last)
    yield "permuted", image.permute(2, 0, 3, 1)
    yield "unaligned", base.flatten()[3:-2]
    yield "rows with gaps", base[::2]
    yield "columns with gaps", base[:, 5:17]
    yield "one column", base[:, 1]
    yield "expanded", base[:1].expand(50, 36)
    yield "scalar", base[0, 0]
    yield "empty", base[:0]
    yield "size-one dims", base.view(24, 1, 36, 1).transpose(0, 1)


@pytest.mark.parametrize("name", [name for name, _ in strided_views()])
def test_strides_do_not_matter(backend, name):
    view = dict(strided_views())[name]
    before = view.clone()
    torch.testing.assert_close(
        backend.grad_stats([view])[:, SUMSQ], exact_sumsq([view]), rtol=RTOL, atol=0
    )
    assert torch.equal(view, before)


def test_dtypes_may_mix(backend):
    grads = [make_grads([(1000,)], dtype, seed)[0] for seed, dtype in enumerate(DTYPES * 2)]
    torch.testing.assert_close(
        backend.grad_stats(grads)[:, SUMSQ], exact_sumsq(grads), rtol=RTOL, atol=0
    )


def magnitudes(size):
    """Float32 gradients of every magnitude, alone and mixed, with and without zeros before them."""
    base = make_grads([(size,)])[0]
    tiny, huge = (1e-45, 1e-40, 1e-25, 1e-20, 4.5e-15, 1e-13), (1e18, 1e19, 1e25, 1e37)
    for scale in (0.0, -0.0, *tiny, 1.0, *huge):
        yield base * scale
        for zeros in (1, 511, 512, 513, 16384, size - 1):
            grad = base * scale
            grad[:zeros] = 0.0
            yield grad
        mixed = base * scale
        mixed[600:900] = base[600:900] * 1e-3
        mixed[17_000:] = base[17_000:] * 1e-30
        yield mixed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=dtype_name)
def test_every_magnitude_is_within_the_bound_beside_zeros_and_beside_others(backend, dtype):
    grads = [g.to(dtype) for g in magnitudes(20_001)]
    stats = backend.grad_stats(grads)
    torch.testing.assert_close(stats[:, SUMSQ], exact_sumsq(grads), rtol=RTOL, atol=0)
    assert not stats[:, [NAN, INF]].any()


def test_a_bad_element_behind_zeros_or_beside_tiny_and_huge_ones_is_counted(backend):
    grads = [torch.zeros(20_000), torch.full((20_000,), 1e-30), torch.full((20_000,), 1e30)]
    healthy = exact_sumsq([g[:-2] for g in grads])
    for grad in grads:
        grad[-2], grad[-1] = float("nan"), float("-inf")
    stats = backend.grad_stats(grads)
    assert stats[:, [NAN, INF]].tolist() == [[1, 1]] * 3
    torch.testing.assert_close(stats[:, SUMSQ], healthy, rtol=RTOL, atol=0)


@pytest.mark.parametrize("scale", [1e-150, 1e-100, 1e-20, 1e20, 1e100, 1e150])
def test_float64_is_measured_at_every_magnitude(backend, scale):
    grads = make_grads([(20_001,)], torch.float64, scale=scale)
    torch.testing.assert_close(
        backend.grad_stats(grads)[:, SUMSQ], exact_sumsq(grads), rtol=RTOL, atol=0
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
def test_the_vector_path_has_the_bits_of_the_portable_one(dtype):
    grads = make_grads([(s,) for s in SIZES] + [(123_457,)], dtype)
    grads += [g.to(dtype) for g in magnitudes(20_001)]
    grads += [g[1:] for g in grads if g.numel() > 1]
    portable = BACKENDS["native-portable"].grad_stats(grads)
    assert torch.equal(portable, BACKENDS["native-avx2"].grad_stats(grads))
