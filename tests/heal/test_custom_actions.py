"""A hook may plan actions of its own: journaled, counted, bounded, and their failures contained."""

import json
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from heal import Action, HealingError, Rollback, ScaleLr
from heal.report.collect import read_run
from heal.testing import Fault
from tests.heal.runs import regression, strike

STEPS = 80


@dataclass
class ResetHead:
    """Puts noise into the last layer, of an amount that the journal should have."""

    std: float
    calls: list[int] = field(default_factory=list)

    def apply(self, run) -> bool:
        self.calls.append(run.step)
        return True

    def to_json(self) -> dict[str, Any]:
        return {"std": self.std, "action": "Rollback", "tensor": torch.tensor(2.0)}


class Fails:
    def apply(self, run) -> bool:
        raise OSError("the service is away")


class CannotBeWritten:
    def apply(self, run) -> bool:
        return False

    def to_json(self) -> dict[str, Any]:
        raise KeyError("nothing to write")


class Stops:
    def apply(self, run) -> bool:
        raise HealingError("I have seen enough", 99)


def recoveries(run_dir):
    lines = (run_dir / "events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == "recovery"]


def test_an_action_of_a_hook_is_applied_and_journaled_by_its_class(tmp_path):
    setup = regression()
    healer = setup.healer(run_dir=tmp_path, checkpoint_dir=tmp_path / "checkpoints")
    reset = ResetHead(0.1)
    assert isinstance(reset, Action)
    healer.on_instability(lambda diagnosis, plan: (*plan, reset))
    strike(setup, [Fault("corrupt_weight", at=40)], STEPS, healer)
    assert healer.last_step == STEPS - 1
    assert not healer.notes
    (event,) = recoveries(tmp_path)
    done = event["plan"]
    assert [action["action"] for action in done][:2] == ["Rollback", "SkipBatches"]
    assert done[-1] == {"action": "ResetHead", "std": 0.1, "tensor": 2.0, "effect": True}
    assert reset.calls == [event["resumed_at"]]  # in its place: after the rollback
    assert healer.metrics()["healing/recovery_attempts"] == 1
    page = json.loads((tmp_path / "postmortem.json").read_text())
    assert page["recovery_actions"][-1]["actions"][-1] == "reset_head"
    assert "ResetHead" in str(read_run(tmp_path))
    healer.save_checkpoint()
    resumed = regression().healer(checkpoint_dir=tmp_path / "checkpoints")
    assert resumed.resume() == STEPS


@pytest.mark.parametrize(
    ("action", "written"),
    [
        (Fails(), {"action": "Fails", "effect": False}),
        (
            CannotBeWritten(),
            {
                "action": "CannotBeWritten",
                "error": "KeyError('nothing to write')",
                "effect": False,
            },
        ),
    ],
    ids=["raises", "cannot be written"],
)
def test_an_action_that_fails_is_left_out_and_the_rest_of_the_plan_is_done(
    action, written, tmp_path
):
    setup = regression()
    healer = setup.healer(run_dir=tmp_path)
    healer.on_instability(lambda diagnosis, plan: (action, *plan))
    strike(setup, [Fault("corrupt_weight", at=40)], STEPS, healer)
    assert healer.last_step == STEPS - 1
    (event,) = recoveries(tmp_path)
    assert event["plan"][0] == written
    assert event["plan"][1]["action"] == "Rollback"
    assert all(torch.isfinite(p).all() for p in setup.model.parameters())
    if isinstance(action, Fails):
        assert healer.notes == ["Fails failed and was left out: OSError('the service is away')"]


def test_an_action_may_end_the_run():
    setup = regression()
    healer = setup.healer()
    healer.on_instability(lambda diagnosis, plan: (Stops(),))
    with pytest.raises(HealingError, match="seen enough") as caught:
        strike(setup, [Fault("nan_loss", at=20)], STEPS, healer)
    assert caught.value.exit_code == 99


def test_attempts_with_actions_of_a_hook_are_bounded_for_every_cause():
    """Skipped steps need no attempt of ours, so that nothing else would end this."""
    setup = regression(max_recovery_attempts=3)
    healer, action = setup.healer(), ResetHead(0.1)
    healer.on_instability(lambda diagnosis, plan: (*plan, action))
    strike(setup, [Fault("nan_loss", at=at) for at in range(10, 70, 5)], STEPS, healer)
    assert len(action.calls) == 3
    assert healer.metrics()["healing/recovery_attempts"] == 3
    assert "at most 3 attempts (max_recovery_attempts)" in healer.notes[0]
    assert healer.last_step == STEPS - 1


def test_what_was_raised_is_tried_again_after_an_action_of_a_hook():
    setup = regression()
    healer = setup.healer()

    class FreeMemory:
        def apply(self, run) -> bool:
            return True

    healer.on_instability(lambda diagnosis, plan: (FreeMemory(),))
    strike(setup, [Fault("oom_forward", at=20)], 40, healer)
    assert (healer.last_step, healer.attempts) == (39, 41)
    assert healer.micro_batches == 1


def named(name):
    return type(name, (), {"apply": lambda self, run: True})()


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ((ResetHead,), "expected actions with a method apply(run) -> bool, got <class"),
        ((object(),), "expected actions with a method apply(run) -> bool, got <object"),
        (("Rollback",), "expected actions with a method apply(run) -> bool, got 'Rollback'"),
        ((named("Rollback"),), "expected an action with a name of its own"),
    ],
    ids=["class", "object", "text", "name of ours"],
)
def test_what_is_no_action_is_named_and_the_plan_is_kept(answer, message):
    setup = regression()
    healer = setup.healer()
    healer.on_instability(lambda diagnosis, plan: (*plan, *answer))
    strike(setup, [Fault("corrupt_weight", at=40)], STEPS, healer)
    assert message in healer.notes[0]
    assert any(isinstance(a, Rollback) for _, _, plan in healer.history for a in plan)


def test_actions_of_ours_keep_their_own_budgets():
    setup = regression(max_recovery_attempts=1)
    healer = setup.healer()
    healer.on_instability(lambda diagnosis, plan: (ScaleLr(0.9),))
    strike(setup, [Fault("nan_loss", at=at) for at in (10, 20, 30)], 40, healer)
    assert healer.metrics()["healing/recovery_attempts"] == 3


class Redraws:
    """Draws the first layer again; the loss is then that of an untrained network."""

    def __init__(self, model):
        self.layer = next(m for m in model.modules() if isinstance(m, torch.nn.Linear))

    def apply(self, run) -> bool:
        torch.nn.init.normal_(self.layer.weight, std=2.0)
        return True


@pytest.mark.parametrize("at", [20, 60])
def test_weights_that_an_action_writes_are_meant(at):
    setup = regression()
    healer = setup.healer()

    @healer.on_instability
    def redraw(diagnosis, plan):
        if any(isinstance(action, Rollback) for action in plan):
            return (*plan, Redraws(setup.model))
        return None

    strike(setup, [Fault("corrupt_weight", at=at)], at + 60, healer)
    (plan,) = [plan for *_, plan in healer.history]
    assert any(isinstance(action, Redraws) for action in plan)
    assert not healer.experiment.settled
