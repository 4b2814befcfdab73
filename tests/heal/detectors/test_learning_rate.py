"""Learning rates that nothing explains are reported, and acted upon where a schedule is known."""

import math

import pytest

from heal.causes import Cause, Severity
from heal.config import HealingConfig
from heal.detectors.learning_rate import LrChange
from heal.detectors.watch import Watch
from heal.record import Record

STEADY = [1e-3] * 30


def reports(lrs, scheduled=None):
    detector = LrChange(HealingConfig())
    found = []
    for step, lr in enumerate(lrs):
        wanted = math.nan if scheduled is None else scheduled[step]
        record = Record(step=step, loss=1.0, norm=1.0, lr=lr, scheduled_lr=wanted)
        found.append(detector.observe(record))
    return [f for f in found if f is not None]


@pytest.mark.parametrize(
    ("factor", "is_found"),
    [(2.9, False), (3.1, True), (8.0, True), (1 / 2.9, False), (1 / 3.1, True), (1 / 50, True)],
)
def test_a_leap_that_no_schedule_explains_is_reported_once(factor, is_found):
    found = reports(STEADY + [factor * 1e-3] * 30)
    assert [(f.cause, f.severity, f.step) for f in found] == [
        (Cause.LR_SPIKE, Severity.WARN, 30)
    ] * is_found
    assert all(not f.evidence["measured"] for f in found)


@pytest.mark.parametrize("lr", [0.0, -1e-3])
def test_a_rate_of_zero_or_less_is_reported_once_with_advice(lr):
    (found,) = reports(STEADY + [lr] * 30)
    assert (found.step, found.severity) == (30, Severity.WARN)
    assert "nothing is learned" in found.evidence["advice"]


def test_a_warm_up_from_zero_is_left_alone():
    assert reports([0.0] + [1e-5 * step for step in range(1, 4)]) == []


@pytest.mark.parametrize(
    ("factor", "severity"),
    [
        (1.009, None),
        (1.011, Severity.WARN),
        (0.989, Severity.WARN),
        (0.0, Severity.WARN),
        (9.9, Severity.WARN),
        (10.1, Severity.ERROR),
    ],
)
def test_a_rate_off_its_schedule_is_a_fact_whatever_its_factor(factor, severity):
    found = reports([*STEADY, factor * 1e-3, *STEADY], [1e-3] * 61)
    assert [f.severity for f in found] == ([] if severity is None else [severity])
    assert [(f.step, f.bad_step) for f in found] == ([] if severity is None else [(30, 30)])
    assert all(f.evidence["measured"] for f in found)


def test_a_rate_that_stays_off_is_reported_once_and_damage_with_every_update():
    assert len(reports([2e-3] * 20, [1e-3] * 20)) == 1
    assert len(reports([2e-2] * 20, [1e-3] * 20)) == 20
    wanders = [1e-3, 2e-3, 2e-3, 1e-3, 2e-3]
    assert [f.step for f in reports(wanders, [1e-3] * 5)] == [1, 4]


def held(lrs, scheduled=math.nan):
    watch = Watch(HealingConfig())
    for step, lr in enumerate(lrs):
        watch.observe(Record(step=step, loss=1.0, norm=1.0, lr=lr, scheduled_lr=scheduled))
    return watch.held_lr()


def test_a_rate_is_held_once_it_was_the_same_for_32_steps():
    assert held([1e-3] * 32) == 0.0
    assert held([1e-3] * 33) == 1e-3
    assert held([1e-3] * 33 + [2e-3] * 32) == 1e-3
    assert held([1e-3] * 33 + [2e-3] * 33) == 2e-3
    assert held([1e-3] * 33 + [1e-4] * 33) == 1e-3  # the highest counts
    assert held([1e-3 * 1.05**step for step in range(60)]) == 0.0
    assert held([1e-3] * 60, scheduled=1e-3) == 0.0  # a schedule explains it
