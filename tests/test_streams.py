"""The whole step on devices with streams of their own, and a host that asks only for events."""

import pytest
import torch

import zclip
from heal.snapshots import SideStream, host_memory
from tests.fake_streams import ReadTooEarly, Stream, fake_streams
from tests.own_rules import twice_the_average
from zclip import mailbox
from zclip.verdict_ring import VerdictRing

CLIPPERS = {
    "GlobalNorm": lambda: zclip.GlobalNorm(1.0),
    "ZClip": zclip.ZClip,
    "AdaGC": zclip.AdaGC,
    "SpikeSkip": zclip.SpikeSkip,
    "AGC": zclip.AGC,
    "PythonRule": lambda: zclip.PythonRule(twice_the_average, state_size=1),
}


def parameters_on(device):
    params = [torch.nn.Parameter(torch.empty(s, device=device)) for s in ((4, 3), (7,), ())]
    for param in params:
        param.grad = torch.empty_like(param)
    return params


@pytest.mark.parametrize("device", ["cuda:0", "cuda:1"])
@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.parametrize("clipper", CLIPPERS)
def test_a_verdict_is_read_only_after_its_copy(clipper, capturable, device):
    """The current device is cuda:0, wherever the model is."""
    with fake_streams() as layer:
        params = parameters_on(device)
        inner = torch.optim.AdamW(params, fused=True)
        optimizer = zclip.ClippedOptimizer(inner, CLIPPERS[clipper](), capturable=capturable)
        for _ in range(4):
            optimizer.step()
            optimizer.metrics()
        assert layer.records
        assert {stream.device for stream in layer.records} == {torch.device(device)}


def test_an_event_of_the_current_device_is_not_enough(monkeypatch):
    """What version 0.1 did: a torch.Event keeps no index, and is recorded where nothing happens."""

    def record_event(device):
        event = torch.Event(device)
        event.record()
        return event

    monkeypatch.setattr(mailbox, "record_event", record_event)
    with fake_streams():
        box = zclip.Mailbox(lag=0)
        box.post(0, torch.empty(14, device="cuda:0") + 1)
        box.poll()
        box.post(1, torch.empty(14, device="cuda:1") + 1)
        with pytest.raises(ReadTooEarly, match="the host touches memory that stream"):
            box.poll()


def test_a_step_on_a_stream_of_ones_own_is_heard_of_in_order():
    with fake_streams() as layer:
        params = parameters_on("cuda:1")
        optimizer = zclip.wrap(torch.optim.SGD(params, momentum=0.9, fused=True), lag=0)
        side = Stream(torch.device("cuda:1"))
        side.wait_stream(layer.current_stream(torch.device("cuda:1")))
        with torch.cuda.stream(side):
            for param in params:
                param.grad = torch.empty_like(param) + 1
            optimizer.step()
            optimizer.metrics()
        assert set(layer.records) == {side}


def test_gradients_of_another_stream_have_to_be_waited_for():
    with fake_streams() as layer:
        params = parameters_on("cuda")
        side = Stream(torch.device("cuda:0"))
        side.wait_stream(layer.current_stream())
        with torch.cuda.stream(side):
            for param in params:
                param.grad.add_(1)
        with pytest.raises(ReadTooEarly):
            zclip.clip_grad_norm_(params, 1.0)
        layer.current_stream().wait_stream(side)
        zclip.clip_grad_norm_(params, 1.0)


def test_a_ring_reads_what_the_poll_before_asked_for():
    with fake_streams() as layer:
        ring = VerdictRing(torch.device("cuda:1"))
        ring.post(0, torch.empty(14, device="cuda:1"))
        assert ring.poll() == []
        assert layer.host == {}  # nothing was waited for
        ring.poll()
        assert layer.host


def test_the_layer_notices_what_a_gpu_would_not_forgive():
    with fake_streams() as layer:
        value = torch.empty(3, device="cuda:1") + 1
        host = torch.empty(3, pin_memory=True)
        host.copy_(value, non_blocking=True)
        with pytest.raises(ReadTooEarly):
            host.tolist()
        with pytest.raises(ReadTooEarly, match="not pinned"):
            torch.empty(3).copy_(value, non_blocking=True)
        with pytest.raises(ReadTooEarly, match="which waits"):
            value.tolist()
        layer.current_stream(1).synchronize()
        assert host.tolist() == [0.0] * 3


def test_copies_beside_the_run_begin_where_it_is_and_end_with_their_event():
    with fake_streams():
        weights = torch.empty(3, device="cuda:1") + 1
        copied = host_memory(weights)
        done = SideStream(weights.device).run(lambda: copied.copy_(weights, non_blocking=True))
        with pytest.raises(ReadTooEarly):
            copied.tolist()
        done.synchronize()
        copied.tolist()
