"""No alarm that changes training on a run in which nothing is wrong."""

import numpy as np
import pytest

from tests.heal.detectors.streams import alarms, healthy_streams, learning_curve, records

SEEDS = 3
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


STEPS = 2000


def norm_streams(seed):
    g = np.random.default_rng(seed)
    normal, t = g.standard_normal(STEPS), np.arange(STEPS)
    yield "heavy tails", np.abs(g.standard_cauchy(STEPS))
    yield "shrinking", np.exp(-t / 300) * np.exp(0.3 * normal)
    yield "growing", np.exp(t / 500) * np.exp(0.3 * normal)
    yield "zero, mostly", np.where(g.random(STEPS) < 0.8, 0.0, np.exp(normal))
    yield "zero at first", np.where(t < 300, 0.0, np.exp(0.3 * normal))
    yield "tiny at first", np.where(t < 300, 1e-9, 1.0) * np.exp(0.3 * normal)
    yield "a new regime", np.where(t < 1000, 1.0, 500.0) * np.exp(0.3 * normal)
    yield "clipped by the caller", np.full(STEPS, 1.0)
    yield "rare giants", np.where(g.random(STEPS) < 0.01, 1e6, 1.0)
    yield "giants in pairs", np.where((t % 200) < 2, 1e5, 1.0)


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


def schedules():
    t = np.arange(STEPS)
    yield "constant", np.full(STEPS, 1e-3)
    yield "zero", np.zeros(STEPS)
    yield "cosine to zero", 5e-4 * (1 + np.cos(np.pi * t / STEPS))
    yield "warm-up from zero", np.minimum(t / 500, 1.0) * 1e-3
    yield "steep warm-up", 1e-3 * np.minimum(1.0, 10.0 ** (t / 20 - 6))
    yield "warm restarts", 1e-6 + 5e-4 * (1 + np.cos(np.pi * (t % 300) / 300))
    yield "one cycle", 1e-3 * np.exp(-(((t - 600) / 300.0) ** 2))
    yield "steps down", 1e-2 * 0.1 ** (t // 500)
    yield "second phase, higher", np.where(t < 500, 1e-6, 1e-3)


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
