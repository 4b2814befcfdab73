"""Timing takes turns, counting counts, and a busy machine is called one."""

import pytest
import torch

from zclip.bench import cost, load, measure
from zclip.bench.catalogue import Case
from zclip.bench.gradients import Gradients

CPU = torch.device("cpu")


def test_contenders_take_turns():
    order = []
    contenders = {name: lambda name=name: order.append(name) for name in "ab"}
    timings = measure.interleaved(contenders, rounds=4, seconds=60.0)
    assert order == ["a", "b", *"ab", *"ba", *"ab", *"ba"]
    assert timings["a"].rounds == 4


def test_a_time_limit_ends_the_rounds():
    timings = measure.interleaved({"a": lambda: None}, rounds=10_000, seconds=0.0)
    assert timings["a"].rounds == measure.FEWEST_ROUNDS


def test_short_calls_get_more_rounds():
    timings = measure.interleaved({"a": lambda: None}, rounds=3, seconds=9.0, least_seconds=0.01)
    assert timings["a"].rounds > 3


def test_what_is_done_between_rounds_is_told_their_numbers():
    turns = []
    measure.interleaved({"a": lambda: None}, rounds=4, seconds=9.0, between=turns.append)
    assert turns == [0, 1, 2, 3]


def test_the_median_and_the_spread_are_those_of_the_rounds():
    clock = iter([(s, None) for s in (1.0, 2.0, 3.0, 4.0, 50.0)])
    timing = measure.interleaved({"a": lambda: None}, 5, 99.0, lambda run: next(clock))["a"]
    assert timing.median_seconds == 3.0
    assert timing.is_noise  # quartiles 1.5 and 27
    assert not measure.Timing(1.0, 0.1, 9).is_noise


def test_on_a_gpu_events_tell_the_time_and_the_host_is_timed_apart(monkeypatch):
    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            calls.append("record")

        def synchronize(self):
            calls.append("wait")

        def elapsed_time(self, end):
            return 250.0  # milliseconds

    calls = []
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: calls.append("wait"))
    seconds, host = measure.cuda_clock(lambda: calls.append("run"))
    assert calls == ["wait", "record", "run", "record", "wait"]
    assert seconds == 0.25
    assert 0 <= host < 0.25
    timing = measure.interleaved({"a": lambda: None}, 3, 9.0, measure.cuda_clock)["a"]
    assert timing.host_seconds is not None


def counted(case, name, tensors=5):
    work = case.work(Gradients([(8,)] * tensors, torch.float32), [], [])
    for _ in range(2):
        work.contenders[name]()  # past the warm-up
    return cost.cost_of(work.contenders[name], CPU)


@pytest.mark.parametrize(
    ("case", "name", "syncs"),
    [
        (Case("clip_grad_norm_", "x"), "zclip", 0),
        (Case("clip_grad_norm_", "x"), "torch foreach", 0),
        (Case("rule", "x", rule="zclip"), "zclip", 0),
        (Case("rule", "x", rule="zclip"), "published", 1),
        (Case("rule", "x", rule="adagc"), "zclip", 0),
        (Case("rule", "x", rule="adagc"), "published", 6),  # one, and one for each tensor
        (Case("step", "x"), "zclip", 0),
    ],
    ids=str,
)
def test_syncs_are_those_that_the_sources_show(case, name, syncs):
    assert counted(case, name).syncs == syncs


@pytest.mark.parametrize(
    ("read", "syncs"),
    [
        (lambda t: t.sum().item(), 1),
        (lambda t: bool((t > 0).any()), 1),
        (lambda t: torch.equal(t, t + 1), 1),
        (lambda t: t.nonzero(), 1),
        (lambda t: t[t > 0], 1),
        (lambda t: torch.where(t > 0, t, 0.0).sum().sqrt(), 0),
    ],
    ids=["item", "bool", "equal", "nonzero", "mask", "none"],
)
def test_every_way_of_reading_a_value_is_counted(read, syncs):
    assert cost.cost_of(lambda: read(torch.ones(4)), CPU).syncs == syncs


def test_our_operators_do_not_multiply_with_the_tensors_and_a_loop_does():
    case = Case("clip_grad_norm_", "x")
    assert counted(case, "zclip", 5).launches == counted(case, "zclip", 50).launches
    assert counted(case, "torch loop", 50).launches > 50


def test_the_peak_of_memory_is_seen_once_and_again():
    for _ in range(2):
        peak = cost.resident_peak(lambda: torch.ones(4_000_000))
        # The kernel counts pages in batches, so a little may be missing.
        assert peak is None or 15_000_000 < peak < 24_000_000


@pytest.mark.parametrize(
    ("average", "others", "threads", "problem"),
    [
        (0.5, 0.01, 8, None),
        (1e6, 0.01, 8, None),  # of the last minute: over by now
        (0.5, 0.5, 8, "other processes used 50% of the machine"),
        (0.5, 0.5, 2, None),  # there are cores to spare
        (0.5, 0.95, 2, "other processes used 95% of the machine"),
        (1e6, None, 8, "load 1000000.0 on 8 cores"),
        (0.5, None, 8, None),
    ],
)
def test_a_busy_machine_is_called_one(monkeypatch, average, others, threads, problem):
    monkeypatch.setattr(load.os, "cpu_count", lambda: 8)
    found = load.Load(average, others, threads).problem
    assert found is None if problem is None else problem in found


def test_our_own_work_is_not_that_of_others(monkeypatch):
    monkeypatch.setattr(load.os, "cpu_count", lambda: 2)
    monkeypatch.setattr(load.time, "monotonic", iter([0.0, 10.0]).__next__)
    monkeypatch.setattr(load, "_busy_seconds", iter([100.0, 112.0]).__next__)
    monkeypatch.setattr(load, "_own_seconds", iter([3.0, 11.0]).__next__)
    assert load.LoadMeter(2).read().others == pytest.approx(4.0 / 20.0)
