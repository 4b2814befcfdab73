import json

import numpy as np
import pytest

from heal.causes import Cause, Severity
from heal.config import HealingConfig
from heal.detectors.watch import Watch
from heal.record import HealthRow

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


def is_suspected(watch, weights, step=600):
    found = watch.observe_health(row(step, weights))
    assert all(f.wants_proof and f.severity is Severity.WARN for f in found)
    return bool(found)


@pytest.mark.parametrize("factor", [0.0, 100.0, 1000.0, 1e30])
def test_weights_that_leapt_are_suspected_since_the_check_before(factor):
    (found,) = calm_watch().observe_health(row(600, (10.5, 5.2 * factor, 0.5, 5.2)))
    assert (found.cause, found.severity) == (Cause.WEIGHT_CORRUPTION, Severity.WARN)
    assert found.wants_proof
    assert found.evidence["tensor"] == "layer.weight"
    assert found.bad_step == 500


def test_the_tensor_that_leapt_most_against_its_habit_is_named():
    (found,) = calm_watch().observe_health(row(600, (100.0, 5.2e3, 0.5, 50.0)))
    assert found.evidence["tensor"] == "layer.weight"


@pytest.mark.parametrize(("factor", "is_found"), [(1.49, False), (1.51, True), (1 / 1.51, True)])
def test_a_leap_is_a_change_by_the_drift_factor(factor, is_found):
    weights = np.array([10.0, 5.0, 0.5, 5.0]) * 1.05
    weights[1] *= factor
    assert is_suspected(calm_watch(), weights) is is_found


@pytest.mark.parametrize(("factor", "is_kept"), [(900.0, False), (1100.0, True)])
def test_a_leap_is_reported_whatever_the_loss_if_the_old_norm_is_nothing_beside_it(factor, is_kept):
    (found,) = calm_watch().observe_health(row(600, (10.5, 5.25 * factor, 0.5, 5.2)))
    assert found.is_kept is is_kept


@pytest.mark.parametrize(("checks", "is_found"), [(3, False), (4, True)])
def test_habits_are_known_after_three_intervals(checks, is_found):
    assert is_suspected(calm_watch(checks), (10.0, 5e3, 0.5, 5.0)) is is_found


def restless(change):
    """A watch of weights of which one has changed by so much at most."""
    watch = Watch(HealingConfig())
    for check, size in enumerate((10.0, 10.0 + change, 10.0, 10.0 + change)):
        assert watch.observe_health(row(100 * check, (10.0, size, 10.0, 10.0))) == []
    return watch


@pytest.mark.parametrize(("times", "is_found"), [(2.95, False), (3.05, True)])
def test_a_leap_is_three_times_what_a_tensor_changed_by_before(times, is_found):
    weights = (10.0, 12.0 + 2.0 * times, 10.0, 10.0)
    assert is_suspected(restless(2.0), weights, 400) is is_found


@pytest.mark.parametrize(("step", "is_found"), [(400, True), (700, False)])
def test_where_more_steps_lie_between_a_tensor_may_change_by_as_much_more(step, is_found):
    """It changed by 2 in 100 steps, and by 8 now: four times that, in as many steps or in 400."""
    watch = restless(2.0)
    assert is_suspected(watch, (10.0, 20.0, 10.0, 10.0), step) is is_found


@pytest.mark.parametrize(("norm", "is_found"), [(0.14, False), (0.16, True)])
def test_a_change_of_a_hundredth_of_the_typical_norm_is_negligible(norm, is_found):
    watch = Watch(HealingConfig())
    for check in range(4):
        assert watch.observe_health(row(100 * check, (10.0, 10.0, 0.05 + 1e-3 * check, 10.0))) == []
    assert is_suspected(watch, (10.0, 10.0, norm, 10.0), 400) is is_found


def test_a_suspicion_that_was_not_confirmed_is_the_new_habit():
    watch = calm_watch()
    leapt = (10.5, 5.2e3, 0.5, 5.2)
    assert is_suspected(watch, leapt)
    assert not is_suspected(watch, leapt, 700)


def test_nan_is_not_learned_from():
    watch = calm_watch()
    for step in (600, 700, 800):
        assert watch.observe_health(row(step, (0.0,) * 4, weight_bad=(1, 0, 0, 0)))
    assert watch.observe_health(row(900, np.array([10.0, 5.0, 0.5, 5.0]) * 1.05)) == []


def test_an_optimizer_that_counts_from_the_start_again_was_reset():
    (found,) = calm_watch().observe_health(row(600, step_counters=(100.0,) * 4))
    assert (found.cause, found.severity) == (Cause.OPTIMIZER_RESET, Severity.WARN)
    assert not found.wants_proof  # reported, whatever it does
    assert found.bad_step == 500


@pytest.mark.parametrize("gone", [0.0, -1.0])
def test_moments_that_are_gone_were_reset(gone):
    found = calm_watch().observe_health(row(600, moments=(gone,) * 4))
    assert [f.cause for f in found] == [Cause.OPTIMIZER_RESET]


def test_moments_that_faded_away_were_not():
    watch = calm_watch()
    for step in range(600, 2000, 100):
        assert watch.observe_health(row(step, moments=(10.0 ** -(step / 50),) * 4)) == []
    assert watch.observe_health(row(2000, moments=(0.0,) * 4)) == []


@pytest.mark.parametrize(("before", "is_found"), [(0.9e-3, False), (1.1e-3, True)])
def test_moments_have_faded_at_a_thousandth_of_the_largest_that_they_were(before, is_found):
    watch = calm_watch()
    assert watch.observe_health(row(600, moments=(before,) * 4)) == []
    assert bool(watch.observe_health(row(700, moments=(0.0,) * 4))) is is_found


@pytest.mark.parametrize(("left", "is_found"), [(3, False), (2, False), (1, True)])
def test_an_optimizer_lost_its_moments_if_more_than_half_are_gone(left, is_found):
    moments = (1.0,) * left + (0.0,) * (4 - left)
    assert bool(calm_watch().observe_health(row(600, moments=moments))) is is_found


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


SUSPECTED = {"zero for long": 1, "unfrozen late": 1}
"""In forty checks, at most; none where a stream is not named."""


@pytest.mark.parametrize("name", [name for name, _ in healthy_weights(0)])
@pytest.mark.parametrize("seed", range(5))
def test_healthy_weights_are_suspected_as_rarely_as_stated(name, seed):
    watch, suspected = Watch(HealingConfig()), 0
    for check, weights in enumerate(dict(healthy_weights(seed))[name]):
        moments = (0.0, 1.0, -1.0, 0.3) if check < 2 else (0.1, 0.5, 0.2, 0.3)
        found = watch.observe_health(row(100 * check, weights, moments))
        suspected += len(found)
        assert all(f.wants_proof for f in found)
    assert suspected <= SUSPECTED.get(name, 0)


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
