"""The forecast beside a run: it changes nothing until it warns, and then only what it may."""

import json
import math

import pytest

from heal.forecast import watch as watch_module
from tests.heal.forecast.models import model_of
from tests.heal.runs import assert_same, fingerprint, regression


@pytest.fixture
def calm(monkeypatch):
    monkeypatch.setattr(watch_module, "shipped", lambda: model_of(weight=0.0, bias=-9.0))


@pytest.fixture
def alarmed(monkeypatch):
    """A model that warns as soon as it may."""
    monkeypatch.setattr(watch_module, "shipped", lambda: model_of(weight=0.0, bias=9.0))


def test_a_run_that_is_not_warned_of_is_bit_by_bit_the_same(calm):
    without = regression()
    without.run(60)
    expected = fingerprint(without)
    with_forecast = regression(forecast=True)
    healer = with_forecast.run(60)
    assert_same(expected, fingerprint(with_forecast))
    assert healer.notes == []
    assert "healing/forecast" in healer.metrics()


def test_the_weights_are_measured_every_ten_steps_and_heard_of(calm):
    setup = regression(forecast=True, check_interval=1000)
    healer = setup.healer()
    checks = []
    post = healer._listener._health.post
    healer._listener._health.post = lambda step: (checks.append(step), post(step))
    healer.run(setup.train_step, setup.loader, 60, progress=False)
    assert checks == [10, 20, 30, 40, 50, 60]
    features = healer._listener.watch.forecast.features
    assert features.w == 5.0  # the last is read two steps after the end
    total = sum(float(p.detach().square().sum()) for p in setup.model.parameters())
    assert abs(features.weight_last - 0.5 * math.log(total)) < 0.2  # ten steps old
    assert features.weight_rate != 0.0


def test_who_wants_no_checks_gets_none(calm):
    setup = regression(forecast=True, check_interval=0)
    healer = setup.run(40)
    assert healer._listener.watch.forecast.features.w == 0.0


def test_the_shipped_model_warns_of_a_rate_that_grows_and_not_before(tmp_path):
    setup = regression(forecast=True)
    healer = setup.healer(run_dir=tmp_path)

    def train_step(batch):
        if healer.last_step >= 100:
            for group in setup.optimizer.param_groups:
                group["lr"] *= 1.05
        return setup.train_step(batch)

    healer.run(train_step, setup.loader, 180, progress=False)
    steps = [e["step"] for e in healer.recoveries if e["failure"] == "instability_ahead"]
    assert steps
    assert steps[0] > 100


def test_it_is_off_unless_asked_for():
    healer = regression().healer()
    assert "forecast" not in healer._listener.watch.detectors
    healer.exits.dismiss()


def test_a_warning_takes_a_snapshot_tightens_the_clip_and_checks_more_often(alarmed, tmp_path):
    setup = regression(
        forecast=True,
        zclip_enabled=True,
        snapshot_interval=1000,
        check_interval=40,
        quarantine_steps=0,
        incident_steps=30,
    )
    healer = setup.healer(run_dir=tmp_path)
    limit = healer.optimizers[0].clipper.max_grad_norm
    checks = []
    post = healer._listener._health.post
    healer._listener._health.post = lambda step: (checks.append(step), post(step))
    healer.run(setup.train_step, setup.loader, 60, progress=False)
    assert 23 in healer.snapshots()  # heard two steps after step 20, before step 23
    assert healer.optimizers[0].clipper.max_grad_norm < limit or healer._run._relax_in == 0
    assert {24, 28, 32, 36, 40, 44, 48, 52} <= set(checks)
    assert 56 not in checks
    entry = next(e for e in healer.recoveries if e["failure"] == "instability_ahead")
    assert entry["actions"] == ["take_snapshot", "tighten_clip", "watch_closely"]
    assert healer.metrics()["healing/recovery_attempts"] == 0.0
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    moves = [(e["step"], e["before"], e["after"]) for e in events if e["event"] == "forecast"]
    assert moves == [(20, "healthy", "warning")]


def test_damage_found_by_a_detector_is_a_failure_in_the_journal(calm, tmp_path):
    from heal.chaos import Chaos, Fault

    setup = regression(forecast=True)
    healer = setup.healer(run_dir=tmp_path)
    chaos = Chaos(healer, [Fault("nan_gradient", at=30)])
    healer.run(chaos.wrap(setup.train_step), setup.loader, 120, progress=False)
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    moves = [(e["before"], e["after"]) for e in events if e["event"] == "forecast"]
    assert moves == [("healthy", "failure"), ("failure", "healthy")]
