"""What a loss must do to be suspected, constant by constant, and how often healthy ones are."""

import itertools
import math

import numpy as np
import pytest

from heal.causes import Cause, Severity
from heal.config import HealingConfig
from heal.detectors.loss import LossChange
from heal.record import Record
from tests.heal.detectors.streams import healthy_streams, learning_curve

CYCLE = [0.9, 0.95, 1.05, 1.1]  # of which windows and blocks have the same quartiles


def fed(losses):
    """A detector that has heard of these and suspects nothing."""
    detector = LossChange(HealingConfig())
    assert suspicions(detector, losses) == []
    return detector


def suspicions(detector, losses, first_step=0, rebases=False):
    found = []
    for step, loss in enumerate(losses, first_step):
        finding = detector.observe(Record(step=step, loss=float(loss), norm=1.0))
        if finding is not None:
            found.append(finding)
            if rebases:  # as an experiment does that finds other data
                detector.rebase()
    return found


def calm(steps=128):
    return list(itertools.islice(itertools.cycle(CYCLE), steps))


def first_after(calm_losses, z, steps=40):
    """The first suspicion if the loss stays ``z`` times the noise above its level."""
    detector = fed(calm_losses)
    level, noise = detector.level()
    raised = [level + z * noise] * steps
    return suspicions(detector, raised, len(calm_losses))[0]


@pytest.mark.parametrize(
    ("z", "needed"), [(1e6, 1), (23.01, 1), (22.99, 2), (13.01, 2), (12.99, 3)]
)
def test_the_larger_a_leap_the_fewer_losses_it_takes(z, needed):
    found = first_after(calm(), z)
    assert (found.cause, found.step) == (Cause.LOSS_SPIKE, 127 + needed)
    assert found.bad_step == 127  # the loss of a step is that of the weights before it
    assert found.severity is Severity.WARN
    assert found.wants_proof


@pytest.mark.parametrize(
    ("z", "needed"), [(4.9, 10), (3.001, 10), (2.9, 11), (2.6, 13), (2.44, 14)]
)
def test_the_steeper_a_climb_the_fewer_losses_it_takes(z, needed):
    found = first_after(calm(), z)
    assert (found.cause, found.step) == (Cause.DIVERGENCE, 127 + needed)
    assert found.bad_step == 31  # when the best level was reached: the end of the first block
    assert found.wants_proof


def test_the_level_is_the_median_of_the_last_64_losses():
    detector = fed(calm())
    suspicions(detector, [0.5] * 32, 128)
    assert detector.level()[0] == pytest.approx(0.9)
    suspicions(detector, [0.5], 160)
    assert detector.level()[0] == 0.5


def test_the_level_of_a_young_run_is_that_of_its_second_half():
    falling = [3.0 * 0.95**step for step in range(40)]
    level, noise = fed(falling).level()
    assert level == pytest.approx(falling[30], rel=0.05)
    assert noise < 0.3  # of all 40 it is 0.7


def test_a_level_is_known_after_the_first_loss():
    assert math.isnan(fed([]).level()[0])
    detector = fed([1.0])
    assert detector.level()[0] == 1.0
    detector.rebase()  # other data: one of its losses may be a hard batch
    suspicions(detector, [2.0, 2.0], 1)
    assert math.isnan(detector.level()[0])
    suspicions(detector, [2.0], 3)
    assert detector.level()[0] == 2.0


@pytest.mark.parametrize(
    ("count", "highest"),
    [
        (128, 1.23),
        (32, 1 + 23 * 0.32 / 15),
        (8, 1 + 23 * 0.04),
        (3, 1 + 23 * 0.32 / 3),
        (2, 1 + 23 * 0.32 / 2),
        (1, 1 + 23 * 0.32),
    ],
)
def test_a_loss_without_noise_is_measured_by_its_level_and_the_more_there_are_the_finer(
    count, highest
):
    assert suspicions(fed([1.0] * count), [highest - 0.01]) == []
    (found,) = suspicions(fed([1.0] * count), [highest + 0.01])
    assert found.cause is Cause.LOSS_SPIKE


@pytest.mark.parametrize("first", [[1000.0, 1000.0, 1000.0], [1000.0, 1e30, 1e30]])
def test_to_lose_a_thousandth_of_what_was_learned_is_no_harm(first):
    learned = [*first, *[1e-6] * 200]
    detector = LossChange(HealingConfig())
    suspicions(detector, learned)
    detector.leap = detector.climb = 0.0
    state = detector.state()
    assert suspicions(detector, [22.9], 203) == []
    detector.load_state(state)
    assert suspicions(detector, [23.1], 203)[0].cause is Cause.LOSS_SPIKE


def test_a_loss_that_fell_back_to_chance_is_suspected_soon():
    losses = learning_curve(1500) + 0.05 * np.random.default_rng(2).standard_normal(1500)
    losses[700:] = 2.3
    (first, *_) = suspicions(fed(losses[:700]), losses[700:], 700)
    assert first.step <= 701
    assert first.bad_step >= 699


@pytest.mark.parametrize("noise", [0.02, 0.1, 0.3])
@pytest.mark.parametrize("seed", range(3))
def test_a_slow_climb_is_suspected_whatever_the_noise(noise, seed):
    losses = learning_curve(1500) + noise * np.random.default_rng(seed).standard_normal(1500)
    losses[700:] += 0.01 * np.arange(800)
    (first, *_) = suspicions(LossChange(HealingConfig()), losses)
    assert first.step >= 700
    assert first.bad_step < first.step
    assert losses[first.step] < 2.3 + 3 * noise  # it has not lost all that was learned


def test_a_loss_of_zero_says_nothing():
    detector = fed([1.0] * 64)
    before = detector.state()
    assert suspicions(detector, [0.0] * 200) == []
    assert detector.state() == before


def test_after_other_data_the_new_level_is_the_usual_one():
    detector = fed(calm())
    assert suspicions(detector, [100.0], 64)
    detector.rebase()
    assert suspicions(detector, [100 * loss for loss in calm(500)], 65) == []


def test_on_stationary_normal_noise_nothing_is_suspected_in_100_000_steps():
    for seed in range(10):
        noise = np.random.default_rng(seed).standard_normal(10_000)
        assert suspicions(LossChange(HealingConfig()), 1.0 + 0.1 * noise) == []


OFTEN = {
    "heavy tails": 20,
    "cauchy": 100,
    "memorised, rare hard batches": 200,
    "interpolation": 3,
    "zero, then noise": 1,
    "zero-centred, heavy": 10,
    "grpo, kl grows": 15,
    "grpo, kl grows quietly": 40,
    "curriculum jump": 2,
    "curriculum, level stays": 2,
    "warm restarts": 8,
    "warm restarts, slow to rise": 8,
    "epochs": 12,
    "mixture of easy and hard": 80,
    "overfitted, noisy labels": 20,
    "slow rise of a critic": 25,
    "warm-up rises first": 2,
}
"""Suspicions in 3,000 healthy steps, at most; none where a stream is not named. What they cost is
bounded by the budget of experiments."""


@pytest.mark.parametrize("name", [name for name, _ in healthy_streams(0, steps=100)])
def test_healthy_losses_are_suspected_as_rarely_as_stated(name):
    for seed in range(3):
        losses = dict(healthy_streams(seed))[name]
        found = suspicions(LossChange(HealingConfig()), losses, rebases=True)
        assert len(found) <= OFTEN.get(name, 0)
        assert all(finding.wants_proof for finding in found)


@pytest.mark.parametrize(("losses", "at_once"), [([1e3], True), ([2.0, 1e3], False)])
def test_a_leap_in_one_step_is_told_from_one_over_several(losses, at_once):
    detector = LossChange(HealingConfig())
    (finding,) = suspicions(detector, [*calm(), *losses])
    assert finding.evidence["leapt_at_once"] is at_once
