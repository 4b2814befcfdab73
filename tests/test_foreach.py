"""Without compiled kernels: torch's foreach operators, held to the contract of the kernels."""

import os
import subprocess
import sys

import pytest
import torch

from zclip import reference
from zclip.backends import foreach
from zclip.layout import INF, KEEP, NAN, REFUSE, SUMSQ

SIZES = (0, 1, foreach.ROW - 1, foreach.ROW, foreach.ROW + 1, foreach.GATHERED + 77, 5_000_003)


def exact(tensor):
    return tensor.double().square().sum().item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_sums_of_squares_are_exact_to_1e_6_where_torchs_own_are_not(dtype):
    generator = torch.Generator().manual_seed(0)
    grads = [torch.randn(size, generator=generator).to(dtype) for size in SIZES]
    sums = foreach.grad_stats(grads)[:, SUMSQ]
    assert sums.tolist() == pytest.approx([exact(g) for g in grads], rel=1e-6)
    if dtype == torch.float32:  # the reason for the rows
        own = torch.stack(torch._foreach_norm(grads)).double().square()
        assert own.tolist() != pytest.approx([exact(g) for g in grads], rel=1e-4)


def test_equal_elements_do_not_add_up_their_rounding_errors():
    grads = [torch.full((3_000_000,), 0.1), torch.full((200,), 1 / 3)]
    sums = foreach.grad_stats(grads)[:, SUMSQ]
    assert sums.tolist() == pytest.approx([exact(g) for g in grads], rel=1e-6)


@pytest.mark.parametrize("value", [0.0, 1e-44, 1e-25, 1e-17, 1e17, 1e30])
@pytest.mark.parametrize("size", [5, 100_000])
def test_tiny_and_huge_gradients_are_measured_like_any_others(value, size):
    grads = [torch.full((size,), value), torch.ones(3)]
    sums = foreach.grad_stats(grads)[:, SUMSQ]
    assert sums.tolist() == pytest.approx([exact(g) for g in grads], rel=1e-6)


@pytest.mark.parametrize("size", [5, 100_000])
def test_bad_elements_are_counted_and_left_out_of_the_sum(size):
    bad = torch.ones(size)
    bad[0], bad[-1], bad[2] = torch.nan, torch.inf, -torch.inf
    stats = foreach.grad_stats([torch.ones(4), bad, torch.ones(2)])
    assert stats[1].tolist() == [size - 3, 1, 2]
    assert stats[:, [NAN, INF]].sum() == 3


def test_the_bits_do_not_depend_on_the_number_of_threads():
    grads = [torch.randn(size) for size in (*SIZES, 9_000_000)]
    before = torch.get_num_threads()
    try:
        measured = []
        for threads in (1, 2, 3, 8):
            torch.set_num_threads(threads)
            measured.append(foreach.grad_stats(grads))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(stats, measured[0]) for stats in measured)


def test_a_view_that_is_not_contiguous_is_measured_and_clipped():
    grad = torch.randn(400, 300)[:, ::2]
    expected = grad.clone() * 0.5
    assert foreach.grad_stats([grad])[0, SUMSQ].item() == pytest.approx(exact(grad), rel=1e-6)
    foreach.scale_([grad], torch.tensor([0.5], dtype=torch.float64))
    torch.testing.assert_close(grad, expected)


def test_each_coefficient_does_what_the_reference_does():
    coefs = torch.tensor([KEEP, REFUSE, 0.3, 1e-40, torch.nan, 0.0], dtype=torch.float64)
    ours = [torch.full((7,), 3e38) for _ in coefs]
    theirs = [g.clone() for g in ours]
    foreach.scale_(ours, coefs)
    reference.scale_(theirs, coefs)
    for our, their in zip(ours, theirs, strict=True):
        torch.testing.assert_close(our, their, rtol=1e-6, atol=0, equal_nan=True)


def test_only_cpu_tensors_come_here():
    source = (
        "import zclip.backends as b; print([b.answering('scale_', d) for d in ('cpu', 'cuda')])"
    )
    done = subprocess.run(
        [sys.executable, "-c", source],
        env={**os.environ, "ZCLIP_BACKEND": "foreach"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "['foreach', 'reference']"


def test_gradients_that_are_not_clipped_are_not_written():
    grads = [torch.ones(3), torch.ones(70_000)]
    versions = [g._version for g in grads]
    rule = reference.IDS["global_norm"]
    foreach.clip_by_(grads, torch.empty(0, dtype=torch.float64), rule, [1e6, 0.0])
    assert [g._version for g in grads] == versions
