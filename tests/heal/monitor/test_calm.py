"""Records of calm steps wait for each other; whatever could be trouble is polled at once."""

import math

import pytest
import torch

from heal import HealingConfig
from heal.actions import HealingError
from heal.causes import Cause
from heal.detectors.watch import CalmLimits, Watch
from heal.monitor import TOGETHER, Calm
from heal.ranks import HostFacts
from heal.record import Flag, Record
from tests.heal.linear_run import LAG, build, step_of
from zclip.layout import (
    BLOCKED,
    CLIPPED,
    FLAGS,
    HAS_NAN,
    LOSS,
    LOSS_SPIKE,
    NORM,
    NUM_VERDICT,
    SPIKE,
)

ORDINARY = HostFacts(lr=0.1)
LIMITS = CalmLimits(loss=2.0, norm=5.0)


def row(norm=1.0, flags=0, blocked=0.0, loss=1.0):
    values = [0.0] * (NUM_VERDICT + 1)
    values[NORM], values[FLAGS], values[BLOCKED] = norm, float(flags), blocked
    values[LOSS] = loss
    return values


def polled(rows, facts=ORDINARY, limits=LIMITS):
    """Return the steps after which records are read, if such rows were posted."""
    calm, steps = Calm(HealingConfig()), []
    for step, values in enumerate(rows):
        calm.note(step, values, facts[step] if isinstance(facts, list) else facts)
        if calm.is_time(step + 1):
            steps.append(step + 1)
            calm.polled(step + 1, step - LAG, limits)
    return steps


def test_calm_steps_are_polled_together():
    assert polled([row()] * 31) == [1, 2, 3, 3 + TOGETHER]  # nothing is known before the first


def test_no_step_is_calm_while_the_limit_of_the_norm_is_unknown():
    assert polled([row()] * 31, limits=CalmLimits()) == list(range(1, 32))


@pytest.mark.parametrize("flags", [CLIPPED, SPIKE, CLIPPED | SPIKE])
def test_clipping_is_calm(flags):
    """On real data one step in twenty has a large norm."""
    assert polled([row(flags=flags)] * 31)[-2:] == [3, 3 + TOGETHER]


@pytest.mark.parametrize(
    "calm",
    [row(norm=4.9), row(norm=0.0), row(loss=1.9), row(loss=-50.0)],
    ids=["norm", "no norm", "loss", "low loss"],
)
def test_what_no_detector_counts_is_calm(calm):
    rows = [row()] * 31
    rows[16] = calm
    assert 16 + LAG + 1 not in polled(rows)


@pytest.mark.parametrize(
    "odd",
    [
        row(norm=math.nan),
        row(norm=5.1),
        row(flags=HAS_NAN),
        row(flags=CLIPPED + LOSS_SPIKE),
        row(blocked=1.0),
        row(loss=2.1),
        None,
    ],
    ids=["nan", "norm", "flag", "flags", "blocked", "loss", "on a device"],
)
def test_what_could_be_trouble_is_polled_lag_steps_later(odd):
    rows = [row()] * 31
    assert 19 not in polled(rows)
    rows[16] = odd
    assert 16 + LAG + 1 in polled(rows)  # its record can be read when two more were posted


@pytest.mark.parametrize(
    "odd",
    [HostFacts(lr=1.1), HostFacts(lr=0.1, flags=Flag.PREEMPTED)],
    ids=["lr", "flag of the host"],
)
def test_a_leap_of_the_rate_and_a_flag_of_the_host_are_polled_at_once(odd):
    facts = [ORDINARY] * 31
    facts[16] = odd
    assert 16 + LAG + 1 in polled([row()] * 31, facts)


def test_a_rate_that_grows_in_every_step_is_seen_to_leap():
    """Compared with the one that was polled last, not with that of the step before."""
    rates = [HostFacts(lr=0.1 * 2.0 ** max(step - 13, 0)) for step in range(31)]
    assert 20 in polled([row()] * 31, rates)


def test_after_a_rollback_it_waits_as_before():
    calm, last = Calm(HealingConfig(), 5), 5 + TOGETHER
    assert [step for step in range(5, last + 2) if calm.is_time(step)] == [last, last + 1]
    calm.note(5, row(), ORDINARY)
    assert calm.is_time(6)  # nothing is known


def test_trouble_is_polled_also_if_steps_without_a_record_come_after_it():
    calm = Calm(HealingConfig())
    calm.note(10, row(), ORDINARY)
    calm.polled(11, 10, LIMITS)
    calm.note(11, row(blocked=1.0), ORDINARY)
    assert all(calm.is_time(step) for step in range(12, 40))
    calm.polled(40, 11, LIMITS)
    assert not calm.is_time(41)


def test_an_unknown_rate_is_calm():
    assert polled([row()] * 31, HostFacts(lr=math.nan))[-2:] == [3, 3 + TOGETHER]


def test_no_record_is_lost_by_waiting():
    model, _, healer = build()
    step_of(model, healer, 33)
    assert healer.guarded.mailbox.dropped == 0
    healer.finish()
    assert healer.latest.step == 32
    assert healer.monitor.watch.detectors["counter"].seen == 33


def test_metrics_are_those_of_the_step_that_is_lag_old():
    """Only the detectors wait."""
    model, _, healer = build()
    for step in range(25):
        step_of(model, healer, 1)
        if step >= LAG:
            assert healer.latest.step == step - LAG
            assert healer.metrics()["zclip/raw_grad_norm"] == healer.latest.norm
    assert healer.latest.lr == 1e-3
    assert healer.monitor.watch.detectors["counter"].seen < 25 - LAG


@pytest.mark.parametrize(("loss", "ratio"), [(2.0, 2.0), (math.nan, 1.0), (math.inf, 1.0)])
def test_the_ratio_of_the_loss_is_that_of_the_newest_record(loss, ratio):
    """Of one that is still pending, by the level before it; what is no number has none."""
    watch = Watch(HealingConfig())
    for step in range(100):
        watch.observe(Record(step, norm=1.0, loss=1.0 + 1e-3 * math.sin(step), lr=0.1))
    before = watch.metrics()["healing/loss_spike_ratio"]
    assert before == pytest.approx(1.0, abs=1e-2)
    pending = Record(100, loss=loss)
    assert watch.metrics(pending)["healing/loss_spike_ratio"] == pytest.approx(ratio, abs=1e-2)
    assert watch.metrics()["healing/loss_spike_ratio"] == before


def test_metrics_are_those_of_a_pending_record():
    model, _, healer = build()
    step_of(model, healer, 60)
    healer.snapshots()  # polls
    ratio = healer.metrics()["healing/loss_spike_ratio"]
    assert ratio == healer.monitor.watch.detectors["loss"].ratio
    step_of(model, healer, 3)
    assert healer.monitor.pending.step == 62 - LAG
    assert healer.metrics()["healing/loss_spike_ratio"] < ratio  # the loss falls
    assert healer.monitor.watch.detectors["loss"].ratio == ratio


def test_a_forecast_observes_every_step_when_it_can():
    model, _, healer = build(forecast=True)
    for step in range(30):
        step_of(model, healer, 1)
        assert healer.monitor.watch.forecast.features.steps == max(0, step + 1 - LAG)


def test_nothing_else_waits_for_the_records():
    """Snapshots, checks and probes come when they are due, in whatever step that is."""
    model, _, healer = build(snapshot_interval=7, check_interval=13, quarantine_steps=0)
    captured, checked, looked = [], [], []
    capture, post = healer.training.capture, healer.monitor.health.post
    healer.training.capture = lambda **kw: captured.append(healer.training.step) or capture(**kw)
    healer.monitor.health.post = lambda step: checked.append(step) or post(step)
    healer.add_probe("look", lambda: looked.append(healer.last_step + 1), every=11)
    step_of(model, healer, 45)
    assert captured == [0, 1, 2, 4, 7, 14, 21, 28, 35, 42]
    assert checked == [1, 2, 4, 8, 13, 26, 39]
    assert looked == [11, 22, 33, 44]


def test_a_watchdog_gets_a_beat_in_every_step():
    model, _, healer = build()
    beats = []

    class Watchdog:
        beat = staticmethod(beats.append)

    step_of(model, healer, 5)
    healer.monitor.cluster.watchdog = Watchdog()
    step_of(model, healer, 10)
    healer.monitor.cluster.watchdog = None
    assert beats == list(range(6, 16))


def test_a_stop_that_is_requested_between_two_polls_comes_in_time():
    model, _, healer = build()
    step_of(model, healer, 23)
    healer.request_stop()
    with pytest.raises(HealingError):
        step_of(model, healer, LAG + 1)


def test_a_norm_that_leapt_and_stays_is_polled_in_every_step_until_it_is_the_level():
    """Detectors that count a streak must not wait."""
    model, _, healer = build(zclip_enabled=False, disabled_detectors="not_learning")
    polls = count_polls(healer)
    for step in range(200):
        explode(model, healer, 1.0 if step < 60 else 1000.0)
    assert set(range(61 + LAG, 70)) <= set(polls)
    assert len([step for step in polls if step > 150]) < 10


def test_norms_that_scatter_are_polled_together():
    """Those of real data do so by a factor of ten, from one step to the next."""
    model, _, healer = build(zclip_enabled=False, disabled_detectors="not_learning")
    generator = torch.Generator().manual_seed(0)
    polls = count_polls(healer)
    for _ in range(400):
        size = float(torch.randn((), generator=generator).exp())
        (size * model(torch.ones(2, 4)).mean()).backward()
        healer.step(torch.tensor(1.0))
        model.zero_grad()
    assert len([step for step in polls if step > 100]) < 30


def test_limits_are_known_when_there_are_enough_records():
    _, _, healer = build()
    watch = healer.monitor.watch
    for step in range(40):
        limits = watch.calm_limits()
        assert limits.norm == (0.0 if step < 8 else pytest.approx(100 * 0.9 * step, abs=100.0))
        assert math.isnan(limits.loss) if not step else limits.loss == pytest.approx(1.0, abs=1.0)
        watch.observe(Record(step, norm=float(step), loss=1.0, lr=0.1, seconds=1.0))


def test_an_explosion_right_after_a_rollback_is_reported_at_once():
    model, _, healer = build()
    for step in range(140):
        explode(model, healer, 1.0 if step < 100 else 60.0)
    healer.training.restore(100)
    log = len(healer.recovery.log)
    for step in range(5 + LAG + 1):
        explode(model, healer, 1.0 if step < 5 else 200.0)
    found = [diagnosis for _, diagnosis, _ in list(healer.recovery.log)[log:]]
    assert [(d.cause, d.step) for d in found] == [(Cause.GRADIENT_EXPLOSION, 105)]


def explode(model, healer, norm):
    (norm * model(torch.ones(2, 4)).mean()).backward()
    healer.step(torch.tensor(1.0))
    model.zero_grad()


def count_polls(healer):
    """Return a list that gets the step of every poll from now on."""
    steps, poll = [], healer.guarded.mailbox.poll
    healer.guarded.mailbox.poll = lambda lag=None: steps.append(healer.training.step) or poll(lag)
    return steps
