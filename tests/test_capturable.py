"""ClippedOptimizer(capturable=True): a step that a CUDA graph replays."""

import copy
import math
import pickle

import pytest
import torch

import zclip
from tests.fake_cuda import fake_cuda, fake_parameters
from tests.models import make_model
from tests.op_graph import OpGraph
from tests.own_rules import twice_the_average
from zclip import verdict_ring
from zclip.layout import BLOCKED, NORM, NUM_VERDICT, STEP
from zclip.verdict_ring import VerdictRing

CLIPPERS = {
    "GlobalNorm": lambda: zclip.GlobalNorm(1.0),
    "ZClip": lambda: zclip.ZClip(warmup_steps=3),
    "ZClip-per-group": lambda: zclip.ZClip(warmup_steps=3, per_group=True),
    "AdaGC": lambda: zclip.AdaGC(warmup_steps=3),
    "SpikeSkip": lambda: zclip.SpikeSkip(window=4),
    "AutoClip": lambda: zclip.AutoClip(history=4),
    "PythonRule": lambda: zclip.PythonRule(twice_the_average, state_size=1),
}
OPTIMIZERS = {
    "AdamW": lambda groups: torch.optim.AdamW(groups, lr=torch.tensor(0.01), fused=True),
    "SGD": lambda groups: torch.optim.SGD(groups, lr=0.01, momentum=0.9, fused=True),
}


def make(clipper, optimizer, **settings):
    params = list(make_model().parameters())
    inner = OPTIMIZERS[optimizer]([{"params": params[:2]}, {"params": params[2:]}])
    for param in params:
        param.grad = torch.zeros_like(param)
    return params, zclip.wrap(inner, CLIPPERS[clipper](), **settings)


def fill_gradients(params, step):
    """New gradients in the memory of the old ones, as a captured backward pass writes them."""
    generator = torch.Generator().manual_seed(step)
    for param in params:
        param.grad.copy_(torch.randn(param.shape, generator=generator) * (30 if step == 7 else 1))
    if step == 5:
        params[1].grad[0] = math.nan


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("clipper", CLIPPERS)
def test_replays_are_steps_bit_by_bit_and_their_verdicts_are_read_by_number(clipper, optimizer):
    params, plain = make(clipper, optimizer, lag=0)
    twins, captured = make(clipper, optimizer, capturable=True)
    want, graph = [], OpGraph()
    for step in range(10):
        fill_gradients(params, step)
        fill_gradients(twins, step)
        plain.step()
        want += plain.mailbox.poll()
        if step == 2:  # after a warm-up: state exists, and this step is captured
            with graph:
                captured.step()
        elif step > 2:
            graph.replay()
        else:
            captured.step()
        for one, two in zip(params, twins, strict=True):
            assert torch.equal(one, two), step
    assert captured.mailbox.poll() == []  # asked for now, read by the next poll
    assert str(captured.mailbox.poll()) == str(want)
    assert [bool(row[BLOCKED]) for _, row in want][5]


def test_a_mailbox_would_miss_every_replay():
    """What the ring is for: only Python posts, and no Python runs in a replay."""
    params, plain = make("ZClip", "AdamW", lag=0)
    graph = OpGraph()
    fill_gradients(params, 0)
    plain.step()
    with graph:
        plain.step()
    plain.mailbox.poll()
    graph.replay()
    assert plain.mailbox.poll() == []


def test_metrics_are_late_by_one_call():
    params, optimizer = make("GlobalNorm", "SGD", capturable=True)
    assert optimizer.metrics() == {}
    fill_gradients(params, 0)
    optimizer.step()
    assert optimizer.metrics() == {}
    assert optimizer.metrics()["zclip/raw_grad_norm"] == pytest.approx(
        optimizer.clipper.result.verdict[NORM].item()
    )


def verdict(number):
    return torch.arange(NUM_VERDICT).float() + 100 * number


def test_a_full_ring_loses_the_oldest_and_counts_them():
    ring = VerdictRing(torch.device("cpu"), room=4)
    for step in range(3):
        ring.post(step, verdict(step))
    ring.poll()
    assert [step for step, _ in ring.poll()] == [0, 1, 2]
    for step in range(3, 10):
        ring.post(step, verdict(step))
    ring.poll()
    rows = ring.poll()
    assert [step for step, _ in rows] == [6, 7, 8, 9]
    assert [row[STEP] for _, row in rows] == [100 * step + STEP for step in range(6, 10)]
    assert ring.dropped == 3


def test_what_was_cleared_is_not_read():
    ring = VerdictRing(torch.device("cpu"), room=4)
    ring.post(0, verdict(0))
    ring.poll()
    ring.clear()
    assert ring.poll() == []
    ring.post(1, verdict(1))
    ring.poll()
    assert ring.poll() == [(0, verdict(1).tolist())]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_start_empty(copied):
    ring = VerdictRing(torch.device("cpu"), room=4)
    ring.post(0, verdict(0))
    ring.poll()
    twin = copied(ring)
    assert twin.poll() == twin.poll() == []
    assert twin.room == 4


def test_no_room_is_an_error():
    with pytest.raises(ValueError, match="room: expected 1 or more, got 0"):
        VerdictRing(torch.device("cpu"), room=0)


@pytest.fixture
def capturing(monkeypatch):
    """As if the current stream were captured; switched on by the test."""
    state = {"on": False}
    monkeypatch.setattr("zclip.optim.clipped.is_capturing", lambda: state["on"])
    return state


def on_device(optimizer=torch.optim.AdamW, fused=True, **settings):
    params = fake_parameters([(4, 3), (7,)])
    return zclip.wrap(optimizer(params, fused=fused), "zclip", **settings)


def test_a_step_on_a_device_reads_nothing(capturing):
    with fake_cuda():
        optimizer = on_device(capturable=True)
        optimizer.step()
        capturing["on"] = True
        optimizer.step()


def test_a_capture_without_it_says_what_to_do(capturing):
    with fake_cuda():
        optimizer = on_device(capturable=True)
        optimizer.capturable = False
        capturing["on"] = True
        with pytest.raises(RuntimeError, match=r"got False.*ClippedOptimizer\(.*capturable=True"):
            optimizer.step()


def test_a_capture_of_the_first_step_says_what_to_do(capturing):
    with fake_cuda():
        optimizer = on_device(capturable=True)
        capturing["on"] = True
        with pytest.raises(RuntimeError, match="expected at least one step before it, got none"):
            optimizer.step()


def test_a_capture_that_would_have_to_wait_says_what_to_do(capturing):
    with fake_cuda():
        optimizer = on_device(fused=False, capturable=True)
        optimizer.steps = 1
        capturing["on"] = True
        with pytest.raises(RuntimeError, match=r"got AdamW, .* build it with fused=True"):
            optimizer.step()


def test_nothing_is_captured_on_a_machine_without_cuda():
    assert not verdict_ring.is_capturing()
