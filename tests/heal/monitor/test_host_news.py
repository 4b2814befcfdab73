"""News of the host: whatever else fails, what was asked for is done."""

import torch

from heal.actions import HealingError
from heal.exit_codes import ExitCode
from heal.record import NO_FLAG
from tests.heal.runs import regression


def train(setup, healer, epochs=4, after_step=lambda step: None):
    """Return how many steps were taken until something ended them, and what that was."""
    taken = 0
    try:
        for _ in range(epochs):
            for batch in healer.batches(setup.loader):
                with healer.attempt():
                    setup.train_step(batch).backward()
                    healer.step()
                setup.optimizer.zero_grad()
                taken += 1
                after_step(taken)
    except HealingError as halt:
        return taken, halt.exit_code
    finally:
        healer.exits.dismiss()
    return taken, None


def broken():
    raise ZeroDivisionError("division by zero")


def test_a_source_that_throws_costs_no_flag_of_others():
    setup = regression()
    healer = setup.healer()
    asked = []
    healer.add_source(broken)
    healer.add_source(lambda: asked.append(1) or NO_FLAG)
    healer.request_stop()
    taken, code = train(setup, healer)
    assert code == ExitCode.PREEMPTED
    assert taken < 16
    assert len(asked) == taken + 1
    (note,) = healer.notes
    assert "broken" in note
    assert "division by zero" in note


def test_a_stop_is_sent_again_if_the_step_it_went_with_is_undone():
    """The record of that step is thrown away unheard by the rollback."""
    setup = regression(lag=4)
    healer = setup.healer()

    def after_step(taken):
        if taken == 30:
            healer.training.restore(healer.training.snapshots()[0])
        if taken == 29:
            healer.request_stop()

    taken, code = train(setup, healer, after_step=after_step)
    assert code == ExitCode.PREEMPTED
    assert taken < 64


def test_a_stop_survives_an_optimizer_that_fails():
    setup = regression()
    healer = setup.healer()

    def fail(*ignored):
        if healer.last_step == 24:
            handle.remove()
            failures.append(1)
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    failures = []
    handle = setup.optimizer.register_step_pre_hook(fail)

    def after_step(taken):
        if healer.last_step == 24 and not failures:
            healer.request_stop()

    taken, code = train(setup, healer, after_step=after_step)
    assert failures
    assert code == ExitCode.PREEMPTED
    assert taken < 64


def test_flags_are_sent_though_healing_itself_fails_before_every_step():
    setup = regression()
    healer = setup.healer()
    healer.training.ring.before_step = broken
    healer.request_stop()
    taken, code = train(setup, healer)
    assert code == ExitCode.PREEMPTED
    assert taken < 16
