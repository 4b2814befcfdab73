"""The forecast beside a run: it changes nothing until it warns, and then only what it may."""

import json
import math
from itertools import chain, islice

import pytest

from heal.actions import HealingError
from heal.causes import Cause, Finding, Severity
from heal.lab.forecast import forecast_watch as watch_module
from heal.policy import CLIP_FACTOR
from heal.testing import Chaos, Fault
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


def test_the_weights_are_measured_every_ten_steps_and_observed(calm):
    setup = regression(forecast=True, check_interval=1000)
    healer = setup.healer()
    checks = []
    post = healer.monitor.health.post
    healer.monitor.health.post = lambda step: (checks.append(step), post(step))
    healer.run(setup.train_step, setup.loader, 60, progress=False)
    assert checks[:6] == [10, 20, 30, 40, 50, 60]
    assert set(checks[6:]) == {60}  # once more when the run ends
    features = healer.monitor.watch.forecast.features
    assert features.w == 6.0  # those of the end come too soon after the sixth
    total = sum(float(p.detach().square().sum()) for p in setup.model.parameters())
    assert abs(features.weight_last - 0.5 * math.log(total)) < 0.2
    assert features.weight_rate != 0.0


def test_who_wants_no_checks_gets_none(calm):
    setup = regression(forecast=True, check_interval=0)
    healer = setup.run(40)
    assert healer.monitor.watch.forecast.features.w == 0.0


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
    assert "forecast" not in healer.monitor.watch.detectors
    healer.exits.dismiss()


def test_a_warning_takes_a_snapshot_tightens_the_clip_and_checks_more_often(alarmed, tmp_path):
    setup = regression(
        forecast=True,
        max_grad_norm=1.0,
        zclip_enabled=True,
        snapshot_interval=1000,
        check_interval=40,
        quarantine_steps=0,
        incident_steps=30,
    )
    healer = setup.healer(run_dir=tmp_path)
    clipper = healer.optimizers[0].clipper
    checks, limits = [], {}
    post = healer.monitor.health.post
    healer.monitor.health.post = lambda step: (checks.append(step), post(step))

    def train_step(batch):
        limits[healer.last_step + 1] = clipper.max_grad_norm
        return setup.train_step(batch)

    healer.run(train_step, setup.loader, 60, progress=False)
    assert 23 in healer.snapshots()  # heard two steps after step 20, before step 23
    usual, tight = limits[0], CLIP_FACTOR * limits[0]
    assert tight < usual
    ramp = healer.config.lr_ramp_steps
    expected = [usual] * 23 + [tight] * ramp + [usual] * (60 - 23 - ramp)
    assert list(limits.values()) == pytest.approx(expected)
    assert {24, 28, 32, 36, 40, 44, 48, 52} <= set(checks)
    assert 56 not in checks
    entry = next(e for e in healer.recoveries if e["failure"] == "instability_ahead")
    assert entry["actions"] == ["take_snapshot", "tighten_clip", "watch_closely"]
    assert healer.metrics()["healing/recovery_attempts"] == 0.0
    assert moves_in(tmp_path) == [(20, "healthy", "warning")]


def moves_in(path):
    events = [json.loads(line) for line in (path / "events.jsonl").read_text().splitlines()]
    return [(e["step"], e["before"], e["after"]) for e in events if e["event"] == "forecast"]


def struck(tmp_path, *faults, steps=120, **config):
    """Have a run broken by chaos; return its healer and its transitions."""
    setup = regression(forecast=True, **config)
    healer = setup.healer(run_dir=tmp_path)
    chaos = Chaos(healer, [Fault(kind, at=at) for kind, at in faults])
    healer.run(chaos.wrap(setup.train_step), setup.loader, steps, progress=False)
    return healer, moves_in(tmp_path)


def test_a_refused_step_is_a_failure_for_fifty_steps(calm, tmp_path):
    _, moves = struck(tmp_path, ("nan_gradient", 30))
    assert moves == [(30, "healthy", "failure"), (80, "failure", "healthy")]


@pytest.mark.parametrize("fault", ["corrupt_weight"])
def test_damage_found_by_a_check_is_a_failure_for_fifty_steps_after_the_rollback(
    calm, tmp_path, fault
):
    healer, moves = struck(tmp_path, (fault, 52), check_interval=5)
    rollback = next(e for e in healer.recoveries if "rollback" in e["actions"])
    (begun, *first), (over, *last) = moves
    assert first == ["healthy", "failure"]
    assert last == ["failure", "healthy"]
    assert 52 <= begun <= 60
    assert over == rollback["resumed_at"] + 49


def test_a_rollback_from_a_warning_is_a_failure_and_no_recovery(alarmed, tmp_path):
    """The snapshot was taken in health; the run is not well because it returned there."""
    healer, moves = struck(tmp_path, ("corrupt_weight", 26), check_interval=5, steps=100)
    assert any("rollback" in entry["actions"] for entry in healer.recoveries)
    assert [(before, after) for _, before, after in moves] == [
        ("healthy", "warning"),
        ("warning", "failure"),
        ("failure", "warning"),
    ]


def test_a_warning_that_begins_during_a_failure_is_answered_when_that_is_over(alarmed, tmp_path):
    healer, moves = struck(tmp_path, ("nan_gradient", 10), steps=100)
    assert moves == [(10, "healthy", "failure"), (60, "failure", "warning")]
    (warned,) = [e for e in healer.recoveries if e["failure"] == "instability_ahead"]
    assert warned["step"] == 60
    assert warned["actions"] == ["take_snapshot", "tighten_clip", "watch_closely"]


def test_a_run_that_resumes_in_a_warning_is_not_warned_of_again(alarmed, tmp_path):
    for steps in (40, 80):
        setup = regression(forecast=True)
        options = {"run_dir": tmp_path / "journal", "checkpoint_dir": tmp_path / "checkpoints"}
        healer = setup.healer(**options)
        healer.resume()
        healer.run(setup.train_step, setup.loader, steps, progress=False)
    assert healer.last_step == 79
    assert moves_in(tmp_path / "journal") == [(20, "healthy", "warning")]


def test_the_last_steps_of_a_run_are_in_the_journal_too(calm, tmp_path):
    _, moves = struck(tmp_path, ("nan_gradient", 59), steps=60)
    assert moves == [(59, "healthy", "failure")]


def test_a_halt_is_in_the_journal_as_a_failure(calm, tmp_path):
    with pytest.raises(HealingError):
        struck(tmp_path, ("corrupt_weight", 30), max_recovery_attempts=0, check_interval=5)
    assert [after for _, _, after in moves_in(tmp_path)] == ["failure"]


def test_a_rollback_that_no_detector_asked_for_is_a_failure_too(calm, tmp_path):
    healer, moves = struck(tmp_path, ("oom_step", 45), steps=100)
    assert any("rollback" in entry["actions"] for entry in healer.recoveries)
    assert [(before, after) for _, before, after in moves] == [
        ("healthy", "failure"),
        ("failure", "healthy"),
    ]


def test_a_rank_that_is_gone_is_a_failure(calm, tmp_path):
    setup = regression(forecast=True)
    healer = setup.healer(run_dir=tmp_path)
    gone = Finding(
        cause=Cause.COLLECTIVE_ERROR, step=30, bad_step=30, severity=Severity.FATAL, evidence={}
    )
    healer.monitor.cluster.look = lambda step: [gone] if step == 30 else []
    with pytest.raises(HealingError):
        healer.run(setup.train_step, setup.loader, 60, progress=False)
    assert moves_in(tmp_path) == [(30, "healthy", "failure")]


@pytest.mark.parametrize("tells", [True, False])
def test_a_loop_that_tells_no_loss_is_not_judged_and_hears_why(alarmed, tmp_path, tells):
    setup = regression(forecast=True)
    healer = setup.healer(run_dir=tmp_path)
    for batch in islice(chain.from_iterable(healer.batches(setup.loader) for _ in range(9)), 80):
        setup.optimizer.zero_grad()
        loss = setup.train_step(batch)
        loss.backward()
        healer.step(loss if tells else None)
    assert bool(moves_in(tmp_path)) is tells
    assert ("healing/forecast" in healer.metrics()) is tells
    assert [note for note in healer.notes if "forecast is silent" in note] == (
        [] if tells else [watch_module.ForecastWatch.silent]
    )
