import json

from heal.actions import Rollback, ScaleLr, ShrinkBatch, Skip
from heal.causes import Cause, Family, Finding, Severity
from heal.config import HealingConfig
from heal.diagnose import Diagnosis
from heal.history import MAX_SUSPECTS, History

CONFIG = HealingConfig(incident_steps=100)


def trouble(cause=Cause.DIVERGENCE, step=90, bad_step=80):
    return Diagnosis(cause, {}, 0.9, Severity.ERROR, bad_step, step)


def warning(cause=Cause.LR_SPIKE, step=1):
    return Finding(cause=cause, step=step, bad_step=step, severity=Severity.WARN, evidence={})


def test_an_incident_ends_after_enough_clean_steps_past_the_trouble():
    history = History()
    history.note_plan(trouble(step=90), (Rollback(50), ScaleLr(0.5)))
    for step in range(50, 190):
        history.note_step(step, CONFIG)
        assert history.open_incident(Family.NUMERIC) is not None
    history.note_step(190, CONFIG)
    assert history.open_incident(Family.NUMERIC) is None
    assert history.closed_incidents == 1


def test_attempts_are_won_back_by_new_ground_only():
    history = History()
    history.note_step(400, CONFIG)
    history.note_plan(trouble(step=90), (Rollback(50),))
    history.note_step(1399, CONFIG)
    assert history.attempts == 1
    history.note_step(1400, CONFIG)
    assert (history.attempts, history.total_attempts) == (0, 1)


def test_a_refused_step_is_no_attempt():
    history = History()
    history.note_plan(trouble(Cause.NONFINITE_GRADIENT), (Skip(),))
    assert (history.attempts, history.incidents) == (0, [])


def test_an_incident_knows_its_plans_and_what_came_of_them():
    history = History()
    history.note_plan(trouble(Cause.OUT_OF_MEMORY), (ShrinkBatch(1),), [True])
    incident = history.open_incident(Family.MEMORY)
    assert incident.was_tried((ShrinkBatch(1),))
    assert not incident.was_tried((ShrinkBatch(2),))
    assert not incident.had_no_effect(ShrinkBatch)
    history.note_plan(trouble(Cause.OUT_OF_MEMORY), (ShrinkBatch(2),), [False])
    assert incident.had_no_effect(ShrinkBatch)
    assert incident.count(ShrinkBatch) == 2


def test_nan_steps_are_counted_and_warnings_kept():
    history = History()
    history.note_findings([warning(Cause.NONFINITE_LOSS), warning(Cause.NONFINITE_GRADIENT)])
    history.note_findings([warning(step=step) for step in range(100)])
    assert history.nan_count == 2
    assert len(history.suspects) == MAX_SUSPECTS
    assert history.suspects[-1] == ("lr_spike", 99)


def test_it_survives_json():
    history = History()
    history.note_findings([warning()])
    history.note_plan(trouble(), (Rollback(50), ScaleLr(0.5)), [True, False])
    history.note_plan(trouble(Cause.DATA_ERROR), ())
    history.note_step(91, CONFIG)
    state = json.loads(json.dumps(history.state(), allow_nan=False))
    again = History.from_state({**state, "from_the_future": 1})
    assert again == history
    assert History.from_state({}) == History()


def test_records_that_were_under_way_when_a_plan_was_made_late_are_old_news():
    history = History()
    first = trouble(step=82)
    history.note_plan(
        first, (ScaleLr(0.5),), first_pending=98
    )  # heard of at step 100, two steps of lag
    assert history.incidents[0].resume_step == 98
    history.note_plan(trouble(step=120), (Rollback(50),), first_pending=118)
    assert history.incidents[0].resume_step == 50
