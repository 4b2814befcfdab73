"""Healing ends: within its budget, whatever comes and whatever a hook answers, with a page."""

import json

import pytest

from heal.actions import (
    Backoff,
    ClearCache,
    Halt,
    HealingError,
    ShrinkBatch,
    Skip,
    SkipBatches,
)
from heal.exception_causes import qualified_name
from heal.exit_codes import ExitCode
from heal.policy import MAX_CONSECUTIVE_DATA_ERRORS
from heal.testing import Fault
from tests.heal.runs import halted, regression, strike

FOREVER = 10**6
ADVERSARIES = {
    "always NaN": ([Fault("nan_loss", at=0, times=FOREVER)], {}, None),
    "NaN from step 60 on": (
        [Fault("nan_gradient", at=60, times=FOREVER)],
        {},
        ExitCode.NONFINITE,  # the weights are sound: no rollback could help
    ),
    "NaN weights after every rollback": (
        [Fault("corrupt_weight", at=60, times=FOREVER)],
        {},
        ExitCode.BUDGET_SPENT,
    ),
    "NaN, never rolled back": (
        [Fault("nan_loss", at=10, times=FOREVER)],
        {"nan_action": "skip"},
        ExitCode.NONFINITE,
    ),
    "NaN, told to raise": (
        [Fault("nan_loss", at=10)],
        {"nan_action": "raise"},
        ExitCode.NONFINITE,
    ),
    "OOM at micro-batch 1": (
        [Fault("oom_forward", at=30, times=FOREVER)],
        {},
        ExitCode.OUT_OF_MEMORY,
    ),
    "all data bad": ([Fault("bad_batch", at=0, times=FOREVER)], {}, ExitCode.BAD_DATA),
    "no batch can be read": ([Fault("loader_error", at=0, times=FOREVER)], {}, ExitCode.BAD_DATA),
    "no network": ([Fault("network_error", at=20, times=FOREVER)], {}, ExitCode.NETWORK),
}


@pytest.mark.parametrize("name", ADVERSARIES)
def test_healing_ends_within_its_budget(name, tmp_path):
    faults, config, code = ADVERSARIES[name]
    setup = regression(**config)
    halt = halted(setup, faults, run_dir=tmp_path)
    assert halt.exit_code == code if code is not None else halt.exit_code >= 40
    page = json.loads((tmp_path / "postmortem.json").read_text())
    assert page["exit_code"] == halt.exit_code
    original = halt if halt.__cause__ is None else halt.__cause__
    assert page["exception_type"] == qualified_name(original)
    assert page["halted_because"] == str(halt)
    assert page["recovery_actions"]
    assert page["recovery_actions"][-1]["actions"] in (["halt"], ["rollback", "halt"])
    assert {"failure", "diagnosis", "actions"} <= set(page["recovery_actions"][0])
    assert page["running_time_seconds"] > 0


@pytest.mark.parametrize("words", ["the loss is nan", "Function 'SqrtBackward0' returned nan"])
def test_a_step_that_raises_for_nan_is_not_tried_for_ever(words):
    setup, calls = regression(), []

    def train_step(batch):
        calls.append(batch)
        raise FloatingPointError(words)

    setup.train_step = train_step
    with pytest.raises(HealingError) as caught:
        setup.run(50)
    assert caught.value.exit_code == ExitCode.NONFINITE
    assert len(calls) == setup.config.max_consecutive_skips


def test_steps_that_raise_for_nan_now_and_then_cost_themselves_only():
    setup, calls = regression(), []
    own = setup.train_step

    def train_step(batch):
        calls.append(batch)
        if len(calls) % 10 == 0:
            raise FloatingPointError("the loss is nan")
        return own(batch)

    setup.train_step = train_step
    healer = setup.run(60)
    metrics = healer.metrics()
    assert metrics["healing/recovery_attempts"] == 0
    assert metrics["healing/nan_count"] == len(calls) // 10


ANSWERS = {
    "nothing": (),
    "a cleared cache": (ClearCache(),),
    "a refusal": (Skip(),),
    "a wait": (Backoff(0),),
    "a smaller batch": (ShrinkBatch(),),
    "another batch": (SkipBatches(0, 0),),
}
RAISED = {
    "oom_forward": ExitCode.OUT_OF_MEMORY,
    "network_error": ExitCode.NETWORK,
    "bad_batch": ExitCode.BAD_DATA,
}


class Endless(BaseException):
    """No Exception: those of a hook are contained."""


@pytest.mark.parametrize("answer", ANSWERS)
@pytest.mark.parametrize("kind", RAISED)
def test_healing_ends_whatever_the_hook_answers_to_an_exception(kind, answer):
    setup = regression()
    healer, asked = setup.healer(), []

    @healer.on_instability
    def hook(diagnosis, plan):
        asked.append(diagnosis)
        if len(asked) > 200:
            raise Endless
        return ANSWERS[answer]

    halt = halted(setup, [Fault(kind, at=20, times=FOREVER)], healer=healer)
    assert halt.exit_code == RAISED[kind]
    assert halt.__cause__ is not None
    assert healer.last_step == 19


def test_a_mistake_is_raised_whatever_the_hook_answers():
    setup = regression()
    healer, calls = setup.healer(), []
    healer.on_instability(lambda diagnosis, plan: ())

    class Mistake(Exception):
        pass

    def train_step(batch):
        calls.append(batch)
        raise Mistake("of mine")

    with pytest.raises(Mistake, match="of mine"):
        healer.run(train_step, setup.loader, 5, progress=False)
    assert len(calls) == MAX_CONSECUTIVE_DATA_ERRORS + 1


def test_numbers_that_are_raised_as_an_error_end_the_run_too():
    setup = regression(max_consecutive_skips=8)
    healer = setup.healer()
    healer.on_instability(lambda diagnosis, plan: ())

    def train_step(batch):
        raise FloatingPointError("loss is nan")

    with pytest.raises(HealingError, match="8 steps in a row were skipped") as caught:
        healer.run(train_step, setup.loader, 5, progress=False)
    assert caught.value.exit_code == ExitCode.NONFINITE


def test_batches_that_a_hook_gives_up_count_only_in_a_row():
    setup = regression()
    healer = setup.healer()
    healer.on_instability(lambda diagnosis, plan: ())
    faults = [Fault("oom_forward", at=at, times=2) for at in range(5, 50, 5)]
    strike(setup, faults, 60, healer)
    assert healer.last_step == 59


def test_a_spent_budget_is_no_matter_for_the_hook():
    setup = regression(nan_action="skip", max_consecutive_skips=8)
    healer, seen = setup.healer(), []

    @healer.on_instability
    def hook(diagnosis, plan):
        seen.extend(plan)
        return (Skip(),)

    halt = halted(setup, [Fault("nan_loss", at=10, times=FOREVER)], healer=healer)
    assert halt.exit_code == ExitCode.NONFINITE
    assert isinstance(seen[-1], Halt)


def test_success_leaves_a_postmortem_in_the_run_dir(tmp_path):
    setup = regression()
    setup.run(20, run_dir=tmp_path)
    page = json.loads((tmp_path / "postmortem.json").read_text())
    assert (page["exit_reason"], page["exit_code"], page["last_step"]) == ("completed", 0, 19)
    assert page["final_metrics"]["loss"] > 0
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [9, 19, 19]  # and what came late


def test_an_error_without_a_cure_is_passed_on_as_it_is(tmp_path):
    setup = regression()

    class Mistake(Exception):
        pass

    def train_step(batch):
        raise Mistake("of mine")

    with pytest.raises(Mistake, match="of mine"):
        setup.healer(run_dir=tmp_path).run(train_step, setup.loader, 5, progress=False)
    page = json.loads((tmp_path / "postmortem.json").read_text())
    assert page["exit_reason"] == "exception"
    assert page["exception_type"].endswith("Mistake")


def test_a_plan_to_halt_may_come_from_the_hook(tmp_path):
    setup = regression()
    healer = setup.healer(run_dir=tmp_path)
    healer.on_instability(lambda diagnosis, plan: (Halt("I have seen enough", 99),))
    with pytest.raises(HealingError, match="seen enough") as caught:
        strike(setup, [Fault("nan_loss", at=20)], 60, healer)
    assert caught.value.exit_code == 99


def test_a_run_without_snapshots_still_refuses_and_halts_where_it_must(monkeypatch):
    monkeypatch.setattr("heal.training_run.temporary_folders", lambda: [])  # nor a disk
    setup = regression(snapshot_memory_factor=0.5)
    healer = setup.healer()
    strike(setup, [Fault("nan_loss", at=20)], 40, healer)
    assert "snapshot_memory_factor" in healer.notes[0]
    setup = regression(snapshot_memory_factor=0.5)
    with pytest.raises(HealingError):
        strike(setup, [Fault("corrupt_weight", at=20)], 60, setup.healer())
