import json

import numpy as np
import pytest

from heal.causes import Cause, Severity
from heal.config import HealingConfig
from heal.detect import Watch
from heal.verdict import HealthRow

NAMES = ("embed", "layer.weight", "layer.bias", "head")


def row(step, weights=(10.0, 5.0, 0.5, 5.0), moments=(1.0, 1.0, 1.0, 1.0), **fields):
    defaults = {
        "weight_bad": (0,) * len(weights),
        "moment_norms": tuple(moments),
        "moment_bad": (0,) * len(weights),
        "step_counters": (float(step),) * len(weights),
        "names": NAMES[: len(weights)],
    }
    return HealthRow(step=step, weight_norms=tuple(weights), **{**defaults, **fields})


def calm_watch(rows=5):
    watch = Watch(HealingConfig())
    for check in range(1, rows + 1):
        weights = np.array([10.0, 5.0, 0.5, 5.0]) * (1 + 0.01 * check)
        assert watch.observe_health(row(100 * check, weights)) == []
    return watch


def test_nan_in_weights_or_moments_names_the_tensor():
    watch = calm_watch()
    (found,) = watch.observe_health(row(600, weight_bad=(0, 3, 0, 1)))
    assert (found.cause, found.severity) == (Cause.WEIGHT_CORRUPTION, Severity.ERROR)
    assert (found.evidence["tensor"], found.evidence["elements"]) == ("layer.weight", 3)
    assert found.bad_step == 600  # no good snapshot holds a NaN, so that any of them will do
    (found,) = watch.observe_health(row(700, moment_bad=(0, 0, 0, 9)))
    assert (found.cause, found.evidence["tensor"]) == (Cause.OPTIMIZER_CORRUPTION, "head")
    assert found.bad_step == 700


@pytest.mark.parametrize("factor", [100.0, 1000.0, 1e30])
def test_weights_that_leapt_are_corrupt(factor):
    (found,) = calm_watch().observe_health(row(600, (10.5, 5.2 * factor, 0.5, 5.2)))
    assert (found.cause, found.severity) == (Cause.WEIGHT_CORRUPTION, Severity.ERROR)
    assert found.evidence["tensor"] == "layer.weight"


def test_weights_that_vanished_are_corrupt():
    (found,) = calm_watch().observe_health(row(600, (10.5, 5.3, 0.5, 0.0)))
    assert (found.cause, found.evidence["tensor"]) == (Cause.WEIGHT_CORRUPTION, "head")


def test_corruption_is_not_learned_from():
    watch = calm_watch()
    bad = (10.5, 5.2e3, 0.5, 5.2)
    for step in (600, 700, 800):
        (found,) = watch.observe_health(row(step, bad))
        assert found.bad_step == 500  # the last check that found nothing


def test_drift_is_told_and_changes_nothing():
    (found,) = calm_watch().observe_health(row(600, (10.5, 9.0, 0.5, 5.3)))
    assert (found.cause, found.severity) == (Cause.WEIGHT_DRIFT, Severity.WARN)
    assert found.evidence["tensor"] == "layer.weight"


def test_an_optimizer_that_counts_from_the_start_again_was_reset():
    (found,) = calm_watch().observe_health(row(600, step_counters=(100.0,) * 4))
    assert found.cause is Cause.OPTIMIZER_RESET
    assert found.bad_step == 500


@pytest.mark.parametrize("gone", [0.0, -1.0])
def test_moments_that_are_gone_were_reset(gone):
    found = calm_watch().observe_health(row(600, moments=(gone,) * 4))
    assert [f.cause for f in found] == [Cause.OPTIMIZER_RESET]


def test_a_reset_that_comes_again_after_its_rollback_is_meant_and_only_told():
    watch = calm_watch()
    saved = json.loads(json.dumps(watch.state()))
    (found,) = watch.observe_health(row(600, step_counters=(50.0,) * 4))
    assert found.severity is Severity.ERROR
    watch.load_state(saved)  # the rollback for it
    for step in (700, 900, 1100):
        (found,) = watch.observe_health(row(step, step_counters=(50.0,) * 4))
        assert (found.cause, found.severity) == (Cause.OPTIMIZER_RESET, Severity.WARN)
        assert watch.observe_health(row(step + 100, step_counters=(150.0,) * 4)) == []


def test_what_is_known_of_resets_outlives_the_process():
    watch = calm_watch()
    watch.observe_health(row(600, step_counters=(50.0,) * 4))
    resumed = Watch(HealingConfig())
    resumed.load_state(json.loads(json.dumps(watch.state())))
    (found,) = resumed.observe_health(row(700, step_counters=(60.0,) * 4))
    assert found.severity is Severity.WARN


def test_moments_that_faded_away_were_not():
    watch = calm_watch()
    for step in range(600, 2000, 100):
        assert watch.observe_health(row(step, moments=(10.0 ** -(step / 50),) * 4)) == []
    assert watch.observe_health(row(2000, moments=(0.0,) * 4)) == []


def test_one_tensor_without_moments_was_not():
    assert calm_watch().observe_health(row(600, moments=(1.0, 0.0, 1.0, 1.0))) == []


def test_tensors_that_come_and_go_start_a_new_record():
    watch = calm_watch()
    assert watch.observe_health(row(600, (10.0, 5.0, 0.5))) == []
    assert watch.observe_health(row(700, (10.0, 5.0, 0.5, 900.0))) == []


def test_other_tensors_in_the_same_places_are_not_taken_for_the_old_ones():
    watch = calm_watch()
    names = ("embed", "tail.weight", "tail.bias", "head")
    young = {"names": names, "step_counters": (600.0, 1.0, 1.0, 600.0)}
    weights = (10.6, 900.0, 0.0, 5.3)
    assert watch.observe_health(row(600, weights, moments=(1.0, 0.0, 0.0, 1.0), **young)) == []
    (found,) = watch.observe_health(row(700, (10.6, 900.0, 0.0, 5000.0), **young))
    assert found.evidence["tensor"] == "head"  # which was there all the time


def healthy_weights(seed):
    """Norms at each check, for runs that move fast or not at all."""
    g = np.random.default_rng(seed)
    checks = np.arange(40)[:, None]
    start = np.array([0.02, 1.0, 0.0, 5.0])
    yield "fast at first", start + 3.0 * (1 - np.exp(-checks / 3.0)) * g.uniform(0.5, 2, 4)
    yield "square root", start + np.sqrt(checks) * g.uniform(0.1, 3, 4)
    yield "still", np.tile(start, (40, 1))
    yield "decaying", 5.0 * 0.7**checks + 0 * start
    yield "restarts", start + 0.5 * np.cumsum(np.abs(np.sin(checks / 3.0)) * g.random(4), axis=0)
    yield "unfrozen late", start + np.maximum(checks - 20, 0) * np.array([0.0, 0.3, 0.3, 0.0])
    yield "zero for long", np.where(checks < 15, [0.0, 1.0, 0.0, 5.0], [2.0, 1.0, 2.0, 5.0])
    yield "noisy", start + 1.0 + 0.3 * g.random((40, 4))


@pytest.mark.parametrize("name", [name for name, _ in healthy_weights(0)])
@pytest.mark.parametrize("seed", range(5))
def test_healthy_weights_raise_no_alarm(name, seed):
    watch = Watch(HealingConfig())
    for check, weights in enumerate(dict(healthy_weights(seed))[name]):
        moments = (0.0, 1.0, -1.0, 0.3) if check < 2 else (0.1, 0.5, 0.2, 0.3)
        found = watch.observe_health(row(100 * check, weights, moments))
        assert [f for f in found if f.severity >= Severity.ERROR] == []


def test_an_optimizer_that_keeps_nothing_is_fine():
    watch = Watch(HealingConfig())
    for step in range(0, 1000, 100):
        empty = row(step, moments=(-1.0,) * 4, step_counters=(-1.0,) * 4)
        assert watch.observe_health(empty) == []
        assert watch.observe_health(HealthRow(step=step, weight_norms=(), weight_bad=())) == []


def test_state_is_json_and_goes_on_alike():
    watch, other = calm_watch(), Watch(HealingConfig())
    other.load_state(json.loads(json.dumps(watch.state(), allow_nan=False)))
    bad = row(600, (10.5, 5.2e3, 0.5, 5.2))
    assert other.observe_health(bad) == watch.observe_health(bad) != []


@pytest.mark.parametrize("factor", [0.25, 2.0, 4.0])
def test_weights_that_all_drift_in_one_interval_are_corrupt(factor):
    weights = np.array([10.0, 5.0, 0.5, 5.0]) * 1.05
    (found,) = calm_watch().observe_health(row(600, weights * factor))
    assert (found.cause, found.severity) == (Cause.WEIGHT_CORRUPTION, Severity.ERROR)
    assert found.evidence["tensors"] == 4
    half = np.where([True, True, False, False], weights * factor, weights)
    (found,) = calm_watch().observe_health(row(600, half))
    assert (found.cause, found.severity) == (Cause.WEIGHT_DRIFT, Severity.WARN)
