"""Learning rates that nothing explains are reported by the right word."""

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
    cause = Cause.LR_SPIKE if factor > 1.0 else Cause.LR_DROP
    assert [(f.cause, f.severity, f.step) for f in found] == [(cause, Severity.WARN, 30)] * is_found
    assert all(not f.evidence["measured"] for f in found)


@pytest.mark.parametrize("scheduled", [None, [1e-3] * 60], ids=["unknown", "known"])
@pytest.mark.parametrize(("lr", "advice"), [(0.0, "nothing is learned"), (-1e-3, "raise the loss")])
def test_a_rate_of_zero_or_less_is_reported_once_with_advice(lr, advice, scheduled):
    (found,) = reports(STEADY + [lr] * 30, scheduled)
    assert (found.cause, found.step, found.severity) == (Cause.LR_DROP, 30, Severity.WARN)
    advice = advice if scheduled is None else "is put back before the step"
    assert advice in found.evidence["advice"]


def test_a_rate_below_zero_is_reported_in_the_first_step():
    (found,) = reports([-1e-3] * 30)
    assert (found.cause, found.step) == (Cause.LR_DROP, 0)


@pytest.mark.parametrize("length", [1, 30])
def test_a_schedule_that_crosses_zero_is_reported_at_once(length):
    rates = [*STEADY, *[-1e-3] * length, *STEADY]
    (found,) = reports(rates, rates)
    assert (found.cause, found.step) == (Cause.LR_DROP, 30)


def test_a_schedule_that_stays_at_zero_is_reported():
    rates = STEADY + [0.0] * 7
    assert reports(rates, rates) == []
    rates = STEADY + [0.0] * 30
    (found,) = reports(rates, rates)
    assert (found.cause, found.step) == (Cause.LR_DROP, 37)


def test_a_warm_up_from_zero_is_left_alone():
    rates = [0.0] + [1e-5 * step for step in range(1, 4)]
    assert reports(rates) == reports(rates, rates) == []


@pytest.mark.parametrize(
    ("factor", "causes"),
    [
        (1.009, []),
        (1.011, [Cause.LR_SPIKE]),
        (0.989, [Cause.LR_DROP]),
        (0.0, [Cause.LR_DROP]),
        (1000.0, [Cause.LR_SPIKE]),
    ],
)
def test_a_rate_off_its_schedule_is_reported_whatever_its_factor(factor, causes):
    found = reports([*STEADY, factor * 1e-3, *STEADY], [1e-3] * 61)
    assert [f.cause for f in found] == causes
    assert {(f.step, f.bad_step, f.severity) for f in found} <= {(30, 30, Severity.WARN)}
    assert all(f.evidence["measured"] for f in found)


def test_a_rate_that_stays_off_is_reported_once():
    assert len(reports([2e-3] * 20, [1e-3] * 20)) == 1
    wanders = [1e-3, 2e-3, 2e-3, 1e-3, 2e-3]
    assert [f.step for f in reports(wanders, [1e-3] * 5)] == [1, 4]


def held(lrs, scheduled=math.nan):
    watch = Watch(HealingConfig())
    for step, lr in enumerate(lrs):
        watch.observe(Record(step=step, loss=1.0, norm=1.0, lr=lr, scheduled_lr=scheduled))
    return watch.held_lr()[0]


def test_a_rate_is_held_once_it_was_the_same_for_32_steps():
    assert held([1e-3] * 32) == 0.0
    assert held([1e-3] * 33) == 1e-3
    assert held([1e-3] * 33 + [2e-3] * 32) == 1e-3
    assert held([1e-3] * 33 + [2e-3] * 33) == 2e-3
    assert held([1e-3] * 33 + [1e-4] * 33) == 1e-3  # the highest counts
    assert held([1e-3 * 1.05**step for step in range(60)]) == 0.0
    assert held([1e-3] * 60, scheduled=1e-3) == 0.0  # a schedule explains it


@pytest.mark.parametrize("seems_on_for", [31, 33])
def test_a_rate_that_has_left_its_schedule_is_explained_after_32_steps_on_it(seems_on_for):
    """A schedule of torch goes on from the rate that it finds."""
    watch, seems_on = Watch(HealingConfig()), [8e-3] * seems_on_for
    lrs, scheduled = [*STEADY, 8e-3, *seems_on], [*STEADY, 1e-3, *seems_on]
    for step, (lr, wanted) in enumerate(zip(lrs, scheduled, strict=True)):
        watch.observe(Record(step=step, loss=1.0, norm=1.0, lr=lr, scheduled_lr=wanted))
    is_explained = seems_on_for > 31
    assert watch.held_lr() == ((0.0, len(lrs) - 1) if is_explained else (1e-3, len(STEADY) - 1))


def test_a_rate_that_was_never_on_its_schedule_is_meant():
    assert held([8e-3] * 60, scheduled=1e-3) == 0.0


def test_the_last_step_with_a_rate_that_was_held_is_known():
    watch = Watch(HealingConfig())
    rates = [1e-3] * 40 + [1e-4] * 5 + [1e-3 * 1.03**step for step in range(1, 20)]
    for step, lr in enumerate(rates):
        watch.observe(Record(step=step, loss=1.0, norm=1.0, lr=lr))
    assert watch.held_lr() == (1e-3, 44)
