import json

import pytest

from heal.actions import Rollback
from heal.causes import NOT_FINITE, PROOF, UNTRAINED, Cause, Family, Finding, Severity
from heal.diagnose import diagnose
from heal.history import History


def finding(cause, step=50, bad_step=None, severity=Severity.ERROR, streak=1, **evidence):
    return Finding(
        cause=cause,
        step=step,
        bad_step=step if bad_step is None else bad_step,
        severity=severity,
        evidence=evidence,
        streak=streak,
    )


def test_nothing_found_is_nothing_wrong():
    assert diagnose([], History()) is None


def test_the_gravest_finding_speaks():
    diagnosis = diagnose(
        [
            finding(Cause.NONFINITE_GRADIENT, severity=Severity.WARN),
            finding(Cause.LOSS_SPIKE, severity=Severity.ERROR),
        ],
        History(),
    )
    assert diagnosis.cause is Cause.LOSS_SPIKE
    assert "nonfinite_gradient" in diagnosis.evidence["also"]


def test_corrupt_weights_explain_a_loss_that_leapt():
    spike = finding(Cause.LOSS_SPIKE, bad_step=48)
    weights = finding(Cause.WEIGHT_CORRUPTION, bad_step=40, tensor="head.weight")
    diagnosis = diagnose([spike, weights], History())
    assert diagnosis.cause is Cause.WEIGHT_CORRUPTION
    assert diagnosis.bad_step == 40
    assert diagnosis.confidence > diagnose([spike], History()).confidence
    assert "head.weight" in diagnosis.summary


def test_a_learning_rate_that_was_odd_before_is_suspected():
    history = History()
    history.note_findings([finding(Cause.LR_SPIKE, step=30, severity=Severity.WARN)])
    diagnosis = diagnose([finding(Cause.DIVERGENCE, step=120, bad_step=100)], history)
    assert diagnosis.cause is Cause.DIVERGENCE
    assert (diagnosis.evidence["suspect"], diagnosis.bad_step) == ("lr_spike", 30)


def test_what_came_before_weights_that_were_proven_sound_is_not_suspected():
    history = History()
    history.note_findings([finding(Cause.LR_SPIKE, step=30, severity=Severity.WARN)])
    for sound, explained in ((31, False), (30, True)):
        proven = finding(Cause.LOSS_SPIKE, step=120, bad_step=sound, **{PROOF: 0.5})
        diagnosis = diagnose([proven], history)
        assert ("suspect" in diagnosis.evidence) is explained
        assert diagnosis.bad_step == sound


def test_damage_that_comes_again_before_anything_was_learned_is_no_damage_to_undo():
    proven = {PROOF: 1.5, UNTRAINED: True, "lr": 2.0}
    spike = finding(Cause.LOSS_SPIKE, bad_step=0, loss_now=9.0, **proven)
    exploded = finding(Cause.LOSS_SPIKE, bad_step=0, loss_now=NOT_FINITE, **proven)
    history = History()
    assert diagnose([spike], history).cause is Cause.LOSS_SPIKE  # a transient fault, perhaps
    history.note_plan(diagnose([spike], history), (Rollback(0),))
    again = diagnose([spike], history)
    assert (again.cause, again.severity) == (Cause.NOT_LEARNING, Severity.WARN)
    assert "learning rate damage the first weights" in again.evidence["advice"]
    assert diagnose([exploded], history).cause is Cause.LOSS_SPIKE
    learned = finding(Cause.LOSS_SPIKE, bad_step=0, loss_now=9.0, **{PROOF: 1.5})
    assert diagnose([learned], history).cause is Cause.LOSS_SPIKE


def test_that_nothing_is_learned_is_known_for_the_whole_run():
    history, spike = History(), finding(Cause.NOT_LEARNING, **{UNTRAINED: True})
    known = diagnose([spike], history)
    assert not history.knows_fruitless(known)
    history.note_plan(known, ())
    assert History.from_state(json.loads(json.dumps(history.state()))).knows_fruitless(known)


def test_old_warnings_are_not_suspected_nor_those_of_a_future_that_was_undone():
    history = History()
    history.note_findings([finding(Cause.LR_SPIKE, step=30, severity=Severity.WARN)])
    for step in (29, 331):
        diagnosis = diagnose([finding(Cause.DIVERGENCE, step=step)], history)
        assert "suspect" not in diagnosis.evidence


def test_streak_and_steps_pass_through():
    bad = finding(Cause.NONFINITE_LOSS, step=9, bad_step=5, streak=5, severity=Severity.WARN)
    diagnosis = diagnose([bad], History())
    assert (diagnosis.step, diagnosis.bad_step, diagnosis.streak) == (9, 5, 5)
    assert diagnosis.confidence > 0.95


@pytest.mark.parametrize("cause", Cause)
def test_every_cause_is_described_and_can_be_written(cause):
    about = cause.about
    assert about.summary.endswith(".")
    assert about.family in Family
    written = diagnose([finding(cause, tensor="a.b")], History()).to_json()
    assert json.loads(json.dumps(written)) == written
