"""What only a GPU can show. The operators' results are tested there by the backend ``cuda``."""

import pytest
import torch

from tests.grads import exact_sumsq, make_grads
from zclip import layout

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available()
    or not torch._C._dispatch_has_kernel_for_dispatch_key("zclip::grad_stats", "CUDA"),
    reason="needs a GPU and the extension built with CUDA",
)

SHAPES = [(1000,), (33, 77), (0,), (200_001,)] * 50


def step(grads, state):
    return torch.ops.zclip.clip_by_(grads, state, 0, (1.0, layout.SKIP))


def test_a_captured_step_can_be_replayed():
    grads = [g.cuda() for g in make_grads(SHAPES)]
    state = torch.zeros(3, dtype=torch.float64, device="cuda")
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step(grads, state)  # loads the kernels
    torch.cuda.current_stream().wait_stream(side)
    state.zero_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        norm, *_ = step(grads, state)
    for replay in range(1, 6):
        for grad, fresh in zip(grads, make_grads(SHAPES, seed=replay), strict=True):
            grad.copy_(fresh)
        graph.replay()
        want = exact_sumsq(make_grads(SHAPES, seed=replay)).sum().sqrt()
        assert norm.item() == pytest.approx(want.item(), rel=1e-6)
        assert state[layout.STEPS].item() == replay


def test_two_streams_do_not_disturb_each_other():
    lists = [[g.cuda() for g in make_grads(SHAPES, seed=seed)] for seed in range(2)]
    want = [torch.ops.zclip.grad_stats(grads) for grads in lists]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in lists]
    found = []
    for _ in range(50):
        for grads, stream in zip(lists, streams, strict=True):
            with torch.cuda.stream(stream):
                found.append(torch.ops.zclip.grad_stats(grads))
    torch.cuda.synchronize()
    assert all(torch.equal(stats, want[i % 2]) for i, stats in enumerate(found))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_the_tensors_device_counts_not_the_current_one():
    grads = [g.to("cuda:1") for g in make_grads(SHAPES)]
    with torch.cuda.device(0):
        stats = torch.ops.zclip.grad_stats(grads)
    assert stats.device == torch.device("cuda:1")
    torch.testing.assert_close(
        stats[:, 0].cpu(), exact_sumsq(make_grads(SHAPES)), rtol=1e-6, atol=0
    )
