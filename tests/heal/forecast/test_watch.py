"""A warning begins and ends as documented, and asks for nothing but what can be taken back."""

import json
import math

import numpy as np
import pytest
import torch

from heal.actions import Rollback, TakeSnapshot, TightenClip, WatchClosely
from heal.causes import Cause, Severity
from heal.config import HealingConfig
from heal.diagnose import diagnose
from heal.history import History
from heal.lab.forecast.forecast_watch import (
    CLEAR_MARGIN,
    FIRST_STEP,
    QUIET_STEPS,
    ForecastWatch,
    Hysteresis,
    State,
)
from heal.policy import decide
from heal.record import Flag, HealthRow, Record
from tests.heal.detectors.streams import records
from tests.heal.forecast.models import model_of
from tools.forecast import dataset, judge
from tools.forecast.calibration import chances
from tools.forecast.simulate import simulate

STEPS = 400


def calm_then_rising(at=200, rate=0.03):
    t = np.arange(STEPS)
    noise = 1 + 0.01 * np.random.default_rng(0).standard_normal(STEPS)
    return noise * np.where(t < at, 1.0, (1 + rate) ** np.maximum(t - at, 0))


def hear(stream, watch=None):
    watch = watch or ForecastWatch(model=model_of())
    return watch, [f for record in stream if (f := watch.observe(record)) is not None]


def test_a_switch_goes_on_above_the_limit_and_off_after_a_quiet_while():
    switch = Hysteresis(3.0)
    assert not switch.observe(3.0)
    assert switch.observe(3.1)
    assert not switch.observe(9.0)
    for _ in range(QUIET_STEPS - 1):
        switch.observe(3.0 - CLEAR_MARGIN - 0.1)
    assert switch.is_on
    switch.observe(3.0 - CLEAR_MARGIN + 0.1)  # not quiet enough: the count begins anew
    for _ in range(QUIET_STEPS):
        assert switch.is_on
        switch.observe(3.0 - CLEAR_MARGIN - 0.1)
    assert not switch.is_on
    assert switch.observe(4.0)


def test_a_rising_loss_is_warned_of_once_before_it_has_doubled():
    losses = calm_then_rising()
    watch, findings = hear(records(losses))
    assert [f.cause for f in findings] == [Cause.INSTABILITY_AHEAD]
    assert findings[0].step > 200
    assert losses[findings[0].step] < 2.0
    assert findings[0].severity is Severity.WARN
    assert watch.condition is State.WARNING
    assert [(old, new) for _, old, new in watch.take_moves()] == [(State.HEALTHY, State.WARNING)]
    assert watch.take_moves() == []


def test_a_calm_run_is_healthy_and_the_first_steps_are_not_judged():
    watch, findings = hear(records(1 + 0.01 * np.random.default_rng(0).standard_normal(STEPS)))
    assert findings == []
    assert watch.condition is State.HEALTHY
    wild = ForecastWatch(model=model_of(weight=0.0, bias=10.0))
    _, findings = hear(records([1.0] * 30), wild)
    assert [f.step for f in findings] == [20]


def test_a_warning_ends_when_the_run_is_calm_again():
    losses = np.concatenate([calm_then_rising()[:240], np.ones(300)])
    watch, findings = hear(records(losses))
    assert len(findings) == 1
    assert watch.condition is State.HEALTHY
    assert [new for _, _, new in watch.take_moves()] == [State.WARNING, State.HEALTHY]


def test_failure_is_said_by_detectors_and_refused_steps_only_and_ends_after_a_while():
    watch, _ = hear(records([1.0] * 60))
    watch.note_failure(60)
    assert watch.condition is State.FAILURE
    for step in range(61, 61 + QUIET_STEPS):
        assert watch.condition is State.FAILURE
        watch.observe(Record(step=step, loss=1.0, norm=1.0))
    assert watch.condition is State.HEALTHY
    watch.observe(Record(step=200, flags=Flag.HAS_NAN, blocked=True))
    assert watch.condition is State.FAILURE
    assert [(o.value, n.value) for _, o, n in watch.take_moves()] == [
        ("healthy", "failure"),
        ("failure", "healthy"),
        ("healthy", "failure"),
    ]


def test_the_state_goes_through_json_and_back():
    stream = list(records(calm_then_rising()))
    watch, _ = hear(stream[:150])
    again = ForecastWatch(model=model_of())
    again.load_state(json.loads(json.dumps(watch.state(), allow_nan=False)))
    for record in stream[150:]:
        assert again.observe(record) == watch.observe(record)
    assert again.condition is watch.condition is State.WARNING


def test_a_fresh_state_goes_through_json_too():
    again = ForecastWatch(model=model_of())
    again.load_state(json.loads(json.dumps(ForecastWatch(model=model_of()).state())))
    assert again.evidence == -math.inf


def test_losses_that_stop_end_a_warning_and_begin_a_silence():
    watch = ForecastWatch(model=model_of(weight=0.0, bias=9.0))
    hear(records([1.0] * 30), watch)
    assert watch.condition is State.WARNING
    assert not watch.is_silent
    hear([Record(step=30 + i, norm=1.0) for i in range(12 + QUIET_STEPS)], watch)
    assert watch.is_silent
    assert watch.condition is State.HEALTHY
    assert math.isnan(watch.probability)


def test_the_share_of_false_alarms_is_one_in_fifty_by_default():
    by_default = ForecastWatch(model=model_of()).switch.limit
    assert by_default == model_of().limit(0.02) != model_of().limit(0.2)


@pytest.mark.parametrize("kind", ["plain", "growing_lr", "nan_batch"])
def test_the_evidence_beside_a_run_is_that_by_which_the_model_was_judged(kind):
    """The same records, step by step as a healer hears them, and all at once as the corpus is."""
    torch.set_num_threads(1)
    made = simulate("mlp", "momentum", [kind], steps=300, batch_size=8, critical_lr=0.3, seed=5)
    run = made.records[0]
    watch, live = ForecastWatch(), []
    for step, row in enumerate(run.tolist()):
        loss, norm, clipped_norm, lr, clipped, blocked, weight_norm = row
        watch.observe(
            Record(
                step=step,
                loss=loss,
                norm=norm,
                clipped_norm=clipped_norm,
                lr=lr,
                flags=Flag.CLIPPED if clipped else Flag(0),
                blocked=bool(blocked),
            )
        )
        live.append(watch.evidence)
        if step % 10 == 0:
            watch.observe_health(HealthRow(step=step, weight_norms=(weight_norm,), weight_bad=(0,)))
    offline = judge.evidence(watch.model, dataset.features_of(run)[None])[0]
    assert live[FIRST_STEP:] == pytest.approx(offline[FIRST_STEP:].tolist(), abs=1e-3)
    assert watch.probability == pytest.approx(
        float(chances(watch.model, offline[-1:])[0]), abs=1e-3
    )


@pytest.mark.parametrize("snapshots", [[], [50, 100]])
def test_a_warning_is_answered_without_a_rollback_and_costs_no_attempt(snapshots):
    _, findings = hear(records(calm_then_rising()))
    history = History()
    diagnosis = diagnose(findings, history)
    plan = decide(diagnosis, history, HealingConfig(), snapshots)
    assert [type(action) for action in plan] == [TakeSnapshot, TightenClip, WatchClosely]
    assert not any(isinstance(action, Rollback) for action in plan)
    history.note_plan(diagnosis, plan)
    assert history.attempts == 0
