"""The shipped model beside real trainings, larger by far than those that it learned from."""

import numpy as np
import pytest
import torch

from benchmarks import forecast_real
from benchmarks.failures.families import FAMILIES, make
from heal import Healer, HealingConfig
from heal.actions import HealingError

STEPS, ONSET = 600, 300


def warnings_of(family, seed, growth=0.0):
    torch.set_num_threads(1)
    training = make(family, seed)
    healer = Healer(training.model, training.optimizer, config=HealingConfig(forecast=True))
    healer.exits.dismiss()

    def train_step(batch):
        if healer.last_step >= ONSET:
            for group in training.optimizer.param_groups:
                group["lr"] *= 1.0 + growth
        return training.train_step(batch)

    try:
        healer.run(train_step, training.loader, STEPS, progress=False)
    except HealingError:
        assert growth  # a rate that never stops growing has no cure
    return [e["step"] for e in healer.recoveries if e["failure"] == "instability_ahead"]


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("seed", range(4))
def test_a_healthy_run_is_not_warned_of(family, seed):
    assert warnings_of(family, seed) == []


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("seed", range(3))
def test_a_rate_that_grows_by_three_percent_a_step_is_warned_of_within_a_hundred(family, seed):
    assert ONSET < warnings_of(family, seed, growth=0.03)[0] < ONSET + 100


def test_one_of_each():
    """The quick part of the above."""
    assert warnings_of("CNN", 0) == []
    assert ONSET < warnings_of("CNN", 0, growth=0.03)[0] < ONSET + 100


def test_a_run_is_judged_by_the_steps_before_its_loss_has_doubled():
    losses = np.ones(600, np.float32)
    losses[400:] = 3.0  # the median of nine has doubled with step 404
    told = forecast_real.judged("growing_lr", losses, [100, 350, 380], onset=300)
    assert (told["damage"], told["warned"], told["lead"]) == (404, True, 404 - 2 - 350)
    assert (told["false"], told["healthy_steps"]) == (1, 280)
    late = forecast_real.judged("growing_lr", losses, [403], onset=300)
    assert (late["doubled"], late["warned"]) == (True, False)
    calm = forecast_real.judged("healthy", np.ones(600, np.float32), [590], onset=-1)
    assert (calm["doubled"], calm["false"], calm["healthy_steps"]) == (False, 1, 580)
    instant = forecast_real.judged("nan_gradient", losses, [290], onset=300)
    assert (instant["doubled"], instant["warned_before"], instant["false"]) == (False, True, 1)


def test_chaos_breaks_a_real_run_and_the_forecast_sees_it():
    losses, warned, onset = forecast_real.follow("gru", "growing_lr", 0)
    told = forecast_real.judged("growing_lr", losses, warned, onset)
    assert told["doubled"]
    assert told["warned"]
    assert told["false"] == 0
