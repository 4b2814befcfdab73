"""What is wrong is found, soon enough, and blamed on the right step and tensor."""

import json
import math

import numpy as np
import pytest

from heal.causes import Cause, Severity
from heal.config import HealingConfig
from heal.detect import Watch
from heal.verdict import Flag, Record
from tests.heal.detectors.streams import alarms, findings, learning_curve, records

STEPS = 1500
SEEDS = range(5)


def curve(seed, noise=0.05):
    return learning_curve(STEPS) + noise * np.random.default_rng(seed).standard_normal(STEPS)


def causes(found):
    return [finding.cause for finding in found]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("height", "seen"), [(5.0, 719), (80.0, 704), (1e6, 704)])
def test_a_loss_that_leapt_and_stays_is_damage(seed, height, seen):
    losses = curve(seed)
    losses[700:] = height * (1 + 0.1 * np.random.default_rng(seed).standard_normal(STEPS - 700))
    first = alarms(records(losses))[0]
    assert first.cause is Cause.LOSS_SPIKE
    assert first.step == seen  # patience of 5; of 20 for what hard data could explain
    assert first.bad_step == 699  # the weights were bad before the first bad loss
    assert first.evidence["loss"] > 3.0


def test_a_loss_without_any_noise_that_leapt_and_stays_is_damage():
    losses = np.full(STEPS, 2.0)
    losses[700:] = 900.0
    first = alarms(records(losses))[0]
    assert (first.cause, first.step, first.bad_step) == (Cause.LOSS_SPIKE, 704, 699)
    losses[700:] = 6.0
    assert alarms(records(losses)) == []


@pytest.mark.parametrize("lasts", [1, 2, 4])
def test_spikes_that_pass_are_only_told(lasts):
    losses = curve(0)
    losses[700 : 700 + lasts] = 50.0
    found = findings(records(losses))
    assert [(f.cause, f.severity, f.step) for f in found if f.cause is Cause.LOSS_SPIKE] == [
        (Cause.LOSS_SPIKE, Severity.WARN, 700)
    ]
    assert alarms(records(losses)) == []


def test_a_spike_that_comes_down_by_itself_is_left_alone():
    losses = curve(0)
    losses[700:760] += 30.0 * np.exp(-np.arange(60) / 5.0)
    assert alarms(records(losses)) == []


def test_new_labels_that_are_being_learned_are_left_alone():
    losses = curve(0)
    losses[700:] += 13.0 * np.exp(-np.arange(STEPS - 700) / 60.0)
    assert alarms(records(losses)) == []


def test_patience_is_exact():
    config = HealingConfig(loss_spike_patience=8)
    for lasts, wanted in ((7, 0), (8, 1)):
        losses = curve(0)
        losses[700 : 700 + lasts] = 80.0
        assert len(alarms(records(losses), config)) == wanted


def test_the_factor_is_exact():
    for factor, wanted in ((4.0, 1), (30.0, 0)):
        losses = curve(0)
        losses[1400:] = 5.0
        config = HealingConfig(loss_spike_factor=factor)
        assert (Cause.LOSS_SPIKE in causes(alarms(records(losses), config))) == bool(wanted)


def test_an_objective_that_falls_off_a_cliff_is_damage():
    losses = curve(0)
    losses[700:] = -1e5 * 2.0 ** (np.arange(STEPS - 700) / 50)
    assert alarms(records(losses))[0].cause is Cause.LOSS_SPIKE


def test_a_second_spike_after_a_first_is_found_as_well():
    losses = curve(0)
    losses[700:703] = 1e4
    losses[720:] = 200.0
    first = alarms(records(losses))[0]
    assert (first.cause, first.step) == (Cause.LOSS_SPIKE, 724)


def test_an_explosion_before_there_is_a_window_is_found():
    losses = 2.3 * 2.0 ** np.arange(30)
    norms = 3.0 ** np.arange(30)
    first = alarms(records(losses, norms=norms))[0]
    assert first.cause is Cause.LOSS_SPIKE
    assert first.bad_step == 0
    assert first.step < 20


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("noise", [0.02, 0.1, 0.3])
@pytest.mark.parametrize("rate", [0.005, 0.02])
def test_a_loss_that_climbs_is_divergence_whatever_the_noise(seed, noise, rate):
    losses, norms = curve(seed, noise), np.ones(STEPS)
    climb = np.maximum(np.arange(STEPS) - 700, 0)
    losses += rate * climb
    norms *= np.exp(0.01 * climb)
    (first, *_) = alarms(records(losses, norms=norms))
    assert first.cause is Cause.DIVERGENCE
    assert first.evidence["kind"] in ("climb", "steep climb")
    assert 700 - 100 <= first.bad_step < first.step
    assert losses[first.step] < 3.5 + 3 * noise


def test_an_exponential_climb_is_found_before_it_is_out_of_hand():
    losses, norms = curve(1), np.ones(STEPS)
    climb = np.maximum(np.arange(STEPS) - 700, 0)
    losses += 0.05 * (np.exp(climb / 30.0) - 1)
    norms *= np.exp(climb / 60.0)
    first = alarms(records(losses, norms=norms))[0]
    assert first.cause is Cause.DIVERGENCE
    assert losses[first.step] < 5.0  # of the 2.3 that it began with


def test_a_network_that_died_and_climbs_is_divergence():
    losses, norms = curve(1), np.ones(STEPS)
    climb = np.maximum(np.arange(STEPS) - 700, 0)
    losses += 0.03 * climb
    norms[700:] = 0.05
    assert alarms(records(losses, norms=norms))[0].cause is Cause.DIVERGENCE


def test_a_loss_that_fell_back_to_chance_and_lies_there_has_collapsed():
    losses = curve(2)
    losses[700:] = 2.3 + 0.05 * np.random.default_rng(2).standard_normal(STEPS - 700)
    first = alarms(records(losses))[0]
    assert first.cause is Cause.DIVERGENCE
    assert first.evidence["kind"] == "collapse"
    assert first.bad_step <= 700


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


def test_a_bad_gradient_that_was_applied_is_damage():
    record = Record(step=7, flags=Flag.HAS_NAN, blocked=False, loss=1.0, norm=math.nan)
    (found,) = Watch(HealingConfig()).observe(record)
    assert found.severity is Severity.ERROR
    assert found.evidence["applied"]


def test_a_scaler_in_search_of_its_scale_is_routine_until_it_is_at_its_end():
    watch = Watch(HealingConfig())
    causes_seen = []
    for step in range(20):
        record = bad_record(step, Flag.HAS_INF, loss_scale=65536.0 * 0.5**step)
        causes_seen += causes(watch.observe(record))
    assert causes_seen == [Cause.SCALER_OVERFLOW] * 16 + [Cause.NONFINITE_GRADIENT] * 4


def test_refused_spikes_count_too():
    watch = Watch(HealingConfig())
    record = Record(step=0, flags=Flag.SPIKE, blocked=True, loss=1.0, norm=9.0)
    (found,) = watch.observe(record)
    assert (found.cause, found.severity) == (Cause.GRADIENT_SPIKE, Severity.WARN)


def test_a_spike_below_the_limit_is_written_down_once_and_left_alone():
    norms = np.ones(100)
    norms[60:63] = 40.0, 50.0, 30.0
    norms[80] = 19.0
    norms[90] = 40.0
    found = findings(records(np.ones(100), norms))
    assert {(note.cause, note.severity) for note in found} == {
        (Cause.GRADIENT_EXPLOSION, Severity.INFO)
    }
    assert [note.step for note in found] == [60, 90]  # the next one is another
    assert found[0].evidence["ratio"] == 40.0


def test_one_explosion_is_told_and_three_that_hurt_are_trouble():
    losses, norms = curve(0), np.ones(STEPS)
    norms[500] = 1e4
    found = findings(records(losses, norms=norms))
    assert [(f.cause, f.severity, f.step) for f in found] == [
        (Cause.GRADIENT_EXPLOSION, Severity.WARN, 500)
    ]
    norms[600:603], losses[601:603] = 1e4, 2.0  # a step is felt in the loss of the next one
    (bad,) = alarms(records(losses, norms=norms))
    assert (bad.cause, bad.step, bad.bad_step) == (Cause.GRADIENT_EXPLOSION, 602, 600)
    losses[600] = 2.0  # it was there before the first large gradient did anything
    assert alarms(records(losses, norms=norms)) == []


def test_a_learning_rate_off_its_schedule_is_a_fact():
    scheduled, lrs = np.full(STEPS, 1e-3), np.full(STEPS, 1e-3)
    lrs[700] = 0.1
    (bad,) = alarms(records(curve(0), lrs=lrs, scheduled_lrs=scheduled))
    assert (bad.cause, bad.step, bad.bad_step) == (Cause.LR_SPIKE, 700, 700)
    assert alarms(records(curve(0), lrs=lrs)) == []
    told = [f for f in findings(records(curve(0), lrs=lrs)) if f.cause is Cause.LR_SPIKE]
    assert [(f.step, f.severity) for f in told] == [(700, Severity.WARN)]


def test_steps_that_became_slow_are_told_once():
    seconds = np.where(np.arange(STEPS) < 700, 0.1, 0.5)
    seconds[300:310] = 5.0  # a checkpoint, not a collapse
    found = findings(records(curve(0), seconds=seconds))
    assert [(f.cause, f.step) for f in found] == [(Cause.THROUGHPUT_COLLAPSE, 719)]


def test_batches_cut_for_lack_of_memory_are_not_slow():
    watch = Watch(HealingConfig())
    for step in range(400):
        pieces = 1 if step < 200 else 8
        record = Record(step=step, norm=1.0, seconds=0.1 * pieces, micro_batches=pieces)
        assert watch.observe(record) == []


def test_a_plateau_is_told_once_and_chance_by_name():
    g = np.random.default_rng(0)
    flat = findings(records(1.0 + 0.05 * g.standard_normal(4000)))
    assert causes(flat) == [Cause.PLATEAU]
    assert not flat[0].evidence["at_chance"]
    chance = findings(records(0.6931 + 0.005 * g.standard_normal(4000)))
    assert causes(chance) == [Cause.PLATEAU]
    assert chance[0].evidence["at_chance"]
    learning = 0.6931 - 0.5 * (1 - np.exp(-np.arange(4000) / 4000))
    assert findings(records(learning + 0.02 * g.standard_normal(4000))) == []
    assert findings(records(np.ones(4000)), HealingConfig(plateau_steps=0)) == []


def test_an_overfitting_gap_is_told_once_per_crossing():
    watch = Watch(HealingConfig())
    for record in records(np.full(100, 0.5)):
        watch.observe(record)
    gaps = [0.6, 2.4, 2.6, 2.7, 2.3, 2.6, 1.0, 2.6]
    told = [bool(watch.observe_eval(step, loss)) for step, loss in enumerate(gaps)]
    assert told == [False, False, True, False, False, False, False, True]
    assert watch.metrics()["healing/eval_gap"] == pytest.approx(2.1)
    assert watch.observe_eval(9, 5.0, train_loss=4.9) == []
    assert watch.observe_eval(9, math.nan) == []


@pytest.mark.parametrize(
    ("flag", "cause", "severity"),
    [
        (Flag.PREEMPTED, Cause.PREEMPTED, Severity.FATAL),
        (Flag.WEIGHTS_BAD, Cause.WEIGHT_CORRUPTION, Severity.ERROR),
        (Flag.OPTIMIZER_STATE_BAD, Cause.OPTIMIZER_CORRUPTION, Severity.ERROR),
        (Flag.MEMORY_PRESSURE, Cause.MEMORY_PRESSURE, Severity.WARN),
        (Flag.DEVICE_ERROR, Cause.DEVICE_ERROR, Severity.FATAL),
        (Flag.DATA_ERROR, Cause.DATA_ERROR, Severity.ERROR),
    ],
)
def test_news_of_the_host_is_passed_on(flag, cause, severity):
    config = HealingConfig()
    (found,) = Watch(config).observe(Record(step=250, flags=flag, loss=1.0, norm=1.0))
    assert (found.cause, found.severity) == (cause, severity)
    is_damage = flag & (Flag.WEIGHTS_BAD | Flag.OPTIMIZER_STATE_BAD)
    since = config.check_interval + config.lag  # the last check that was heard of found nothing
    assert found.bad_step == (250 - since if is_damage else 250)


def eventful():
    losses, norms = curve(3, noise=0.2), np.exp(np.random.default_rng(3).standard_normal(STEPS))
    losses[400], norms[500], losses[600:608], losses[650] = 50.0, 1e6, 80.0, math.nan
    losses[900:] += 0.02 * np.arange(STEPS - 900)
    norms[900:] *= np.exp(0.01 * np.arange(STEPS - 900))
    lrs = np.where(np.arange(STEPS) == 800, 1.0, 1e-3)
    return list(records(losses, norms=norms, lrs=lrs, seconds=np.full(STEPS, 0.1)))


@pytest.mark.parametrize("at", [0, 3, 33, 401, 603, 651, 1001, 1200])
def test_state_is_json_and_a_restored_watch_goes_on_alike(at):
    stream = eventful()
    watch = Watch(HealingConfig())
    for record in stream[:at]:
        watch.observe(record)
    state = json.loads(json.dumps(watch.state(), allow_nan=False))
    other = Watch(HealingConfig())
    for record in stream[: at // 2]:
        other.observe(record)  # whatever it remembers is forgotten
    other.load_state(state)
    for record in stream[at:]:
        assert other.observe(record) == watch.observe(record)
    assert other.state() == watch.state()


def test_observing_does_not_change_a_state_that_was_taken():
    stream = eventful()
    watch = Watch(HealingConfig())
    for record in stream[:300]:
        watch.observe(record)
    state = watch.state()
    copy = json.loads(json.dumps(state))
    for record in stream[300:]:
        watch.observe(record)
    assert state == copy


def test_a_state_of_an_older_version_is_taken_as_far_as_it_goes():
    watch = Watch(HealingConfig())
    state = watch.state()
    del state["divergence"]
    watch.load_state({**state, "gone": {}})


def test_a_stream_of_nonsense_raises_nothing():
    watch = Watch(HealingConfig())
    for step, value in enumerate([math.nan, math.inf, -math.inf, 0.0, -0.0, 1e308, -1e308] * 40):
        record = Record(
            step=step,
            loss=value,
            norm=value,
            lr=value,
            seconds=value,
            scheduled_lr=value,
            loss_scale=value,
            micro_batches=0,
        )
        watch.observe(record)
        json.dumps(watch.state(), allow_nan=False)
