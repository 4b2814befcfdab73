"""What only a GPU can show. The operators' results are tested there by the backend ``cuda``."""

import copy

import pytest
import torch

import zclip
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


def wrapped(device, **settings):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    model = model.to(device)
    inner = torch.optim.AdamW(
        model.parameters(), lr=torch.tensor(0.01, device=device), fused=True, capturable=True
    )
    return model, zclip.wrap(inner, zclip.ZClip(warmup_steps=3), **settings)


def test_a_whole_training_step_is_captured_and_its_verdicts_are_read():
    model, optimizer = wrapped("cuda", capturable=True)
    batch = torch.randn(4, 8, device="cuda")

    def train():
        optimizer.zero_grad(set_to_none=False)
        model(batch).square().mean().backward()
        optimizer.step()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            train()
    torch.cuda.current_stream().wait_stream(side)
    twin, plain = copy.deepcopy(model), None
    plain = zclip.wrap(
        torch.optim.AdamW(twin.parameters(), lr=torch.tensor(0.01, device="cuda"), fused=True),
        zclip.ZClip(warmup_steps=3),
    )
    plain.load_state_dict(optimizer.state_dict())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        train()
    for seed in range(5):
        batch.copy_(torch.randn(4, 8, generator=torch.Generator().manual_seed(seed)))
        if seed == 3:
            batch[0, 0] = float("nan")
        graph.replay()
        plain.zero_grad()
        twin(batch).square().mean().backward()
        plain.step()
    for one, two in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one, two)
    optimizer.mailbox.poll()
    rows = optimizer.mailbox.poll()
    assert [step for step, _ in rows] == list(range(8))  # three steps of warm-up, five replays
    assert [optimizer.was_skipped(row) for _, row in rows] == [False] * 6 + [True, False]


def test_a_capture_without_capturable_says_so():
    model, optimizer = wrapped("cuda")
    model(torch.randn(4, 8, device="cuda")).sum().backward()
    optimizer.step()
    with (
        pytest.raises(RuntimeError, match="capturable=True"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        optimizer.step()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_verdicts_of_another_device_have_landed_when_they_are_read():
    model, optimizer = wrapped("cuda:1", lag=0)
    with torch.cuda.device(0):
        for scale in range(1, 50):
            optimizer.zero_grad()
            (scale * model(torch.ones(4, 8, device="cuda:1")).sum()).backward()
            optimizer.step()
            want = optimizer.clipper.result.total_norm
            got = optimizer.metrics()["zclip/raw_grad_norm"]
            assert got == pytest.approx(want.item(), rel=1e-6)
