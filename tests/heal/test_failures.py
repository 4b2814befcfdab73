"""A few rows of the table of failures, on the family that needs no data but Python's own text."""

import math

import pytest

from benchmarks.failures.alerts import ALERTS, alert_rows
from benchmarks.failures.page import is_healed, page
from benchmarks.failures.protections import PROTECTIONS, run_one

SOME = ("undisturbed", "NaN loss, one batch", "LR x 1000 for a step", "batch of a wrong shape")


@pytest.fixture(scope="module")
def results():
    keys = [(row, "GPT", 0, protection) for row in SOME for protection in PROTECTIONS]
    return dict(run_one(key) for key in keys)


def test_healing_ends_within_noise_where_others_do_not(results):
    for row in SOME[1:]:
        assert is_healed(results, (row, "GPT", 0, "heal")), row
        assert results[row, "GPT", 0, "heal"]["detected"]
        assert not is_healed(results, (row, "GPT", 0, "none")), row
    assert not results["undisturbed", "GPT", 0, "heal"]["changed"]


def test_a_run_that_died_or_is_broken_is_not_healed(results):
    assert results["batch of a wrong shape", "GPT", 0, "none"]["died"]
    assert math.isnan(results["NaN loss, one batch", "GPT", 0, "clipping"]["loss"])
    key = "undisturbed", "GPT", 0, "heal"
    for change in ({"died": "ValueError"}, {"loss": math.nan}, {"loss": 100.0}):
        calm = {**results[key], "loss": results[key]["loss"]}
        broken = {**results, ("x", *key[1:]): {**calm, **change}}
        assert not is_healed(broken, ("x", *key[1:]))


def test_the_page_has_a_row_for_each_failure(results):
    text = page(results, "made in a test")
    for row in SOME[1:]:
        assert f"| {row} | 1/1 | 1/1 |" in text


@pytest.mark.parametrize("name", ALERTS)
def test_what_cannot_be_healed_is_told_and_only_that(name):
    assert ALERTS[name]("GPT", 0, True)
    assert not ALERTS[name]("GPT", 0, False)


def test_the_table_of_alerts_counts_runs_with_and_without_the_trouble(monkeypatch):
    monkeypatch.setattr(
        "benchmarks.failures.alerts.ALERTS", {"x": lambda family, seed, strikes: strikes or seed}
    )
    assert list(alert_rows(2, ["A", "B"]))[-1] == "| x | 4/4 | 2/4 |"
