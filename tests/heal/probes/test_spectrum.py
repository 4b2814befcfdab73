import math

import numpy as np
import pytest

from heal.probes import oscillation
from heal.probes.spectrum import fisher_g


def wave(period, count=256, amplitude=1.0, noise=0.0, trend=0.0, seed=0):
    t = np.arange(count)
    g = np.random.default_rng(seed)
    return (
        amplitude * np.sin(2 * np.pi * t / period + 0.7)
        + noise * g.standard_normal(count)
        + trend * t
    ).tolist()


@pytest.mark.parametrize("period", [4.0, 7.3, 16.0, 25.5])
def test_the_period_of_a_sine_is_found(period):
    found = oscillation(wave(period, noise=0.3))
    assert found.period == pytest.approx(period, rel=0.03)
    assert found.is_significant(1e-6)


def test_a_slow_wave_is_hard_to_tell_from_a_wandering_loss():
    found = oscillation(wave(60.0, noise=0.3))
    assert found.period == pytest.approx(60.0, rel=0.03)
    assert found.is_significant(0.01)
    assert not found.is_significant(1e-6)


def test_the_amplitude_is_that_of_the_sine():
    assert oscillation(wave(16.0, amplitude=0.25)).amplitude == pytest.approx(0.25, rel=0.02)


def test_a_modulated_loss_on_its_way_down_is_found():
    t = np.arange(300)
    curve = 0.3 + 2.0 * np.exp(-t / 200)
    noise = 0.05 * np.random.default_rng(0).standard_normal(300)
    losses = curve * (1 + 0.3 * np.sin(2 * np.pi * t / 20)) + noise
    found = oscillation(losses.tolist())
    assert found.period == pytest.approx(20.0, rel=0.03)
    assert found.is_significant()


@pytest.mark.parametrize("level", [0.05, 0.01])
def test_white_noise_is_significant_as_seldom_as_the_level_says(level):
    g = np.random.default_rng(1)
    count = 2000
    hits = sum(
        oscillation(g.standard_normal(64).tolist()).is_significant(level) for _ in range(count)
    )
    spread = math.sqrt(level * (1 - level) / count)
    assert abs(hits / count - level) < 4 * spread + 0.3 * level  # the detrending costs a little


def test_red_noise_is_no_oscillation():
    g = np.random.default_rng(2)
    hits = 0
    for _ in range(200):
        x = np.zeros(256)
        for t in range(1, 256):
            x[t] = 0.8 * x[t - 1] + g.standard_normal()
        hits += oscillation(x.tolist()).is_significant(1e-3)
    assert hits <= 3


def test_a_line_or_a_constant_is_no_oscillation():
    assert oscillation([3.0] * 64) is None
    found = oscillation(wave(8.0, amplitude=0.0, trend=1.0, noise=0.1))
    assert not found.is_significant()


def test_only_what_follows_the_last_nan_is_used():
    values = [math.nan, *wave(8.0, count=128)]
    assert oscillation(values).period == pytest.approx(8.0, rel=0.02)
    assert oscillation([*wave(8.0, count=128), math.nan, 1.0]) is None


def test_the_test_of_fisher_has_its_published_value():
    # Fisher 1929: of 25 frequencies, one in twenty samples has a share above 0.2286 or so.
    assert fisher_g(0.22805, 25) == pytest.approx(0.05, abs=0.002)
    assert fisher_g(0.01, 25) == 1.0
    assert fisher_g(1.0, 25) == 0.0
