"""A loss that leaps because the data is other is left alone; one that an update threw up is not."""

from itertools import pairwise

import numpy as np
import pytest

from heal.causes import Cause, Severity
from tests.heal.detectors.streams import alarms, findings, learning_curve, records

STEPS, AT = 1500, 700


def streams(seed, height, slowness):
    """Losses and norms of a run whose data changes at once, and is learned slowly or not at all."""
    noise = np.random.default_rng(seed).standard_normal((2, STEPS))
    losses = learning_curve(STEPS) + 0.05 * noise[0]
    since = np.arange(STEPS - AT)
    losses[AT:] += height * np.exp(-since / slowness) * (1 + 0.1 * noise[0, AT:])
    norms = np.exp(0.3 * noise[1])
    norms[AT:] *= 1 + 9 * np.exp(-since / slowness)
    return losses, norms


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("slowness", [300.0, 3000.0])
@pytest.mark.parametrize("height", [5.0, 80.0, 1e6])
def test_other_data_is_told_of_and_left_alone(height, slowness, seed):
    losses, norms = streams(seed, height, slowness)
    found = findings(records(losses, norms=norms))
    assert not [f for f in found if f.severity >= Severity.ERROR]
    asked = [f for f in found if f.evidence.get("looks_like_other_data")]
    assert [f.step for f in asked][:1] == [AT + 4]  # once, as soon as patience allows
    assert all(later.step - first.step >= 100 for first, later in pairwise(asked))


@pytest.mark.parametrize(
    "sign", ["a gradient before it", "a rate before it", "it grows", "gradients as before"]
)
def test_a_leap_that_an_update_may_have_caused_is_damage(sign):
    losses, norms = streams(0, 80.0, 1e9)
    lrs = np.full(STEPS, 1e-3)
    if sign == "a gradient before it":
        norms[AT - 1] = 50.0
    elif sign == "a rate before it":
        lrs[AT - 1] = 0.1
    elif sign == "it grows":
        losses[AT : AT + 4] = 8.0, 20.0, 40.0, 60.0
    else:
        norms[AT:] /= 10.0
    first = alarms(records(losses, norms=norms, lrs=lrs))[0]
    assert first.cause is Cause.LOSS_SPIKE
    assert first.step < AT + 10
    assert first.bad_step == AT - 1


def test_clipping_leaves_an_update_as_it_always_is():
    """What was clipped did no harm, however large the gradient was."""
    losses, norms = streams(0, 80.0, 1e9)
    norms[AT - 1] = 1e3
    stream = [
        record._replace(clipped_norm=min(record.norm, 2.0)) for record in records(losses, norms)
    ]
    assert not [f for f in alarms(stream) if f.cause is Cause.LOSS_SPIKE]


def test_an_update_that_was_refused_did_no_harm_either():
    losses, norms = streams(0, 80.0, 1e9)
    norms[AT - 1] = 1e3
    stream = list(records(losses, norms))
    stream[AT - 1] = stream[AT - 1]._replace(blocked=True)
    assert not [f for f in alarms(stream) if f.cause is Cause.LOSS_SPIKE]
