"""A rate that climbs beyond all before is blamed once it undoes what was learned."""

import json
import math

import numpy as np
import pytest
from heal.detectors.lr_climb import LrClimb

from heal.causes import Cause, Severity
from heal.config import HealingConfig
from heal.verdict import Flag, Record
from tests.heal.detectors.streams import alarms, learning_curve, records

STEPS, LEFT = 400, 200


def hear(losses, lrs):
    detector = LrClimb(HealingConfig())
    stream = records(losses, lrs=lrs, scheduled_lrs=lrs)
    return [f for record in stream if (f := detector.observe(record)) is not None]


def noisy(losses, size=0.02, seed=0):
    return losses + size * np.random.default_rng(seed).standard_normal(len(losses))


def hurt(height=1.5, begin=LEFT + 20, length=40):
    """A loss that has learned, and loses it again from ``begin`` on."""
    t = np.arange(STEPS)
    return noisy(
        learning_curve(STEPS, time=60.0) + height * np.clip((t - begin) / length, 0.0, 1.0)
    )


def learned_again():
    t = np.arange(STEPS) - LEFT
    return hurt(height=0.0) + np.where(t < 0, 0.0, 3.0 * np.exp(-np.maximum(t, 0) / 60.0))


def climbing(rate=1.2, steps=40):
    t = np.arange(STEPS)
    return 1e-3 * rate ** np.clip(t - LEFT + 1, 0, steps)


def jump(factor):
    return np.where(np.arange(STEPS) < LEFT, 1e-3, factor * 1e-3)


@pytest.mark.parametrize(("rate", "steps"), [(1.2, 40), (1.05, 120), (1.02, 200)])
def test_a_climb_that_undoes_half_of_what_was_learned_is_damage(rate, steps):
    found = hear(hurt(begin=330), climbing(rate, steps))
    assert [(f.cause, f.severity) for f in found] == [(Cause.LR_SPIKE, Severity.ERROR)]
    assert found[0].bad_step == LEFT + math.ceil(math.log(2.0) / math.log(rate)) - 1
    assert 330 < found[0].step < 380
    assert found[0].evidence["lr"] > 4 * found[0].evidence["usual_lr"]
    assert found[0].evidence["loss"] > found[0].evidence["loss_before"] + 0.9


def test_the_whole_watch_acts_on_it():
    lrs = climbing()
    found = alarms(records(hurt(), lrs=lrs, scheduled_lrs=lrs))
    assert found[0].cause is Cause.LR_SPIKE
    assert found[0].bad_step == LEFT + 3


@pytest.mark.parametrize(
    ("losses", "lrs"),
    [
        (noisy(learning_curve(STEPS)), climbing()),  # the rate alone is no fault
        (hurt(), np.full(STEPS, 1e-3)),  # nor is the loss the rate's
        (hurt(), jump(3.9)),  # a phase with a somewhat higher rate
        (hurt(height=0.7), jump(30.0)),  # less than half of what was learned
        (learned_again(), jump(30.0)),  # a new phase with new data
        (noisy(np.zeros(STEPS), 1.0), jump(30.0)),  # around zero, of a policy
        (hurt(), np.r_[np.full(100, 1e-2), np.full(100, 1e-3), np.full(200, 1e-2)]),  # a restart
        (hurt(), 1e-4 * (np.arange(STEPS) + 1)),  # warm-up
        (
            noisy(1.0 + 0.01 * np.arange(STEPS)),
            1e-4 * (np.arange(STEPS) + 1),
        ),  # from the first step
        (hurt(), 1e-3 * 1.02 ** np.arange(STEPS)),  # warm-up by a factor a step
        (hurt(), np.where(np.arange(STEPS) % 20 < 10, 1e-3, 1e-2)),  # never held
        (hurt(), np.full(STEPS, np.nan)),  # not told
        (hurt(), np.zeros(STEPS)),
    ],
)
def test_what_is_healthy_or_not_the_rates_fault_is_left_alone(losses, lrs):
    assert hear(losses, lrs) == []


def test_it_is_told_once_and_again_after_the_rate_came_back():
    lrs = jump(30.0)
    assert len(hear(hurt(height=3.0), lrs)) == 1
    lrs[300:330] = 1e-3
    losses = hurt(height=3.0)
    losses[300:330] = 0.3
    assert [f.bad_step for f in hear(losses, lrs)] == [LEFT, 330]


def test_after_a_long_while_a_higher_rate_is_the_usual_one():
    t = np.arange(900)
    lrs = np.where(t < LEFT, 1e-3, 1e-2)
    losses = noisy(learning_curve(900, time=60.0))
    losses[LEFT + LrClimb.PATIENCE + 10 :] += 3.0
    assert hear(losses, lrs) == []


def test_refused_steps_say_nothing_of_the_level():
    detector = LrClimb(HealingConfig())
    for step in range(40):
        detector.observe(Record(step=step, loss=1.0, lr=1e-3))
    for step in range(40, 60):
        record = Record(step=step, loss=99.0, lr=1e-1, blocked=True, flags=Flag.HAS_NAN)
        assert detector.observe(record) is None


@pytest.mark.parametrize("cut", [5, 100, LEFT + 15, 399])
def test_the_state_goes_through_json_and_back(cut):
    stream = list(records(hurt(), lrs=climbing()))
    one, other = LrClimb(HealingConfig()), LrClimb(HealingConfig())
    for record in stream[:cut]:
        one.observe(record)
    other.load_state(json.loads(json.dumps(one.state(), allow_nan=False)))
    for record in stream[cut:]:
        assert one.observe(record) == other.observe(record)
    assert one.state() == other.state()
