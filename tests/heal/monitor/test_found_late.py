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


def test_an_optimizer_that_lost_its_state_is_reported_in_that_step():
    setup = regression(check_interval=50)
    healer = setup.healer()
    train_step = Chaos(healer, [Fault("reset_optimizer", at=125)]).wrap(setup.train_step)
    healer.run(train_step, setup.loader, 180, progress=False)
    ((_, diagnosis, plan),) = healer.history
    assert (diagnosis.cause, plan) == (Cause.OPTIMIZER_RESET, ())
    assert (diagnosis.bad_step, diagnosis.step) == (100, 125)


def test_moments_of_zero_are_reported_before_they_grow_back():
    setup = regression()
    healer = setup.healer()

    def on_step(step):
        if step == 19:
            for state in setup.optimizer.state.values():
                state["exp_avg"].zero_()
                state["exp_avg_sq"].zero_()

    healer.run(setup.train_step, setup.loader, 50, progress=False, on_step=on_step)
    ((_, diagnosis, plan),) = healer.history
    assert (diagnosis.cause, diagnosis.step, plan) == (Cause.OPTIMIZER_RESET, 20, ())


def test_a_loop_that_writes_moments_in_every_step_has_few_of_them_measured():
    def num_checks(writes):
        setup = regression()
        healer, checks = setup.healer(), []
        observe = healer.monitor.watch.observe_health
        healer.monitor.watch.observe_health = lambda row: checks.append(row.step) or observe(row)

        def on_step(step):
            for state in setup.optimizer.state.values() if writes else ():
                state["exp_avg"].mul_(0.999)

        healer.run(setup.train_step, setup.loader, 150, progress=False, on_step=on_step)
        assert not healer.history
        return len(checks)

    assert num_checks(writes=True) <= num_checks(writes=False) + 8
