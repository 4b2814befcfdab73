"""Skipped steps are counted, explosions reported, and both suspected when they last."""

import math

import pytest

from heal.causes import Cause, Severity
from heal.config import HealingConfig
from heal.detectors.gradients import GradientExplosion, SkippedSteps
from heal.detectors.watch import Watch
from heal.record import Flag, Record


def bad_record(step, flags=Flag.HAS_NAN, **fields):
    return Record(
        step=step,
        flags=flags,
        blocked=True,
        loss=1.0,
        norm=math.nan,
        worst=3,
        worst_name="layers.3.weight",
        **fields,
    )


def causes(found):
    return [finding.cause for finding in found]


def test_a_bad_gradient_is_counted_and_its_tensor_named():
    watch = Watch(HealingConfig())
    for step in range(3):
        (found,) = watch.observe(bad_record(step))
        assert (found.cause, found.streak, found.bad_step) == (
            Cause.NONFINITE_GRADIENT,
            step + 1,
            0,
        )
        assert found.severity is Severity.WARN
        assert found.evidence["tensor"] == "layers.3.weight"
        assert found.evidence["kind"] == ["HAS_NAN"]
    assert watch.observe(Record(step=3, loss=1.0, norm=1.0)) == []
    (found,) = watch.observe(bad_record(4, Flag.HAS_INF | Flag.OVERFLOW))
    assert (found.streak, found.bad_step) == (1, 4)


def test_bad_losses_and_bad_gradients_are_one_streak():
    watch = Watch(HealingConfig())
    kinds = [Flag.HAS_NAN, Flag.LOSS_NAN | Flag.HAS_NAN, Flag.OVERFLOW]
    found = [watch.observe(bad_record(step, flags))[0] for step, flags in enumerate(kinds)]
    assert [f.streak for f in found] == [1, 2, 3]
    assert found[1].cause is Cause.NONFINITE_LOSS
    assert ["tensor" in f.evidence for f in found] == [True, False, True]


def test_a_bad_gradient_that_was_applied_is_damage():
    record = Record(step=7, flags=Flag.HAS_NAN, blocked=False, loss=1.0, norm=math.nan)
    (found,) = Watch(HealingConfig()).observe(record)
    assert found.severity is Severity.ERROR
    assert found.evidence["applied"]
    assert not found.wants_proof


@pytest.mark.parametrize(
    ("settings", "asked"),
    [
        ({}, [5, 10, 20, 40, 80]),
        ({"nan_patience": 3}, [3, 6, 12, 24, 48, 96]),
        ({"nan_action": "skip"}, []),
        ({"nan_action": "warn"}, []),
    ],
)
def test_a_streak_is_looked_into_after_patience_and_then_half_as_often_each_time(settings, asked):
    detector = SkippedSteps(HealingConfig(**settings))
    found = [detector.observe(bad_record(step)) for step in range(99)]
    assert [f.streak for f in found if f.wants_proof] == asked
    assert all(f.severity is Severity.WARN for f in found)


def test_the_data_is_blamed_once_that_was_shown_until_the_streak_ends():
    watch = Watch(HealingConfig())
    (found,) = watch.observe(bad_record(0))
    assert "blames" not in found.evidence
    watch.rebase(Cause.NONFINITE_LOSS)
    (found,) = watch.observe(bad_record(1))
    assert "data" in found.evidence["blames"]
    watch.observe(Record(step=2, loss=1.0, norm=1.0))
    (found,) = watch.observe(bad_record(3))
    assert "blames" not in found.evidence


def test_a_scaler_in_search_of_its_scale_is_routine_until_it_is_at_its_end():
    watch = Watch(HealingConfig())
    causes_seen = []
    for step in range(20):
        record = bad_record(step, Flag.HAS_INF, loss_scale=65536.0 * 0.5**step)
        causes_seen += causes(watch.observe(record))
    assert causes_seen == [Cause.SCALER_OVERFLOW] * 16 + [Cause.NONFINITE_GRADIENT] * 4


def test_spikes_that_a_clip_rule_skips_count_too_and_are_never_suspected():
    watch = Watch(HealingConfig(nan_patience=1))
    record = Record(step=0, flags=Flag.SPIKE, blocked=True, loss=1.0, norm=9.0)
    (found,) = watch.observe(record)
    assert (found.cause, found.severity) == (Cause.GRADIENT_SPIKE, Severity.WARN)
    assert not found.wants_proof


def explosions(norms, **settings):
    """What is found if these norms come after each other."""
    detector = GradientExplosion(HealingConfig(**settings))
    found = [detector.observe(Record(step=i, loss=1.0, norm=n)) for i, n in enumerate(norms)]
    return [f for f in found if f is not None]


@pytest.mark.parametrize(("norm", "is_found"), [(99.0, False), (101.0, True)])
def test_an_explosion_is_a_norm_beyond_the_limit(norm, is_found):
    found = explosions([1.0] * 50 + [norm])
    assert [f.step for f in found] == [50] * is_found


@pytest.mark.parametrize(("known", "is_found"), [(7, False), (8, True)])
def test_eight_norms_must_be_known(known, is_found):
    assert bool(explosions([1.0] * known + [1e4])) is is_found


@pytest.mark.parametrize(("share", "is_found"), [(6, True), (7, False)])
def test_a_tenth_of_large_norms_is_the_usual_upper_range(share, is_found):
    """Of 64, so many are 10 and the others 1; the limit is a hundred times the upper range."""
    norms = [10.0] * share + [1.0] * (64 - share)
    assert bool(explosions([*norms, 500.0])) is is_found


@pytest.mark.parametrize(("since", "is_found"), [(57, False), (58, True)])
def test_norms_are_forgotten_after_64_others(since, is_found):
    assert bool(explosions([10.0] * 64 + [1.0] * since + [500.0])) is is_found


def test_one_explosion_is_reported_and_three_in_a_row_are_a_suspicion():
    found = explosions([1.0] * 50 + [1e4] * 2 + [1.0] * 10 + [1e4] * 3)
    assert [(f.step, f.streak, f.wants_proof) for f in found] == [
        (50, 1, False),
        (62, 1, False),
        (64, 3, True),
    ]
    assert {f.severity for f in found} == {Severity.WARN}
    assert [f.bad_step for f in found] == [50, 62, 61]  # damage may be in the weights before it
    assert found[0].evidence["ratio"] == 1e4


def test_a_new_level_is_learned_and_not_suspected_again():
    assert len(explosions([1.0] * 128 + [1e4] * 500)) == 2


def test_gradients_of_nearly_always_zero_have_no_upper_range():
    assert explosions([0.0] * 95 + [1e4] * 5) == []
