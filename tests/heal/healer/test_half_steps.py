"""What an optimizer raises half-way through its step leaves no half-updated weights behind."""

import pytest
import torch

from heal.actions import HealingError, Rollback
from heal.exit_codes import ExitCode
from heal.policy import MAX_CONSECUTIVE_DATA_ERRORS
from tests.heal.runs import regression


class Breaks(torch.optim.SGD):
    """Updates some parameters, then raises in the calls that were asked for."""

    def __init__(self, params, error, calls):
        super().__init__(params, lr=1e-2)
        self.error, self.calls, self.num_calls = error, calls, 0

    def step(self, closure=None):
        self.num_calls += 1
        if self.calls(self.num_calls):
            first = self.param_groups[0]["params"][0]
            first.data.add_(0.01)  # too little for any detector
            raise self.error
        return super().step(closure)


ERRORS = [
    KeyError("exp_avg"),
    IndexError("list index out of range"),
    RuntimeError("The size of tensor a (3) must match the size of tensor b (4)"),
]


def broken(error, calls):
    setup = regression(snapshot_interval=5, quarantine_steps=2)
    setup.optimizer = Breaks(setup.model.parameters(), error, calls)
    return setup


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_half_a_step_is_taken_back(error):
    setup = broken(error, lambda call: call == 30)
    healer = setup.run(60)
    ((step, diagnosis, plan),) = healer.history
    assert (step, diagnosis.evidence["phase"]) == (29, "step")
    assert any(isinstance(action, Rollback) for action in plan)


def test_steps_that_fail_again_and_again_end_the_run_at_the_limit_in_a_row():
    setup = broken(KeyError("exp_avg"), lambda call: call >= 30)
    healer = setup.healer()
    with pytest.raises(HealingError) as halt:
        healer.run(setup.train_step, setup.loader, 200, progress=False)
    assert halt.value.exit_code == ExitCode.BAD_DATA
    assert len(healer.history) == MAX_CONSECUTIVE_DATA_ERRORS + 1
