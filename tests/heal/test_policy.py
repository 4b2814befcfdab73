"""The ladder, a line of a table each."""

import pytest

from heal.actions import (
    Backoff,
    CheckpointActivations,
    ClearCache,
    Halt,
    HoldLr,
    RelearnClip,
    Rollback,
    ScaleLr,
    ShrinkBatch,
    Skip,
    SkipBatches,
    TightenClip,
)
from heal.causes import NOT_FINITE, UNTRAINED, Cause, Family, Severity
from heal.config import HealingConfig
from heal.diagnose import Diagnosis
from heal.exit_codes import ExitCode
from heal.history import History
from heal.policy import decide

CONFIG = HealingConfig()
SCALE = ScaleLr(0.5, 0.01, 200)
CLIP = TightenClip(0.5)
SNAPSHOTS = [80, 60, 20]

REPLAY = {"after_rollback": "replay_data"}


def sick(cause, step=90, bad_step=85, streak=1, severity=None, **evidence):
    usual = Severity.WARN if cause in (Cause.NONFINITE_GRADIENT, Cause.NONFINITE_LOSS) else None
    return Diagnosis(
        cause=cause,
        evidence=evidence,
        confidence=0.9,
        severity=severity or usual or Severity.ERROR,
        bad_step=bad_step,
        step=step,
        streak=streak,
    )


NAN = Cause.NONFINITE_GRADIENT
WARN = Severity.WARN


@pytest.mark.parametrize(
    ("diagnosis", "settings", "plan"),
    [
        # Skipped steps have changed nothing: no rollback, whatever the streak.
        (sick(NAN, streak=1), {}, (Skip(),)),
        (sick(NAN, streak=5), {}, (Skip(),)),
        (sick(Cause.NONFINITE_LOSS, streak=5), {}, (Skip(),)),
        (sick(NAN, streak=99), {}, (Skip(),)),
        (sick(NAN, streak=1), {"nan_patience": 1}, (Skip(),)),
        (sick(NAN, streak=50), {"nan_action": "skip"}, (Skip(),)),
        (sick(NAN, streak=50), {"nan_action": "warn"}, (Skip(),)),
        # NaN that was applied is damage at once, and so is what the experiment has proven.
        (
            sick(NAN, applied=True, severity=Severity.ERROR),
            {},
            (Rollback(80), SkipBatches(80, 91)),
        ),
        (sick(NAN, streak=5, severity=Severity.ERROR), {}, (Rollback(80), SkipBatches(80, 91))),
        # A refused spike: patience, then the gentle rung.
        (sick(Cause.GRADIENT_SPIKE, streak=3, severity=WARN), {}, (Skip(),)),
        (sick(Cause.GRADIENT_SPIKE, streak=20, severity=WARN), {}, (RelearnClip(), SCALE)),
        (sick(Cause.GRADIENT_SPIKE, streak=5, severity=WARN), {"nan_action": "skip"}, (Skip(),)),
        # Ranks apart: all return to one step, and neither data nor schedule is to blame.
        (sick(Cause.DESYNC), {}, (Rollback(80), SkipBatches(80, 90))),
        # What is not proven is only written down.
        (sick(Cause.GRADIENT_EXPLOSION, severity=WARN), {}, ()),
        (sick(Cause.LOSS_SPIKE, severity=WARN), {}, ()),
        (sick(Cause.DIVERGENCE, severity=WARN), {}, ()),
        (sick(Cause.WEIGHT_CORRUPTION, severity=WARN), {}, ()),
        (sick(Cause.OPTIMIZER_RESET, severity=WARN), {}, ()),
        # Damage: the first rollback never cuts the learning rate.
        (sick(Cause.GRADIENT_EXPLOSION), {}, (Rollback(80), SkipBatches(80, 91))),
        (sick(Cause.LOSS_SPIKE), {}, (Rollback(80), SkipBatches(80, 91))),
        (sick(Cause.DIVERGENCE, bad_step=70), {}, (Rollback(60), SkipBatches(60, 91))),
        (
            sick(Cause.DIVERGENCE),
            REPLAY,
            (Rollback(80), SkipBatches(85, 91)),
        ),
        # The batch is not to blame: none around it is left out.
        (sick(Cause.WEIGHT_CORRUPTION), {}, (Rollback(80), SkipBatches(80, 90))),
        (sick(Cause.WEIGHT_CORRUPTION), REPLAY, (Rollback(80),)),
        (sick(Cause.OPTIMIZER_RESET), REPLAY, (Rollback(80),)),
        (sick(Cause.OPTIMIZER_CORRUPTION), REPLAY, (Rollback(80),)),
        (sick(Cause.LR_SPIKE), REPLAY, (Rollback(80),)),
        (sick(Cause.LR_SPIKE, severity=WARN), {}, ()),
        # A rate that no schedule has changed is held.
        (
            sick(Cause.LR_SPIKE, usual_lr=0.1),
            REPLAY,
            (Rollback(80), HoldLr(0.1)),
        ),
        (
            sick(Cause.LR_DROP, usual_lr=0.1),
            REPLAY,
            (Rollback(80), HoldLr(0.1)),
        ),
        # Alerts never act.
        (sick(Cause.PLATEAU), {}, ()),
        (sick(Cause.OVERFITTING), {}, ()),
        (sick(Cause.THROUGHPUT_COLLAPSE), {}, ()),
        (sick(Cause.WEIGHT_DRIFT), {}, ()),
        (sick(Cause.SCALER_OVERFLOW), {}, ()),
        # Exceptions.
        (sick(Cause.OUT_OF_MEMORY), {}, (ClearCache(), ShrinkBatch(1))),
        (
            sick(Cause.OUT_OF_MEMORY, phase="step"),
            REPLAY,
            (ClearCache(), ShrinkBatch(1), Rollback(80)),
        ),
        (sick(Cause.MEMORY_PRESSURE), {}, (ClearCache(), ShrinkBatch(1))),
        (sick(Cause.DATA_ERROR, step=9), {}, (SkipBatches(9, 9),)),
        (sick(Cause.NETWORK_ERROR), {}, (Backoff(30.0),)),
        (sick(Cause.STORAGE_ERROR), {}, (Backoff(30.0),)),
    ],
)
def test_the_first_plan(diagnosis, settings, plan):
    assert decide(diagnosis, History(), HealingConfig(**settings), SNAPSHOTS) == plan


@pytest.mark.parametrize(
    "cause", [Cause.WEIGHT_CORRUPTION, Cause.OPTIMIZER_CORRUPTION, Cause.OPTIMIZER_RESET]
)
def test_where_no_snapshot_is_old_enough_the_oldest_is_tried_before_halting(cause):
    history, diagnosis = History(), sick(cause, bad_step=10)
    plans = []
    while not isinstance((plan := decide(diagnosis, history, CONFIG, SNAPSHOTS))[0], Halt):
        plans.append(plan)
        history.note_plan(diagnosis, plan)
    assert plans[0] == (Rollback(20), SkipBatches(20, 90))
    assert {plan[0] for plan in plans} == {Rollback(20)}
    assert len(set(plans)) == len(plans)
    assert plan[0].exit_code == ExitCode.BUDGET_SPENT
    (halt,) = decide(sick(Cause.WEIGHT_CORRUPTION), History(), CONFIG, [])
    assert halt.exit_code == ExitCode.NO_SNAPSHOT


@pytest.mark.parametrize(
    ("diagnosis", "settings", "code"),
    [
        (sick(NAN), {"nan_action": "raise"}, ExitCode.NONFINITE),
        (sick(NAN, streak=100), {"nan_action": "skip"}, ExitCode.NONFINITE),
        (
            sick(NAN, streak=7),
            {"nan_action": "warn", "max_consecutive_skips": 7},
            ExitCode.NONFINITE,
        ),
        (sick(NAN, bad_step=10, applied=True, severity=Severity.ERROR), {}, ExitCode.NO_SNAPSHOT),
        (sick(Cause.OUT_OF_MEMORY, bad_step=10, phase="step"), {}, ExitCode.NO_SNAPSHOT),
        (sick(Cause.DATA_ERROR), {"max_data_errors": 0}, ExitCode.BAD_DATA),
        (sick(Cause.COLLECTIVE_ERROR), {}, ExitCode.DISTRIBUTED),
        (sick(Cause.DEVICE_ERROR), {}, ExitCode.HARDWARE),
        (sick(Cause.PREEMPTED), {}, ExitCode.PREEMPTED),
        (sick(Cause.UNKNOWN), {}, ExitCode.UNRECOVERABLE),
    ],
)
def test_when_to_halt_at_once(diagnosis, settings, code):
    (halt,) = decide(diagnosis, History(), HealingConfig(**settings), SNAPSHOTS)
    assert isinstance(halt, Halt)
    assert halt.exit_code == code
    assert diagnosis.cause.value in halt.reason


@pytest.mark.parametrize(
    ("settings", "snapshots", "code"),
    [
        ({"max_recovery_attempts": 0}, [80, 60], ExitCode.BUDGET_SPENT),
        ({"max_recovery_attempts": 20}, [80], ExitCode.UNRECOVERABLE),
    ],
)
def test_a_run_that_must_end_ends_with_the_newest_good_state(settings, snapshots, code):
    plans = climb(sick(Cause.LOSS_SPIKE), HealingConfig(**settings), snapshots)
    back, halt = plans[-1]
    assert back == Rollback(80)
    assert halt.exit_code == code
    assert Cause.LOSS_SPIKE.value in halt.reason


def climb(diagnosis, config=CONFIG, snapshots=SNAPSHOTS, effects=None, most=50):
    """Carry out plan after plan for trouble that always comes back."""
    history, plans = History(), []
    while not plans or not any(isinstance(a, Halt) for a in plans[-1]):
        plans.append(decide(diagnosis, history, config, snapshots))
        history.note_plan(diagnosis, plans[-1], effects(plans[-1]) if effects else ())
        for action in plans[-1]:  # a rollback drops those that are newer
            if isinstance(action, Rollback):
                snapshots = [step for step in snapshots if step <= action.before_step]
        assert len(plans) <= most
    return plans


def test_a_loss_that_is_not_finite_before_anything_was_learned_ends_with_the_first_weights():
    exploded = sick(Cause.LOSS_SPIKE, loss_now=NOT_FINITE, **{UNTRAINED: True})
    history = History()
    plan = decide(exploded, history, CONFIG, SNAPSHOTS)
    assert plan[0] == Rollback(80)  # a transient fault, perhaps
    history.note_plan(exploded, plan)
    back, halt = decide(exploded, history, CONFIG, SNAPSHOTS)
    assert (back, halt.exit_code) == (Rollback(20), ExitCode.UNRECOVERABLE)
    assert "use a far lower learning rate" in halt.reason
    learned = sick(Cause.LOSS_SPIKE, loss_now=NOT_FINITE)
    assert not isinstance(decide(learned, history, CONFIG, SNAPSHOTS)[-1], Halt)


def test_the_rungs_of_a_divergence_that_returns():
    *plans, (back, halt) = climb(sick(Cause.DIVERGENCE))
    assert plans == [
        (Rollback(80), SkipBatches(80, 91)),
        (Rollback(60), SkipBatches(60, 92), SCALE),
        (Rollback(20), SkipBatches(20, 94)),  # a lower rate did not help: an older state alone
        (Rollback(20), SkipBatches(20, 98), SCALE),
        (Rollback(20), SkipBatches(20, 106), SCALE),
    ]
    assert back == Rollback(20)
    assert halt.exit_code == ExitCode.BUDGET_SPENT
    assert "5 recovery attempts" in halt.reason


def test_each_rollback_of_an_incident_goes_back_by_one_snapshot():
    plans = climb(sick(Cause.DIVERGENCE), snapshots=[80, 70, 60, 40, 20])
    assert [plan[0].before_step for plan in plans] == [80, 70, 60, 40, 20, 20]


def test_damage_that_no_snapshot_is_from_before_gets_the_gentle_rung_once():
    first = sick(Cause.DIVERGENCE, bad_step=10)
    history = with_plan(first)
    assert history.incidents[0].count(TightenClip) == 1
    (halt,) = decide(sick(Cause.DIVERGENCE, step=95, bad_step=10), history, CONFIG, SNAPSHOTS)
    assert halt.exit_code == ExitCode.NO_SNAPSHOT


def test_steps_under_way_when_the_clip_was_relearned_are_old_news():
    spike = sick(Cause.GRADIENT_SPIKE, step=90, streak=20, severity=WARN)
    history = with_plan(spike)
    for step in (91, 92):
        refused = sick(Cause.GRADIENT_SPIKE, step=step, streak=20, severity=WARN)
        assert decide(refused, history, CONFIG, SNAPSHOTS) == (Skip(),)
        assert decide(sick(Cause.LOSS_SPIKE, step=step), history, CONFIG, SNAPSHOTS) == ()


def test_a_clip_rule_that_goes_on_skipping_is_relearned_then_tightened_and_never_rolled_back():
    spike = sick(Cause.GRADIENT_SPIKE, step=90, streak=20, severity=WARN)
    history = with_plan(spike)
    again = sick(Cause.GRADIENT_SPIKE, step=95, streak=40, severity=WARN)
    plan = decide(again, history, CONFIG, SNAPSHOTS)
    assert plan == (CLIP, SCALE)
    history.note_plan(again, plan)
    plan = decide(
        sick(Cause.GRADIENT_SPIKE, step=99, streak=60, severity=WARN), history, CONFIG, SNAPSHOTS
    )
    assert isinstance(plan[-1], Halt)


def with_plan(diagnosis):
    history = History()
    history.note_plan(diagnosis, decide(diagnosis, history, CONFIG, SNAPSHOTS))
    return history


def test_corruption_that_returns_is_no_longer_innocent():
    *plans, _ = climb(sick(Cause.WEIGHT_CORRUPTION), HealingConfig(after_rollback="replay_data"))
    assert plans[0] == (Rollback(80),)
    assert plans[1] == (Rollback(60), SkipBatches(85, 92), SCALE)


@pytest.mark.parametrize(
    ("again", "plan"),
    [
        # The run got past the trouble and leapt once more: the newest snapshot, and the same rate.
        (
            sick(Cause.LOSS_SPIKE, 120, 112, leapt_at_once=True),
            (Rollback(110), SkipBatches(110, 121)),
        ),
        # A climb, a leap at the same step and a rate that is off go up the ladder.
        (sick(Cause.LOSS_SPIKE, 120, 112), (Rollback(80), SkipBatches(80, 122), SCALE)),
        (
            sick(Cause.LOSS_SPIKE, 90, 112, leapt_at_once=True),
            (Rollback(80), SkipBatches(80, 92), SCALE),
        ),
        (
            sick(Cause.LR_SPIKE, 120, 112, leapt_at_once=True),
            (Rollback(80), SkipBatches(80, 122), SCALE),
        ),
    ],
)
def test_damage_after_an_incident_was_passed_is_no_fault_of_the_rate(again, plan):
    history = with_plan(sick(Cause.LOSS_SPIKE))
    assert decide(again, history, CONFIG, [110, *SNAPSHOTS]) == plan


def test_another_cause_in_the_same_incident_goes_on_up_the_ladder():
    history = with_plan(sick(Cause.LOSS_SPIKE))
    proven = sick(NAN, streak=5, severity=Severity.ERROR)
    assert decide(proven, history, CONFIG, SNAPSHOTS)[0] == Rollback(60)


def test_the_window_of_skipped_batches_stops_growing_and_then_the_ladder_ends():
    config = HealingConfig(max_recovery_attempts=40)
    *plans, (_, halt) = climb(sick(Cause.DIVERGENCE), config, snapshots=[80])
    skipped = [a.last_step - 90 for plan in plans for a in plan if isinstance(a, SkipBatches)]
    assert (skipped[0], skipped[-1]) == (1, 500)
    assert len(plans) == len(set(plans)) < 13
    assert halt.exit_code == ExitCode.UNRECOVERABLE


def test_memory_halvings_then_activations_then_the_end():
    left = [2]

    def effects(plan):
        shrinks = any(isinstance(a, ShrinkBatch) for a in plan)
        left[0] -= shrinks
        return [True, left[0] >= 0 if shrinks else True]

    *plans, (halt,) = climb(sick(Cause.OUT_OF_MEMORY), effects=effects)
    assert plans == [
        (ClearCache(), ShrinkBatch(1)),
        (ClearCache(), ShrinkBatch(2)),
        (ClearCache(), ShrinkBatch(3)),
        (ClearCache(), CheckpointActivations()),
    ]
    assert halt.exit_code == ExitCode.OUT_OF_MEMORY
    assert "smallest micro-batch" in halt.reason


def test_memory_that_never_says_no_ends_as_well():
    plans = climb(sick(Cause.OUT_OF_MEMORY))
    assert len(plans) == 32


def test_waits_double_up_to_the_cap_and_the_budget():
    plans = climb(sick(Cause.NETWORK_ERROR))
    waits = [plan[0].seconds for plan in plans[:-1]]
    assert waits == [30, 60, 120, 240, 480, 600, 600, 600]


def test_waits_and_skips_cost_no_recovery_attempts():
    history = History()
    for cause in (Cause.NETWORK_ERROR, Cause.DATA_ERROR, Cause.OUT_OF_MEMORY):
        history.note_plan(sick(cause), decide(sick(cause), history, CONFIG, SNAPSHOTS))
    assert history.attempts == 0


def test_bad_batches_are_skipped_as_long_as_the_next_one_works():
    history = History()
    for step in range(60):
        bad = sick(Cause.DATA_ERROR, step=step)
        plan = decide(bad, history, CONFIG, SNAPSHOTS)
        assert plan == (SkipBatches(step, step),)
        history.note_plan(bad, plan)
        history.note_step(step, CONFIG)
    for _ in range(3):
        bad = sick(Cause.DATA_ERROR, step=60)
        history.note_plan(bad, decide(bad, history, CONFIG, SNAPSHOTS))
    (halt,) = decide(sick(Cause.DATA_ERROR, step=60), history, CONFIG, SNAPSHOTS)
    assert halt.exit_code == ExitCode.BAD_DATA
    assert "3 batches in a row" in halt.reason


def test_deciding_changes_nothing():
    history = with_plan(sick(Cause.LOSS_SPIKE))
    before = history.state()
    for cause in Cause:
        decide(sick(cause, streak=5), history, CONFIG, SNAPSHOTS)
    assert history.state() == before


@pytest.mark.parametrize("cause", [c for c in Cause if c.about.family is Family.ALERT])
@pytest.mark.parametrize("severity", list(Severity))
def test_alerts_never_act_however_grave(cause, severity):
    assert decide(sick(cause, severity=severity), History(), CONFIG, SNAPSHOTS) == ()
