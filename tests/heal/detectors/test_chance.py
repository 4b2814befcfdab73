"""Back to chance, or up from nothing: which of these is sick hangs on how, and on the gradients."""

import numpy as np
import pytest

from heal.causes import Cause
from tests.heal.detectors.streams import alarms, learning_curve, records

STEPS, AT = 1500, 700
NOISE = 0.02 * np.random.default_rng(0).standard_normal(STEPS)


def path(*points):
    """Losses along straight lines between steps and levels."""
    return np.interp(np.arange(STEPS), *zip(*points, strict=True)) + NOISE


LEARNED = learning_curve(STEPS) + NOISE
CREPT = np.where(np.arange(STEPS) < AT, LEARNED, path((AT, 0.65), (AT + 300, 2.3)))
LEAPT = np.where(np.arange(STEPS) < AT, LEARNED, 2.3 + NOISE)
CRITIC = path((0, 0.0), (600, -1.0), (AT, -1.0), (AT + 1, 0.0))
SWING = path((0, 0.3), (500, -1.0), (AT, -1.0), (AT + 300, 0.2), (STEPS, 0.2))
FROM_NOTHING = path((0, 0.5), (300, 0.5), (500, 0.55), (700, 0.7), (STEPS, 0.7))


@pytest.mark.parametrize(
    ("losses", "factor", "is_sick"),
    [
        pytest.param(LEAPT, 1.0, True, id="leapt to chance"),
        pytest.param(LEAPT, 0.2, False, id="leapt to chance as gradients shrank"),
        pytest.param(CREPT, 1.0, False, id="crept to chance"),
        pytest.param(CREPT, 0.01, True, id="crept to chance as gradients vanished"),
        pytest.param(CRITIC, 1.0, False, id="a critic that finds no difference any more"),
        pytest.param(SWING, 5.0, False, id="a game that swings back over zero"),
        pytest.param(FROM_NOTHING, 5.0, False, id="a little above where it always was"),
    ],
)
def test_back_to_chance(losses, factor, is_sick):
    norms = np.where(np.arange(STEPS) < AT, 1.0, factor)
    found = {finding.cause for finding in alarms(records(losses, norms=norms))}
    assert found == ({Cause.DIVERGENCE} if is_sick else set())
