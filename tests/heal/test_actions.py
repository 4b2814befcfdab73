import json
import re

import pytest

from heal.actions import (
    ACTIONS,
    AnchorWeights,
    Backoff,
    CheckpointActivations,
    ClearCache,
    Halt,
    HealingError,
    HoldLr,
    PerturbWeights,
    RelearnClip,
    Rollback,
    ScaleLr,
    ShrinkBatch,
    Skip,
    SkipBatches,
    TakeSnapshot,
    TightenClip,
    WatchClosely,
    action_to_json,
    changes_training,
)
from heal.exit_codes import ExitCode
from tests.heal.fake_run import FakeRun

EXAMPLES = [
    Skip(),
    TightenClip(0.5),
    RelearnClip(),
    ScaleLr(0.5, 0.01, 200),
    HoldLr(0.1),
    Rollback(7),
    SkipBatches(7, 9),
    ShrinkBatch(2),
    CheckpointActivations(),
    ClearCache(),
    Backoff(30.0),
    TakeSnapshot(),
    WatchClosely(100),
    PerturbWeights(0.01, 3),
    AnchorWeights(1.0, 100),
    Halt("why"),
]


def test_every_action_has_an_example_here():
    assert {type(action) for action in EXAMPLES} == set(ACTIONS)


def test_rollback_passes_over_the_snapshots_that_know_the_damage():
    run = FakeRun(snapshots=[60, 80, 99])
    Rollback(before_step=97).apply(run)
    assert run.done == [("restore", 80)]


def test_the_snapshot_of_the_bad_step_itself_is_clean():
    run = FakeRun(snapshots=[60, 80, 99])
    Rollback(before_step=80).apply(run)
    assert run.done == [("restore", 80)]


def test_rollback_with_nothing_old_enough_stops_the_run():
    with pytest.raises(HealingError, match="before step 5") as raised:
        Rollback(before_step=5).apply(FakeRun(snapshots=[50]))
    assert raised.value.exit_code == ExitCode.NO_SNAPSHOT


def test_factors_compound_and_a_floor_that_was_reached_is_told():
    run = FakeRun()
    scale = ScaleLr(0.1, floor=0.05)
    assert [scale.apply(run) for _ in range(3)] == [True, True, False]
    assert run.lr_scale == 0.05


def test_a_batch_that_cannot_shrink_is_told():
    run = FakeRun(halvings=1, can_checkpoint=True)
    assert [ShrinkBatch().apply(run), ShrinkBatch().apply(run)] == [True, False]
    assert [CheckpointActivations().apply(run) for _ in range(2)] == [True, False]


def test_the_rest_is_passed_to_the_run_as_it_is():
    run = FakeRun()
    plan = [
        TightenClip(0.5),
        RelearnClip(),
        HoldLr(0.1),
        SkipBatches(3, 4),
        ClearCache(),
        Backoff(30.0),
        PerturbWeights(0.1, seed=2),
        AnchorWeights(2.0, 50),
        Skip(),
    ]
    assert all(action.apply(run) for action in plan)
    assert run.done == [
        ("tighten_clip", 0.5),
        ("relearn_clip",),
        ("hold_lr", 0.1),
        ("skip_batches", 3, 4),
        ("clear_cache",),
        ("sleep", 30.0),
        ("perturb_weights", 0.1, 2),
        ("anchor_weights", 2.0, 50),
    ]


def test_halt_raises_with_its_code():
    with pytest.raises(HealingError, match="enough") as raised:
        Halt("enough", ExitCode.BUDGET_SPENT).apply(FakeRun())
    assert raised.value.exit_code == ExitCode.BUDGET_SPENT


@pytest.mark.parametrize("action", EXAMPLES, ids=lambda action: type(action).__name__)
def test_an_action_is_a_value_that_json_has(action):
    written = json.loads(json.dumps(action_to_json(action)))
    assert written.pop("action") == type(action).__name__
    assert type(action)(**written) == action
    assert hash(action) == hash(type(action)(**written))


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("kind", "told", "message"),
    [
        (ScaleLr, (NAN,), "ScaleLr: factor: expected a finite number > 0, got nan"),
        (ScaleLr, (INF,), "factor: expected a finite number > 0, got inf"),
        (ScaleLr, (0.0,), "factor: expected a finite number > 0, got 0.0"),
        (ScaleLr, (True,), "factor: expected a finite number > 0, got True"),
        (ScaleLr, ("x",), "factor: expected a finite number > 0, got 'x'"),
        (ScaleLr, (0.5, 2.0), "floor: expected a finite number from 0 to 1, got 2.0"),
        (ScaleLr, (0.5, 0.1, 2.5), "ramp_steps: expected a whole number >= 0, got 2.5"),
        (HoldLr, (0.0,), "HoldLr: limit: expected a finite number > 0, got 0.0"),
        (HoldLr, (NAN,), "limit: expected a finite number > 0, got nan"),
        (TightenClip, (NAN,), "TightenClip: factor: expected a finite number > 0, got nan"),
        (TightenClip, (-1,), "factor: expected a finite number > 0, got -1"),
        (Rollback, ("x",), "Rollback: before_step: expected a whole number >= 0, got 'x'"),
        (Rollback, (NAN,), "before_step: expected a whole number >= 0, got nan"),
        (SkipBatches, ("a", "b"), "SkipBatches: first_step: expected a whole number >= 0, got 'a'"),
        (SkipBatches, (0, -1), "last_step: expected a whole number >= 0, got -1"),
        (ShrinkBatch, (None,), "ShrinkBatch: halving: expected a whole number >= 0, got None"),
        (Backoff, (-1,), "Backoff: seconds: expected a finite number >= 0, got -1"),
        (Backoff, (object,), "seconds: expected a finite number >= 0, got <class 'object'>"),
        (WatchClosely, ("x",), "WatchClosely: steps: expected a whole number >= 0, got 'x'"),
        (
            PerturbWeights,
            (NAN, 0),
            "PerturbWeights: std: expected a finite number from 0 to 1, got nan",
        ),
        (PerturbWeights, (0.1, 0.5), "seed: expected a whole number >= 0, got 0.5"),
        (
            AnchorWeights,
            ("a", "b"),
            "AnchorWeights: strength: expected a finite number >= 0, got 'a'",
        ),
        (AnchorWeights, (1.0, NAN), "steps: expected a whole number >= 0, got nan"),
        (Halt, ("why", 256), "Halt: exit_code: expected a whole number from 0 to 255, got 256"),
    ],
)
def test_an_action_that_no_run_could_carry_out_is_refused_by_name(kind, told, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        kind(*told)


def test_some_actions_leave_training_as_it_is():
    gentle = {type(action).__name__ for action in EXAMPLES if not changes_training((action,))}
    assert gentle == {"Skip", "ClearCache", "Backoff", "TakeSnapshot", "WatchClosely", "Halt"}


def test_exit_codes_are_distinct_and_free():
    codes = [int(code) for code in ExitCode]
    assert len(set(codes)) == len(codes)
    assert not set(codes) & ({1, 2, 16, 17} | set(range(64, 75)) | set(range(76, 79)))
    assert max(codes) < 128
