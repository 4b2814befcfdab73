import math

import pytest
import torch
from torch import nn

from heal.lab.probes import noise_scale
from tests.heal.probes.problems import Noisy


class Mean(nn.Module):
    """0.5 * mean((w - x) ** 2): the gradient of a sample is w - x, its covariance that of x."""

    def __init__(self, size, value):
        super().__init__()
        self.w = nn.Parameter(torch.full((size,), value, dtype=torch.float64))

    def loss(self, batch):
        return 0.5 * (self.w - batch).square().sum(1).mean()


def known(value, deviations, samples=8192):
    """A problem with gradient ``value`` in every direction and noise of these deviations."""
    torch.manual_seed(0)
    spread = torch.tensor(deviations, dtype=torch.float64)
    batch = torch.randn(samples, len(deviations), dtype=torch.float64) * spread
    return Mean(len(deviations), value), batch


@pytest.mark.parametrize("pieces", [8, 64, 1024])
def test_signal_and_noise_are_those_of_the_known_covariance(pieces):
    model, batch = known(0.5, [1.0, 2.0, 3.0])
    found = noise_scale(model, model.loss, batch, pieces)
    # 8 pieces estimate a trace of 14 from 21 squares of normals: 4 deviations are 1.2 of it.
    slack = 4 * math.sqrt(2 * 98 / 14**2 / max(pieces - 1, 1))
    assert found.noise == pytest.approx(14.0, rel=slack + 0.05)
    assert found.signal == pytest.approx(0.75, rel=0.15)
    assert found.samples == pytest.approx(14.0 / 0.75, rel=slack + 0.2)


def test_it_does_not_depend_on_the_size_of_the_pieces():
    model, batch = known(0.5, [1.0, 2.0, 3.0], samples=4096)
    fine, coarse = (noise_scale(model, model.loss, batch, n) for n in (1024, 256))
    assert fine.noise == pytest.approx(coarse.noise, rel=0.3)


def test_without_noise_it_is_zero_and_without_signal_infinite():
    model, batch = known(0.5, [0.0, 0.0])
    assert noise_scale(model, model.loss, batch, 4).samples == pytest.approx(0.0, abs=1e-9)
    still = Mean(2, 0.0)
    opposite = torch.tensor([[1.0, 0.0], [-1.0, 0.0]], dtype=torch.float64)
    assert noise_scale(still, still.loss, opposite).samples == math.inf


def test_one_sample_is_refused():
    model, batch = known(0.5, [1.0])
    with pytest.raises(ValueError, match="expected at least 2 pieces to measure noise with, got 1"):
        noise_scale(model, model.loss, batch[:1])


def test_batch_norm_does_not_keep_a_sample_from_being_looked_at_alone():
    torch.manual_seed(0)
    model = Noisy()
    found = noise_scale(model, model.loss, torch.randn(8, 4))
    assert found.noise > 0.0
    assert model.layers[1].training
