"""Whatever goes wrong, in whatever order, healing ends within its budget."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heal.actions import Backoff, Halt, Rollback, SkipBatches, TightenClip, changes_training
from heal.causes import Cause, Family, Severity
from heal.config import HealingConfig
from heal.diagnose import Diagnosis
from heal.history import ATTEMPTS_RESET_STEPS, History
from heal.policy import LONGEST_WAIT_SECONDS, decide

TROUBLE = st.tuples(
    st.sampled_from(list(Cause)),
    st.sampled_from([Severity.WARN, Severity.ERROR]),
    st.integers(1, 120),  # streak
    st.integers(0, 30),  # how long before it was seen it began
    st.booleans(),  # applied
    st.integers(0, 40),  # clean steps afterwards
)
CONFIGS = st.builds(
    HealingConfig,
    max_recovery_attempts=st.integers(0, 8),
    nan_patience=st.integers(1, 10),
    nan_action=st.sampled_from(["warn", "skip", "raise", "rollback"]),
    after_rollback=st.sampled_from(["skip_data", "replay_data"]),
    max_data_errors=st.integers(0, 10),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(TROUBLE, max_size=60), CONFIGS)
def test_any_sequence_of_trouble_ends_within_the_budget(troubles, config):
    history, step, furthest = History(), 0, 0
    numeric = memory = data = 0
    for cause, severity, streak, age, applied, clean in troubles:
        step += 1
        furthest = max(furthest, step)
        diagnosis = Diagnosis(
            cause, {"applied": applied}, 0.9, severity, max(step - age, 0), step, streak
        )
        snapshots = [s for s in (0, 20, 40, 80) if s <= step]
        incident = history.open_incident(cause.about.family)
        plan = decide(diagnosis, history, config, snapshots)
        if any(isinstance(action, Halt) for action in plan):
            *before, halt = plan  # a run that must end ends with the newest good state
            assert isinstance(halt, Halt)
            assert all(isinstance(action, Rollback) for action in before)
            assert len(before) <= 1
            return
        family = cause.about.family
        if incident is not None and family in (Family.NUMERIC, Family.MEMORY):
            assert not (plan and changes_training(plan)) or not incident.was_tried(plan)
        numeric += family is Family.NUMERIC and changes_training(plan)
        memory += family is Family.MEMORY and changes_training(plan)
        data += family is Family.DATA
        for action in plan:
            if isinstance(action, Rollback):
                assert action.before_step in snapshots
                assert action.before_step <= diagnosis.bad_step
            if isinstance(action, SkipBatches):
                assert 0 <= action.first_step <= action.last_step
            if isinstance(action, Backoff):
                assert action.seconds <= LONGEST_WAIT_SECONDS
        history.note_plan(diagnosis, plan)
        back = [a.before_step for a in plan if isinstance(a, Rollback)]
        step = back[0] if back else step
        for _ in range(clean):
            step += 1
            history.note_step(step, config)
        furthest = max(furthest, step)
    resets = furthest // ATTEMPTS_RESET_STEPS
    assert numeric <= config.max_recovery_attempts * (1 + resets)
    assert data <= config.max_data_errors
    assert memory <= 31 * (1 + furthest // config.incident_steps)


@pytest.mark.parametrize("cause", Cause)
@settings(max_examples=10, deadline=None)
@given(config=CONFIGS, streak=st.integers(1, 12))
def test_the_same_trouble_for_ever_ends(cause, config, streak):
    """No progress at all: every cause halts, or never changed anything in the first place."""
    history = History()
    for attempt in range(400):
        diagnosis = Diagnosis(cause, {}, 0.9, Severity.ERROR, 50, 50 + attempt, streak + attempt)
        plan = decide(diagnosis, history, config, [50, 40, 20])
        if any(isinstance(action, Halt) for action in plan):
            return
        history.note_plan(diagnosis, plan)
    assert history.total_attempts == 0
    if cause.about.family is Family.WARNING:
        (incident,) = history.incidents
        assert incident.count(TightenClip) == 1
        return
    assert cause.about.family is Family.ALERT or cause is Cause.MEMORY_PRESSURE
