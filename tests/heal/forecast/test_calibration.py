"""Probabilities that hold, and intervals that say how far they may be off."""

import numpy as np
import pytest

from heal.lab.forecast.features import NAMES
from tests.heal.forecast.models import model_of
from tools.forecast import calibration, dataset
from tools.forecast.intervals import ratio_interval

pytest.importorskip("sklearn")


def bent(x):
    """A chance that no sigmoid has."""
    return np.clip(0.02 + 0.3 * (x > 0) + 0.5 * (x > 2) * (x - 2) / 4, 0.0, 1.0)


def test_the_table_finds_a_chance_of_any_monotone_shape():
    g = np.random.default_rng(0)
    level = g.uniform(-6, 6, 60_000)
    levels, chances = calibration.table(level, g.random(60_000) < bent(level))
    assert len(levels) <= calibration.KNOTS
    assert list(chances) == sorted(chances)
    model = model_of(levels=levels, chances=chances)
    for x in (-4.0, 1.0, 1.6, 4.0, 5.0):
        assert model.probability(x) == pytest.approx(float(bent(x)), abs=0.05)


def test_without_an_event_the_chance_is_nil():
    levels, chances = calibration.table(np.linspace(-1, 1, 50), np.zeros(50, bool))
    assert model_of(levels=levels, chances=chances).probability(0.3) == 0.0


def runs_of(*told, steps=400):
    """Runs of: kind, onset, damage, healthy."""
    kinds, onsets, damages, healthy = zip(*told, strict=True)
    return dataset.Dataset(
        np.zeros((len(told), steps, len(NAMES)), np.float32),
        np.array(["mlp"] * len(told)),
        np.array(kinds),
        np.array(onsets),
        np.array(damages),
        np.array(healthy),
    )


def test_the_event_is_that_the_loss_doubles_within_fifty_steps():
    runs = runs_of(
        ("plain", -1, -1, True),  # 380 steps without the event
        ("plain", -1, -1, False),  # failed without a fault: left out
        ("drift", 200, 300, False),  # to 299, of which 250 to 299 are followed by the damage
        ("drift", 200, -1, False),  # never doubles: to 349, after which nobody knows
        ("nan_batch", 200, -1, False),  # to 199
    )
    number = np.tile(np.arange(400, dtype=np.float32), (5, 1))
    level, soon = calibration.steps_within(number, runs)
    assert len(level) == 380 + 280 + 330 + 180
    assert level[soon].tolist() == list(range(250, 300))


def test_what_is_said_is_compared_with_what_came():
    runs = runs_of(("drift", 200, 300, False), ("plain", -1, -1, True))
    scores = np.full((2, 400), -10.0, np.float32)
    scores[0, 250:300] = 10.0
    model = model_of(levels=(-10.0, 10.0), chances=(0.0, 1.0))
    told = calibration.told([calibration.reliability(model, scores, runs)])
    assert told["error"][0] == told["error_above"][0] == 0.0
    assert told["skill"][0] == 1.0
    assert told["bins"] == [[0.0, 0.0, 610], [1.0, 1.0, 50]]
    off = model_of(levels=(-10.0, 10.0), chances=(0.0, 0.8))
    told = calibration.told([calibration.reliability(off, scores, runs)])
    assert told["error_above"] == pytest.approx([0.2, 0.2, 0.2])
    assert told["error"][0] == pytest.approx(0.2 * 50 / 660)
    assert told["skill"][0] < 1.0


def test_an_interval_over_clusters_is_wider_than_one_over_cases():
    alike = ratio_interval([95] * 20, [100] * 20)
    assert alike == (0.95, 0.95)
    hits = [100] * 15 + [80] * 5
    low, high = ratio_interval(hits, [100] * 20)
    assert low < 0.93 < 0.95 < 0.97 < high
    assert ratio_interval(hits, [100] * 20) == (low, high)


def test_an_interval_needs_cases():
    with pytest.raises(ValueError, match="all denominators are 0"):
        ratio_interval([0, 0], [0, 0])
    with pytest.raises(ValueError, match="1 numerators, 2 denominators"):
        ratio_interval([0], [1, 2])
    assert ratio_interval([5, 0], [10, 0]) == (0.5, 0.5)
