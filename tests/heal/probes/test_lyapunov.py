import math

import pytest
import torch

from heal.lab.probes import LyapunovMeter
from tests.heal.probes.problems import Quadratic


def exponent_of(spectrum, lr, steps=60, window=30, refused=()):
    model = Quadratic(spectrum)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    meter = LyapunovMeter(model.parameters(), window=window)
    for step in range(steps):
        optimizer.zero_grad()
        model().backward()
        if step not in refused:
            optimizer.step()
        meter.observe(step)
    return meter.exponent()


@pytest.mark.parametrize("lr", [0.5, 1.0, 2.1, 3.0])
def test_on_a_quadratic_it_is_the_log_of_the_growth_factor(lr):
    assert exponent_of([1.0, 1.0], lr if lr != 1.0 else 0.9) == pytest.approx(
        math.log(abs(1 - (lr if lr != 1.0 else 0.9))), rel=1e-6
    )


def test_the_direction_that_grows_fastest_decides():
    assert exponent_of([0.1, 1.0, 3.0], 0.8) == pytest.approx(math.log(1.4), rel=1e-3)
    assert exponent_of([0.1, 1.0, 2.0], 0.8) == pytest.approx(math.log(0.92), rel=1e-3)


@pytest.mark.parametrize("refused", [(45,), (40, 41, 59)], ids=["one", "several"])
def test_a_refused_step_does_not_blind_the_meter(refused):
    assert exponent_of([1.0, 1.0], 0.5, refused=refused) == pytest.approx(math.log(0.5), rel=1e-6)


def moved(meter, weight, lengths, first_step=0):
    for step, length in enumerate(lengths, first_step):
        with torch.no_grad():
            weight += length
        meter.observe(step)


def test_after_a_rollback_the_meter_starts_anew():
    weight = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))
    meter = LyapunovMeter([weight])
    moved(meter, weight, [2.0**k for k in range(12)])
    assert meter.exponent() == pytest.approx(math.log(2.0))
    weight.data.zero_()  # back to the snapshot of step 5
    moved(meter, weight, [0.5**k for k in range(3)], first_step=5)
    assert math.isnan(meter.exponent())  # nothing is known yet, and nothing is remembered
    moved(meter, weight, [0.5**k for k in range(3, 8)], first_step=8)
    assert meter.exponent() == pytest.approx(math.log(0.5))
    meter.restart()
    assert math.isnan(meter.exponent())


def test_what_came_before_a_burst_is_forgotten():
    weight = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))
    meter = LyapunovMeter([weight])
    moved(meter, weight, [1.0, 2.0, math.inf])
    assert math.isnan(meter.exponent())
    weight.data.zero_()
    moved(meter, weight, [0.0, *(3.0**k for k in range(5))], first_step=3)
    assert meter.exponent() == pytest.approx(math.log(3.0))


def test_weights_that_stand_still_or_burst_have_no_exponent():
    weight = torch.nn.Parameter(torch.zeros(3))
    meter = LyapunovMeter([weight])
    assert math.isnan(meter.exponent())
    for _ in range(5):
        meter.observe()
    assert math.isnan(meter.exponent())
    weight.data.fill_(math.inf)
    meter.observe()
    assert math.isnan(meter.exponent())


def test_only_a_sample_of_a_large_model_is_followed():
    weight = torch.nn.Parameter(torch.zeros(100_000))
    meter = LyapunovMeter([weight])
    assert len(meter._followed[0][1]) <= 4097
    with pytest.raises(ValueError, match="no trainable parameters"):
        LyapunovMeter([])
    with pytest.raises(ValueError, match="window: expected at least 2 steps, got 1"):
        LyapunovMeter([weight], window=1)
