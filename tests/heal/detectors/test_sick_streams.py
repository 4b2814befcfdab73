"""What detectors say of pace, progress and the host; that their state is kept and goes on alike."""

import json
import math

import numpy as np
import pytest

from heal.causes import Cause, Severity
from heal.config import HealingConfig
from heal.detectors.watch import Watch
from heal.record import Flag, HealthRow, Record
from tests.heal.detectors.streams import findings, learning_curve, records

STEPS = 1500


def curve(seed, noise=0.05):
    return learning_curve(STEPS) + noise * np.random.default_rng(seed).standard_normal(STEPS)


def causes(found):
    return [finding.cause for finding in found]


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


def plateaus(losses, config=None):
    return [f for f in findings(records(losses), config) if f.cause is Cause.PLATEAU]


def test_a_plateau_is_told_once_and_chance_by_name():
    g = np.random.default_rng(0)
    flat = plateaus(1.0 + 0.05 * g.standard_normal(4000))
    assert len(flat) == 1
    assert not flat[0].evidence["at_chance"]
    chance = plateaus(0.6931 + 0.005 * g.standard_normal(4000))
    assert len(chance) == 1
    assert chance[0].evidence["at_chance"]
    learning = 0.6931 - 0.5 * (1 - np.exp(-np.arange(4000) / 4000))
    assert plateaus(learning + 0.02 * g.standard_normal(4000)) == []
    assert plateaus(np.ones(4000), HealingConfig(plateau_steps=0)) == []


@pytest.mark.parametrize(("gained", "is_found"), [(0.070, True), (0.080, False)])
def test_a_gain_within_four_standard_errors_is_none(gained, is_found):
    """Losses spread evenly over 1 have a spread of 0.37; the error of 500 of them is 0.0166."""
    even = [1.0 + (i * 7 % 500) / 499 for i in range(500)]
    losses = np.array([*even, *(loss - gained for loss in even)])
    assert bool(plateaus(losses, HealingConfig(plateau_improvement=0.005))) is is_found


@pytest.mark.parametrize(("loss", "at_chance"), [(0.7030, True), (0.7032, False), (0.6832, True)])
def test_a_plateau_within_a_hundredth_of_chance_is_named_so(loss, at_chance):
    (found,) = plateaus(np.full(1000, loss))
    assert found.evidence["at_chance"] is at_chance


@pytest.mark.parametrize(("steps", "is_found"), [(99, False), (100, True)])
def test_a_hundred_steps_are_given_to_learn_something(steps, is_found):
    found = findings(records(np.full(steps, 2.0)))
    assert any(f.cause is Cause.NOT_LEARNING for f in found) is is_found


@pytest.mark.parametrize(("learned", "is_found"), [(0.35, True), (0.40, False)])
def test_less_than_the_noise_is_not_learned(learned, is_found):
    """Losses spread evenly over 1 have a spread of 0.37."""
    losses = [3.0] * 3 + [3.0 - learned + ((i * 7 % 32) - 15.5) / 31 for i in range(97)]
    found = findings(records(np.array(losses)))
    assert any(f.cause is Cause.NOT_LEARNING for f in found) is is_found


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
    # The last comparison of ranks that was heard of found nothing.
    since = max(config.check_interval, config.nccl_health_check_interval + config.lag)
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
    del state["loss"]
    watch.load_state({**state, "gone": {}})


def test_the_state_of_detectors_that_were_replaced_is_learned_anew():
    """Version 0.1 had other detectors under some of the names."""
    watch = Watch(HealingConfig())
    for record in eventful()[:100]:
        watch.observe(record)
    before = watch.state()
    watch.load_state({"loss": {"best": 1.0}, "lr": {"recent": [1e-3]}})
    assert watch.state() == before


def test_a_run_that_learned_nothing_in_a_hundred_steps_is_suspected_once():
    noise = 0.01 * np.random.default_rng(0).random(1000)
    found = [f for f in findings(records(2.0 + noise)) if f.cause is Cause.NOT_LEARNING]
    assert [f.step for f in found] == [99]
    assert found[0].wants_proof
    assert "learning rate" in found[0].evidence["advice"]
    learning = learning_curve(1000, time=300.0) + noise
    assert not any(f.cause is Cause.NOT_LEARNING for f in findings(records(learning)))


def test_the_first_losses_are_known_after_a_rollback_to_a_step_before_their_records_came():
    watch = Watch(HealingConfig())
    saved = watch.state()  # with a snapshot of step 1: records come some steps late
    for record in records(np.array([2.0, 1e6, 1e9, 1e12])):
        watch.observe(record)
    watch.roll_back(1, saved)
    found = [f for r in records(np.full(100, 1e5)) for f in watch.observe(r)]
    (not_learning,) = [f for f in found if f.cause is Cause.NOT_LEARNING]
    assert not_learning.evidence["first_loss"] == 2.0


def row_of_gradients(step, *norms, sizes=(90, 10)):
    ones = (1.0,) * len(sizes)
    bad = (0,) * len(sizes)
    return HealthRow(
        step=step, weight_norms=ones, weight_bad=bad, gradient_norms=norms, sizes=sizes
    )


@pytest.mark.parametrize(
    ("norms", "is_found"),
    [
        ([(0.0, 1.0)] * 4, True),  # the weights are dead, the last bias goes on learning
        ([(0.0, 1.0)] * 3 + [(0.1, 1.0)], False),
        ([(1.0, 0.0)] * 4, False),  # a branch that is not in use
        ([(0.0, 0.0)] * 4, False),  # a loss of zero, say of a hinge
        ([(-1.0, 1.0)] * 4, False),  # no gradient is not one of zero
        ([(-1.0, -1.0)] * 4, False),
    ],
)
def test_gradients_of_zero_in_nearly_all_weights_are_reported_once(norms, is_found):
    watch = Watch(HealingConfig())
    steps = [1, 16, 31, 32]
    found = [
        (step, finding)
        for step, norm in zip(steps, norms, strict=True)
        for finding in watch.observe_health(row_of_gradients(step, *norm))
    ]
    found += [(50, f) for f in watch.observe_health(row_of_gradients(50, *norms[-1]))]
    assert [step for step, _ in found] == [32] * is_found
    for _, finding in found:
        assert finding.cause is Cause.NOT_LEARNING
        assert not finding.wants_proof
        assert finding.evidence["advice"].startswith("the gradients of 1 of 2 weights are zero")


def test_a_network_that_dies_later_is_reported_after_32_steps_without_gradients():
    """Damage can do that: it is rolled back before."""
    watch = Watch(HealingConfig())
    for step, norm in ((100, 1.0), (150, 0.0), (180, 0.0)):
        assert watch.observe_health(row_of_gradients(step, norm, 1.0)) == []
    (found,) = watch.observe_health(row_of_gradients(181, 0.0, 1.0))
    assert found.cause is Cause.NOT_LEARNING


@pytest.mark.parametrize(
    ("losses", "norms", "is_kept"),
    [
        (2.0, 1.0, True),
        (2.1, 1.0, False),  # harder data
        (2.0, 1.02, False),  # a game: its loss is back, its gradients are others
        (0.0, 1.0, False),  # lost in its noise: RL
    ],
)
def test_without_an_experiment_only_a_run_in_which_nothing_changed_is_reported(
    losses, norms, is_kept
):
    rng = np.random.default_rng(3)
    noise, start = 0.01 * rng.standard_normal((2, 200)), np.arange(200) < 40
    first = min(losses, 2.0)
    stream = records(
        np.where(start, first, losses) + noise[0], norms=np.where(start, 1.0, norms) + noise[1]
    )
    (found,) = [f for f in findings(stream) if f.cause is Cause.NOT_LEARNING]
    assert found.wants_proof
    assert found.is_kept is is_kept


def test_32_gradients_of_zero_are_reported_once_without_an_experiment():
    norms = np.ones(300)
    norms[50:81] = 0.0
    stream = list(records(learning_curve(300, time=100.0), norms=norms))
    assert not any(f.cause is Cause.NOT_LEARNING for f in findings(stream))
    norms[50:200] = 0.0
    stream = records(learning_curve(300, time=100.0), norms=norms)
    (found,) = [f for f in findings(stream) if f.cause is Cause.NOT_LEARNING]
    assert (found.step, found.wants_proof) == (81, False)
    assert "dead" in found.evidence["advice"]


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
