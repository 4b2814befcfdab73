import math

import numpy as np
import pytest

from heal.lab.probes import oscillation
from heal.lab.probes.state import fisher_g


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


def decaying(t, g):
    return 0.3 + 2.0 * np.exp(-t / 100) + 0.01 * g.standard_normal(len(t))


def autoregressive(t, g, decay=0.8):
    x = np.zeros(len(t))
    for i in range(1, len(t)):
        x[i] = decay * x[i - 1] + g.standard_normal()
    return x


LEARNING_CURVES = {
    "exponential": decaying,
    "exponential-quiet": lambda t, g: 2.0 * np.exp(-t / 20) + 0.001 * g.standard_normal(len(t)),
    "exponential-red": lambda t, g: 2.0 * np.exp(-t / 80) + 0.02 * autoregressive(t, g, 0.7),
    "power-law": lambda t, g: 3.0 * (t + 1.0) ** -0.5 + 0.01 * g.standard_normal(len(t)),
    "cosine": lambda t, g: np.cos(np.pi * t / len(t)) + 0.01 * g.standard_normal(len(t)),
    "step": lambda t, g: (t < g.integers(5, len(t) - 5)) + 0.1 * g.standard_normal(len(t)),
    "spike": lambda t, g: g.standard_normal(len(t)) + 30.0 * (t == g.integers(0, len(t))),
    "walk": lambda t, g: np.cumsum(g.standard_normal(len(t))),
    "walk-noisy": lambda t, g: (
        0.1 * np.cumsum(g.standard_normal(len(t))) + g.standard_normal(len(t))
    ),
    "red": autoregressive,
}


@pytest.mark.parametrize("count", [64, 256, 1000])
@pytest.mark.parametrize("curve", LEARNING_CURVES.values(), ids=LEARNING_CURVES)
def test_a_loss_that_falls_steps_or_wanders_is_no_oscillation(curve, count):
    t, g = np.arange(count), np.random.default_rng(2)
    found = [oscillation(curve(t, g).tolist()) for _ in range(60)]
    assert sum(f.is_significant(1e-3) for f in found) <= 1  # 0.06 are due to chance
    assert sum(f.is_significant(0.01) for f in found) <= 4  # 0.6 are


def test_a_curve_without_noise_is_no_oscillation():
    t = np.arange(256)
    assert not oscillation((0.3 + 2.0 * np.exp(-t / 80)).tolist()).is_significant()


def test_a_wave_of_fewer_than_three_periods_is_not_looked_for():
    found = oscillation(wave(120.0, noise=0.05))
    assert not found.is_significant(1e-3)
    assert found.period < 256 / 2.5


def test_a_wave_on_a_learning_curve_is_found():
    t, g = np.arange(256), np.random.default_rng(0)
    losses = decaying(t, g) + 0.05 * np.sin(2 * np.pi * t / 20)
    found = oscillation(losses.tolist())
    assert found.period == pytest.approx(20.0, rel=0.03)
    assert found.is_significant(1e-6)


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
    assert fisher_g(0.06, 25) == pytest.approx(1.0, abs=0.01)
    assert fisher_g(2.5 / 498, 498) == pytest.approx(1.0, abs=1e-9)  # the sum is lost to rounding
    assert fisher_g(1.0, 25) == 0.0
