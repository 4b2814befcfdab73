"""Damage that only a check of the weights finds, some time after it was done."""

import pytest

from heal.actions import Rollback
from heal.causes import Cause
from heal.testing import Chaos, Fault
from tests.heal.runs import regression


@pytest.mark.parametrize("at", [67, 97, 147, 157])
def test_nan_in_a_weight_shortly_before_a_check_is_undone(at):
    setup = regression(check_interval=50)
    healer = setup.healer()
    faults = [Fault("corrupt_weight", at=at)]
    train_step = Chaos(healer, faults).wrap(setup.train_step)
    healer.run(train_step, setup.loader, 180, progress=False)
    rollbacks = [a for _, _, plan in healer.history for a in plan if isinstance(a, Rollback)]
    assert len(rollbacks) == 1
    assert at - 70 <= rollbacks[0].before_step <= at


def test_an_optimizer_that_lost_its_state_is_reported_since_the_last_sound_check():
    setup = regression(check_interval=50)
    healer = setup.healer()
    train_step = Chaos(healer, [Fault("reset_optimizer", at=125)]).wrap(setup.train_step)
    healer.run(train_step, setup.loader, 180, progress=False)
    ((_, diagnosis, plan),) = healer.history
    assert (diagnosis.cause, plan) == (Cause.OPTIMIZER_RESET, ())
    assert (diagnosis.bad_step, diagnosis.step) == (100, 150)
