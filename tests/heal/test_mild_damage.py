"""Damage that costs a tenth of the loss, not a multiple of it, is found and healed as well."""

import pytest

from benchmarks.damage.families import make
from benchmarks.damage.kinds import KINDS
from benchmarks.damage.runs import train
from benchmarks.damage.table import TOLERANCE
from benchmarks.failures.__main__ import CALM
from benchmarks.failures.protections import run_one

STEPS = 500


def ended(name, family, seed):
    (kind,) = [kind for kind in KINDS if kind.name == name]
    return train(make(family, seed), kind, seed, STEPS, "heal")


@pytest.mark.parametrize(
    ("name", "family", "seed"),
    [
        ("LR + 3 % per step", "GPT", 0),  # today's weights lose every batch, by a tenth
        ("LR + 3 % per step", "CNN", 1),
        ("one layer + N(0, 1)", "CNN", 1),  # it comes down by itself to 1.2 times the twin
        ("one layer + N(0, 1)", "CNN", 2),
        ("all weights + N(0, 0.5), first steps", "CNN", 4),  # before step 1: no level is known yet
        ("all weights + N(0, 0.5), first steps", "GPT", 41),  # less than the guess of the noise
        ("dead ReLU layer", "GPT", 1),  # of a leap that no update makes, differences decide
    ],
)
def test_mild_damage_ends_within_a_tenth_of_the_undamaged_twin(name, family, seed):
    twin = train(make(family, seed), None, seed, STEPS, "none")
    healed = ended(name, family, seed)
    assert healed.rollbacks >= 1
    assert healed.loss <= TOLERANCE * twin.loss


def test_a_weight_that_costs_a_tenth_of_the_loss_is_put_back():
    """It is a thousand times what its tensor was, so that the noise of the loss does not matter."""
    (_, damaged), (_, calm) = (
        run_one((failure, "GPT", 3, "heal")) for failure in ("a weight becomes 1e4", CALM)
    )
    assert damaged["detected"]
    assert damaged["loss"] <= 1.01 * calm["loss"]  # 1.1 without that
