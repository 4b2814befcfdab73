"""Hooks see every plan and may replace it; one that fails is told of, and its plan is not."""

import json
import math

import pytest
import torch

from heal.actions import (
    Halt,
    Rollback,
    ScaleLr,
    SkipBatches,
)
from heal.testing import Fault
from tests.heal.runs import regression, strike


def test_a_hook_may_replace_the_plan_and_one_that_throws_is_contained(tmp_path):
    setup = regression()
    healer = setup.healer(run_dir=tmp_path)
    told = []

    @healer.on_instability
    def hook(diagnosis, plan):
        told.append((diagnosis.cause.value, plan))
        if len(told) == 1:
            raise KeyError("a bug in the hook")
        if len(told) == 2:
            return "nonsense"
        return (ScaleLr(0.25, 0.01, 1000),)

    strike(setup, [Fault("nan_loss", at=20 + 10 * i) for i in range(3)], 60, healer)
    assert [cause for cause, _ in told] == ["nonfinite_loss"] * 3
    assert healer.lr_scale < 0.3
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [e["event"] for e in events].count("hook_failed") == 2


@pytest.mark.parametrize("answer", ["nonsense", "", Halt("no tuple"), None], ids=repr)
def test_a_hook_that_fails_is_noted_without_a_run_dir_too(answer):
    setup = regression()
    healer = setup.healer()

    @healer.on_instability
    def hook(diagnosis, plan):
        return 1 / 0 if answer is None else answer

    strike(setup, [Fault("nan_loss", at=20)], 30, healer)
    (note,) = healer.notes
    assert note.startswith("the hook of on_instability failed, the plan was kept")
    assert ("ZeroDivisionError" if answer is None else "TypeError") in note


@pytest.mark.parametrize(
    "junk", [lambda: ScaleLr(math.nan), lambda: SkipBatches(0, 10**7)], ids=["nan", "far ahead"]
)
def test_junk_in_the_plan_of_a_hook_is_noted_and_the_plan_is_done(junk, tmp_path):
    setup = regression()
    healer = setup.healer(run_dir=tmp_path)
    healer.on_instability(lambda diagnosis, plan: (*plan, junk()))
    strike(setup, [Fault("corrupt_weight", at=40)], 80, healer)
    assert any(isinstance(a, Rollback) for _, _, plan in healer.history for a in plan)
    assert healer.last_step == 79
    assert len(healer.stream.unwanted()) < 100
    assert all(torch.isfinite(p).all() for p in setup.model.parameters())
    assert "expected" in healer.notes[0]
    assert "hook_failed" in (tmp_path / "events.jsonl").read_text()
