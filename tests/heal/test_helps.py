"""The benchmark that asks whether forecast, probes and anchors help, on its smallest family."""

import math

import pytest

from benchmarks.helps import page
from benchmarks.helps.__main__ import all_keys, jobs_of, of_whole_seeds, read, write
from benchmarks.helps.alarms import ALARMS, FIRST_LOOK, LOOK_STEPS
from benchmarks.helps.families import FAMILIES, STEPS, make
from benchmarks.helps.faults import HEALTHY, LAST, ONSET, SLOW, SlowFault, doubled_at
from benchmarks.helps.intervals import clustered_mean, rate, share
from benchmarks.helps.runs import CURES, NOTHING, run_one
from benchmarks.helps.summary import CALIBRATION, Runs, set_limits, summary

TRIED = ("bare healer", "EWC, Fisher")


@pytest.fixture(scope="module")
def results():
    """One seed of the dense network, healthy and with a drift; cures not tried are bare healers."""
    done = {}
    for fault, cures in ((HEALTHY, TRIED[:1]), ("drift", TRIED)):
        done |= run_one(("MLP", fault, 0, (NOTHING, *ALARMS)))
        for cure in cures:
            done |= run_one(("MLP", fault, 0, (cure,)))
        for cure in set(CURES) - set(cures):
            done[cure, "MLP", fault, 0] = done["bare healer", "MLP", fault, 0]
    return done


def test_alarms_leave_training_as_it_is(results):
    assert (
        results[NOTHING, "MLP", HEALTHY, 0]["loss"]
        == results["bare healer", "MLP", HEALTHY, 0]["loss"]
    )
    looks = len(range(FIRST_LOOK, STEPS, LOOK_STEPS))
    for name in ALARMS:
        assert len(results[name, "MLP", HEALTHY, 0]["scores"]) == looks


def test_a_drift_doubles_the_loss_if_nothing_is_healed_and_healing_helps(results):
    assert ONSET < results[NOTHING, "MLP", "drift", 0]["doubled"] < LAST
    assert results[NOTHING, "MLP", HEALTHY, 0]["doubled"] is None
    lost = results[NOTHING, "MLP", "drift", 0]["loss"]
    for cure in TRIED:
        assert results[cure, "MLP", "drift", 0]["loss"] < lost / 2, cure


def test_every_variant_has_a_row_in_every_table_it_belongs_to(results):
    told = summary(results)
    assert told["doubled"]["drift"] == 1
    assert told["undisturbed"] == (1, 1)
    assert told["healthy_steps"] == STEPS
    assert set(told["cures"]) == {NOTHING, *CURES}
    for table in (page.warnings_table, page.kinds_table, page.instants_table):
        text = table(told)
        assert all(f"| {name}: {kind.words} |" in text for name, kind in ALARMS.items())
        assert "| forecast |" in text
        assert not any(name in table(page.without_probes(told)) for name in ALARMS)
    outcomes = page.outcomes_table(told)
    assert all(outcomes.count(f"| + {name} |") == 3 for name in CURES if name != TRIED[0])
    assert all(f"| {name} |" in page.costs_table(told) for name in ALARMS)
    assert "alone: 1.000 (1.000 to 1.000) after slow faults, - after instant" in page.control(told)


def test_a_fault_acts_once_per_attempt():
    training, _ = make("MLP", 0)
    fault = SlowFault("drift", training, 0)
    weight = next(training.model.parameters())
    fault.begin(ONSET + 50)
    once = weight.detach().clone()
    fault.begin(ONSET + 50)
    assert weight.equal(once)
    fault.begin(ONSET + 51)
    assert not weight.equal(once)


@pytest.mark.parametrize("kind", SLOW)
def test_before_its_onset_and_after_its_repair_a_slow_fault_does_nothing(kind):
    training, _ = make("MLP", 0)
    before = [p.detach().clone() for p in training.model.parameters()]
    fault = SlowFault(kind, training, 0)
    for attempt in (0, ONSET - 1, LAST, STEPS):
        fault.begin(attempt)
        assert training.scheduler.base_lrs == [0.4]
    assert all(p.equal(q) for p, q in zip(training.model.parameters(), before, strict=True))


def test_the_loss_has_doubled_when_the_median_of_nine_has():
    losses = [1.0] * ONSET + [1.0] * 10 + [3.0] * 20
    assert doubled_at(losses) == ONSET + 10 + 4
    assert doubled_at([1.0] * STEPS) is None
    assert doubled_at([1.0] * ONSET + [math.nan] * 9) == ONSET + 4


def test_an_alarm_is_a_rise_above_the_limit_of_its_family():
    scores = [None, 2.0, 0.5, 1.5, 1.6, 0.0]
    places = {variant: {("MLP", HEALTHY, 0): {}} for variant in (NOTHING, *ALARMS, *CURES)}
    results = {(v, *w): told for v, found in places.items() for w, told in found.items()}
    results["sharpness", "MLP", HEALTHY, 0] = {"scores": scores}
    rises = Runs(results).risen("sharpness", {"MLP": 1.0})
    assert rises(("MLP", HEALTHY, 0)) == [FIRST_LOOK + LOOK_STEPS, FIRST_LOOK + 3 * LOOK_STEPS]


def test_limits_are_set_on_other_seeds_than_those_that_are_judged():
    keys = all_keys(seeds=2, healthy=3)
    assert not set(CALIBRATION) & {seed for v, _, _, seed in keys if v in CURES}
    results = {("sharpness", "MLP", HEALTHY, CALIBRATION[0]): {"scores": [1.0, None, 4.0]}}
    results["sharpness", "MLP", HEALTHY, 0] = {"scores": [9.0]}
    limits = set_limits(results, "sharpness")
    assert limits["MLP"] == 4.0
    assert limits["CNN"] == math.inf  # no limit, no alarm


def test_alarms_share_a_training_and_cures_do_not():
    keys = [k for k in all_keys(seeds=1, healthy=0) if k[1:] == ("CNN", "drift", 0)]
    assert [variants for *_, variants in jobs_of(keys)] == [
        (NOTHING, *ALARMS),
        *[(cure,) for cure in CURES],
    ]


def test_every_variant_has_healthy_runs_of_every_family():
    found = {key[:2] for key in all_keys(seeds=1, healthy=0) if key[2:] == (HEALTHY, 0)}
    assert found == {(v, f) for v in (NOTHING, *ALARMS, *CURES) for f in FAMILIES}


def test_a_seed_counts_when_all_of_its_faults_are_done():
    done = {key: {} for key in all_keys(seeds=2, healthy=1)}
    del done["EWC, uniform", "ViT", "drift", 1]
    left = {key[3] for key in of_whole_seeds(done) if key[2] != HEALTHY}
    assert left == {0}
    assert ("forecast", "MLP", HEALTHY, 2) in of_whole_seeds(done)


def test_a_torn_line_is_run_again(tmp_path):
    results = {("forecast", "MLP", HEALTHY, 0): {"loss": 1.0}}
    write(tmp_path / "lines", results)
    with (tmp_path / "lines").open("a") as file:
        file.write('["forecast","MLP","dri')
    assert read(tmp_path / "lines") == results
    assert read(tmp_path / "none") == {}


def test_intervals_of_shares_and_rates_are_those_of_the_books():
    assert share(0, 0) is None
    assert share(0, 10) == pytest.approx((0.0, 0.0, 0.2775), abs=1e-4)
    assert share(81, 263) == pytest.approx((0.308, 0.2553, 0.3662), abs=1e-4)  # Newcombe 1998
    assert rate(0, 1.0) == pytest.approx((0.0, 0.0, 3.6889), abs=1e-4)
    assert rate(10, 2.0) == pytest.approx((5.0, 4.7954 / 2, 18.3904 / 2), abs=1e-4)


def test_the_bootstrap_draws_whole_clusters():
    mean, low, high = clustered_mean({"a": [1.0, 1.0], "b": [3.0, 3.0]})
    assert mean == 2.0
    assert (low, high) == (1.0, 3.0)
    assert clustered_mean({}) is None
