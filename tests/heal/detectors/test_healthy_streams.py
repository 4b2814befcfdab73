"""No alarm that changes training on a run in which nothing is wrong."""

import numpy as np
import pytest

from tests.heal.detectors.streams import (
    alarms,
    healthy_streams,
    learning_curve,
    norm_streams,
    records,
    schedules,
)

SEEDS = 3
STEPS = 2000
NAMES = [name for name, _ in healthy_streams(0, steps=100)]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seed", range(SEEDS))
def test_a_healthy_run_is_left_alone(name, seed):
    losses = dict(healthy_streams(seed))[name]
    assert alarms(records(losses)) == []


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(SEEDS, 200))
def test_two_hundred_of_each_kind_are_left_alone(seed):
    for name, losses in healthy_streams(seed):
        assert alarms(records(losses)) == [], name


@pytest.mark.parametrize("seed", range(15, 27))
def test_a_critic_may_wander_far_and_back(seed):
    walk = np.cumsum(0.01 * np.random.default_rng(seed).standard_normal(3000))
    assert alarms(records(walk)) == []


@pytest.mark.parametrize("name", [name for name, _ in norm_streams(0)])
@pytest.mark.parametrize("seed", range(SEEDS))
def test_gradient_norms_alone_change_nothing(name, seed):
    g = np.random.default_rng(seed)
    losses = learning_curve(STEPS) + 0.1 * g.standard_normal(STEPS)
    assert alarms(records(losses, norms=dict(norm_streams(seed))[name])) == []


def test_a_run_that_memorised_its_data_may_get_new_data():
    t, g = np.arange(STEPS), np.random.default_rng(0)
    phase = np.where(t < 1000, t, t - 1000)
    losses = 2.3 * np.exp(-phase / 60.0) * np.exp(0.1 * g.standard_normal(STEPS))
    losses[1000:1100] *= 3.0
    assert alarms(records(losses, norms=3.0 * losses)) == []


@pytest.mark.parametrize("name", [name for name, _ in schedules()])
@pytest.mark.parametrize("is_told", [True, False], ids=["schedule told", "schedule unknown"])
def test_schedules_change_nothing(name, is_told):
    lrs = dict(schedules())[name]
    losses = learning_curve(STEPS) + 0.05 * np.random.default_rng(0).standard_normal(STEPS)
    stream = records(losses, lrs=lrs, scheduled_lrs=lrs if is_told else None)
    assert alarms(stream) == []


def test_a_learning_rate_that_healing_lowered_changes_nothing():
    scheduled = np.full(STEPS, 1e-3)
    lrs = np.where(np.arange(STEPS) < 500, 1e-3, 5e-4)
    losses = learning_curve(STEPS)
    assert alarms(records(losses, lrs=lrs, scheduled_lrs=scheduled)) == []
