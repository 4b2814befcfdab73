"""Probes that a healer runs: numbers to the journal and the metrics, alarms that change nothing."""

import json
import math
from itertools import pairwise

import pytest
import torch
from torch import nn

from heal.actions import Halt, HealingError
from heal.causes import Cause, Severity
from heal.journal import read_events
from heal.lab.probes import (
    LyapunovMeter,
    NoiseScale,
    fisher_diagonal,
    importance,
    noise_scale,
    optimizer_health,
    sharpness,
)
from tests.heal.runs import assert_same, fingerprint, regression


def batch():
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(8, 8, generator=generator)
    return inputs, inputs[:, :1]


def untidy(setup):
    """Draws random numbers, changes modes and buffers, and tidies nothing up."""

    def look():
        setup.model.eval()
        for buffer in setup.model.buffers():
            buffer.zero_()
        return {"drawn": torch.rand(3).sum(), "loss": setup.train_step(batch()).detach()}

    return look


def lyapunov(setup):
    meter = LyapunovMeter(setup.model.parameters())

    def look():
        meter.observe()
        return meter.exponent()

    return look


LOOKS = {
    "sharpness": lambda s: lambda: sharpness(s.model, s.train_step, batch(), iterations=3),
    "noise_scale": lambda s: lambda: noise_scale(s.model, s.train_step, batch()),
    "importance": lambda s: (
        lambda: importance(s.model, fisher_diagonal(s.model, s.train_step, batch(), 4))
    ),
    "optimizer": lambda s: lambda: optimizer_health(s.optimizer),
    "lyapunov": lyapunov,
    "untidy": untidy,
}


def noisy():
    layers = [nn.Linear(8, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Dropout(0.1), nn.Linear(16, 1)]
    return nn.Sequential(*layers)


def trained(make_look=None, steps=30, **options):
    setup = regression(model=noisy)
    healer = setup.healer(**options)
    if make_look is not None:
        healer.add_probe("probe", make_look(setup), every=3, alarm=lambda found: True)
    healer.run(setup.train_step, setup.loader, steps, progress=False)
    return fingerprint(setup), healer


@pytest.fixture(scope="module")
def bare():
    return trained()[0]


@pytest.mark.parametrize("make_look", LOOKS.values(), ids=LOOKS)
def test_training_is_bit_by_bit_the_same_with_a_probe_and_its_alarm(make_look, bare):
    state, healer = trained(make_look)
    assert_same(state, bare)
    assert any(name.startswith("probe/probe") for name in healer.metrics())
    assert any(diagnosis.cause is Cause.PROBE_ALARM for _, diagnosis, _ in healer.history)
    assert not healer.notes


def test_a_probe_looks_after_every_so_many_steps():
    setup = regression()
    healer = setup.healer()
    seen = []
    healer.add_probe("step", lambda: seen.append(healer.last_step), every=10)
    healer.run(setup.train_step, setup.loader, 35, progress=False)
    assert seen == [9, 19, 29]
    assert not any(name.startswith("probe/") for name in healer.metrics())  # None: nothing to tell


def test_a_probe_that_joins_in_mid_run_looks_when_it_is_due():
    setup = regression()
    healer = setup.healer()
    seen = []

    def join(step):
        if step == 22:
            healer.add_probe("step", lambda: seen.append(healer.last_step), every=1)

    healer.run(setup.train_step, setup.loader, 26, progress=False, on_step=join)
    assert seen == [23, 24, 25]


def test_its_numbers_are_in_the_journal_and_in_the_metrics(tmp_path):
    setup = regression()
    healer = setup.healer(run_dir=tmp_path)
    told = iter([{"a": 1.5, "b": math.nan, "word": "left out"}, {"a": True, "b": math.inf}])
    healer.add_probe("pair", lambda: next(told), every=10)
    healer.add_probe("alone", lambda: torch.tensor(2.0), every=20)
    healer.run(setup.train_step, setup.loader, 20, progress=False)
    metrics = healer.metrics()
    assert metrics["probe/pair/a"] == 1.0
    assert metrics["probe/pair/b"] == math.inf
    assert metrics["probe/alone"] == 2.0
    lines = [e for e in read_events(tmp_path / "events.jsonl")[0] if e["event"] == "probe"]
    assert [(e["step"], e["probe"], e["found"]) for e in lines] == [
        (9, "pair", {"a": 1.5, "b": "NaN"}),
        (19, "pair", {"a": 1.0, "b": "Infinity"}),
        (19, "alone", 2.0),
    ]
    assert all(e["seconds"] >= 0 for e in lines)
    plotted = [json.loads(line) for line in (tmp_path / "metrics.jsonl").open()]
    assert [line["probe/alone"] for line in plotted if "probe/alone" in line] == [2.0]


def test_fields_and_properties_of_a_dataclass_are_told():
    setup = regression()
    healer = setup.healer()
    healer.add_probe("noise", lambda: NoiseScale(signal=2.0, noise=6.0), every=5)
    healer.run(setup.train_step, setup.loader, 5, progress=False)
    names = ("signal", "noise", "samples")
    assert [healer.metrics()[f"probe/noise/{name}"] for name in names] == [2.0, 6.0, 3.0]


def test_an_alarm_is_told_once_until_it_has_been_off_and_changes_nothing():
    setup = regression()
    healer = setup.healer()
    values = iter([1.0, 3.0, 4.0, 1.0, 5.0])
    healer.add_probe("level", lambda: next(values), every=4, alarm=lambda found: found > 2.0)
    healer.run(setup.train_step, setup.loader, 20, progress=False)
    alerts = [(d, plan) for _, d, plan in healer.history if d.cause is Cause.PROBE_ALARM]
    assert [d.step for d, _ in alerts] == [7, 19]
    assert all(plan == () for _, plan in alerts)
    assert alerts[0][0].severity is Severity.WARN
    assert alerts[0][0].evidence == {"probe": "level", "found": 3.0}
    assert healer.metrics()["healing/recovery_attempts"] == 0
    assert healer.lr_scale == 1.0
    assert not healer.recoveries


def test_a_hook_may_make_something_of_an_alarm():
    setup = regression()
    healer = setup.healer()
    healer.add_probe("level", lambda: 1.0, every=4, alarm=lambda found: True)
    healer.on_instability(lambda diagnosis, plan: (Halt("the probe says so"),))
    with pytest.raises(HealingError, match="the probe says so"):
        healer.run(setup.train_step, setup.loader, 20, progress=False)


@pytest.mark.parametrize(
    ("look", "alarm", "told"),
    [
        (lambda: 1 / 0, None, "ZeroDivisionError"),
        (lambda: 1.0, lambda found: found.nothing, "AttributeError"),
        (lambda: "much", None, "look(): expected a number, a mapping or a dataclass, got str"),
    ],
    ids=["look", "alarm", "word"],
)
def test_a_probe_that_fails_is_noted_once_and_not_run_again(look, alarm, told):
    setup = regression()
    healer = setup.healer()
    looks = []
    healer.add_probe("bad", lambda: looks.append(1) or look(), every=2, alarm=alarm)
    healer.add_probe("good", lambda: 1.0, every=2)
    healer.run(setup.train_step, setup.loader, 12, progress=False)
    assert len(looks) == 1
    assert len(healer.notes) == 1
    assert healer.notes[0].startswith("the probe 'bad' failed and is not run again: ")
    assert told in healer.notes[0]
    assert healer.metrics()["probe/good"] == 1.0
    assert "probe/bad" not in healer.metrics()


def test_the_time_of_a_probe_makes_no_step_slow():
    setup = regression()
    now = [0.0]
    healer = setup.healer(clock=lambda: now[0])

    def slow():
        now[0] += 100.0
        return 1.0

    healer.add_probe("slow", slow, every=2)
    seconds = []

    def step(batch):
        now[0] += 1.0
        return setup.train_step(batch)

    noted = lambda n: seconds.append(healer.latest and healer.latest.seconds)  # noqa: E731
    healer.run(step, setup.loader, 12, progress=False, on_step=noted)
    assert {value for value in seconds if value is not None} == {1.0}


def test_gradients_can_be_looked_at():
    setup = regression()
    healer = setup.healer()
    first = next(setup.model.parameters())
    healer.add_probe("gradient", lambda: first.grad.norm(), every=5)
    healer.run(setup.train_step, setup.loader, 5, progress=False)
    assert healer.metrics()["probe/gradient"] > 0.0


def test_a_hand_written_loop_runs_its_probes():
    setup = regression()
    healer = setup.healer()
    healer.add_probe(
        "sharpness", lambda: sharpness(setup.model, setup.train_step, batch()), every=8
    )
    for data in healer.batches(setup.loader):
        loss = setup.train_step(data)
        loss.backward()
        with torch.no_grad():  # where nothing is differentiated, a probe may still do so
            healer.step(loss)
        setup.optimizer.zero_grad()
    assert "probe/sharpness/eigenvalue" in healer.metrics()


def test_a_step_that_was_taken_back_is_not_looked_at():
    setup = regression()
    healer = setup.healer()
    seen = []
    healer.add_probe("step", lambda: seen.append(healer.last_step), every=1)
    spoiled = [False]

    def step(data):
        if healer.last_step == 30 and not spoiled[0]:
            spoiled[0] = True
            with torch.no_grad():
                next(setup.model.parameters()).fill_(math.nan)
        return setup.train_step(data)

    healer.run(step, setup.loader, 45, progress=False)
    resumed = [e["resumed_at"] for e in healer.recoveries if "rollback" in e["actions"]]
    assert [b for a, b in pairwise(seen) if b <= a] == resumed
    assert seen[-1] == 44


def test_names_and_intervals_are_checked():
    healer = regression().healer()
    healer.add_probe("a", lambda: 1.0, every=1)
    with pytest.raises(ValueError, match="expected a name that no other probe has, got 'a'"):
        healer.add_probe("a", lambda: 1.0, every=1)
    with pytest.raises(ValueError, match="no other probe has, got ''"):
        healer.add_probe("", lambda: 1.0, every=1)
    with pytest.raises(ValueError, match="every: expected at least 1 step, got 0"):
        healer.add_probe("b", lambda: 1.0, every=0)
