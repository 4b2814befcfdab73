"""The same bits for any number of threads and in any floating-point mode."""

import pytest
import torch

from tests.grads import DTYPES, dtype_name, make_grads


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
def test_the_number_of_threads_changes_no_bit(threads, dtype):
    sizes = [(3,), (200_000,), (0,), (77,)] + [(64,)] * 500 + [(1_000_001,)]
    grads = make_grads(sizes, dtype)
    results = []
    for count in (1, 2, 3, 7, 2, 1):
        threads(count)
        copies = [g.clone() for g in grads]
        state = torch.zeros(3, dtype=torch.float64)
        results.append([*torch.ops.zclip.clip_by_(copies, state, 0, (0.5, 0)), *copies])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_flushing_denormals_on_one_thread_changes_no_bit(threads):
    if not torch.set_flush_denormal(False):
        pytest.fail("this test needs a CPU that can flush denormals")
    # Most lanes hold only numbers whose squares are subnormal; one lane's sum is large enough to
    # be trusted, and small enough for float64 to see what the others add to it.
    grads = [torch.full((400_000,), 5e-20), torch.full((400_000,), 1e-41)]
    for grad in grads:
        grad[::64] = 1e-12
    threads(1)
    plain = torch.ops.zclip.grad_stats(grads)
    torch.set_flush_denormal(True)
    try:
        flushed = torch.ops.zclip.grad_stats(grads)
        assert torch.tensor(1e-20).square() == 0, "the mode must survive our call"
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(plain, flushed)
    only_tiny = torch.ops.zclip.grad_stats([grads[1][1:64]])
    assert only_tiny[0, 0] > 0
