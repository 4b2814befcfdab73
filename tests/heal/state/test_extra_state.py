"""What modules keep beside tensors returns with a snapshot, and does no harm where it fails."""

import pytest
import torch
from torch import nn

from heal.actions import Rollback
from heal.extra_state import extra_states
from tests.heal.runs import assert_same, fingerprint, regression

STEPS = 60


class Counting(nn.Module):
    """Its forward depends on how often it was called, which no tensor holds."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 1)
        self.calls, self.seen = 0, []

    def forward(self, x):
        self.calls += 1
        self.seen.append(self.calls)
        return self.layer(x) * (1 + 0.01 * len(self.seen))

    def get_extra_state(self):
        return {"calls": self.calls, "seen": self.seen}

    def set_extra_state(self, state):
        self.calls, self.seen = state["calls"], state["seen"]


class Throwing(Counting):
    def get_extra_state(self):
        raise ValueError("not now")


class OneWay(Counting):
    set_extra_state = nn.Module.set_extra_state


class Odd(Counting):
    """Tells something that has no safe form on disk."""

    def get_extra_state(self):
        return {**super().get_extra_state(), "lock": object()}


def nested(kind):
    return lambda: nn.Sequential(nn.Identity(), kind())


def test_a_replayed_rollback_is_exact_for_modules_with_extra_state():
    calm = regression(model=nested(Counting), after_rollback="replay_data")
    calm.bare(STEPS)
    hurt = regression(model=nested(Counting), after_rollback="replay_data")
    healer = hurt.healer()
    healer.on_instability(
        lambda _, plan: tuple(action for action in plan if isinstance(action, Rollback)) or None
    )

    def break_weights(step):
        if step == 37 and not healer.history:
            with torch.no_grad():
                next(hurt.model.parameters()).view(-1)[0] = torch.nan

    healer.run(hurt.train_step, hurt.loader, STEPS, progress=False, on_step=break_weights)
    assert any(isinstance(plan[0], Rollback) for _, _, plan in healer.history)
    assert_same(fingerprint(hurt), fingerprint(calm))
    assert hurt.model[1].seen == calm.model[1].seen


def test_what_fails_is_noted_and_costs_no_snapshot():
    setup = regression(model=nested(Throwing))
    healer = setup.run(30)
    assert healer.snapshots()[0] == 20
    (note,) = healer.notes
    assert note == "get_extra_state of 1 (Throwing) failed: ValueError('not now')"
    setup = regression(model=nested(Counting))
    healer = setup.run(30)
    setup.model[1].set_extra_state = lambda state: 1 / 0
    healer.training.restore(healer.snapshots()[0])
    (note,) = healer.notes
    assert note.startswith("set_extra_state of 1 (Counting) failed: ZeroDivisionError")


def test_modules_that_cannot_take_it_again_are_not_asked():
    assert extra_states(nested(OneWay)(), pytest.fail) == {}
    assert extra_states(nn.Linear(2, 2), pytest.fail) == {}


@pytest.mark.parametrize("kind", [Counting, Odd])
def test_checkpoints_hold_it_where_it_has_a_safe_form(kind, tmp_path):
    first, other = (regression(model=nested(kind)) for _ in range(2))
    first.run(20, checkpoint_dir=tmp_path)
    healer = other.healer(checkpoint_dir=tmp_path)
    assert healer.resume() == 20
    assert other.model[1].calls == (20 if kind is Counting else 0)
    healer.exits.dismiss()
