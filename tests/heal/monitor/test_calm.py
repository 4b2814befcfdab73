"""Records of calm steps wait for each other; whatever could be trouble is heard as soon as ever."""

import math

import pytest
import torch

from heal import HealingConfig
from heal.actions import HealingError
from heal.causes import Cause
from heal.detect import Usual, Watch
from heal.monitor import TOGETHER, Calm
from heal.ranks import HostFacts
from heal.verdict import Flag, Record
from tests.heal.linear_run import LAG, build, step_of
from zclip.layout import (
    BLOCKED,
    CLIPPED,
    FLAGS,
    HAS_NAN,
    LOSS,
    LOSS_RATIO,
    LOSS_SPIKE,
    NORM,
    NUM_VERDICT,
    SPIKE,
)

USUAL = HostFacts(lr=0.1)


def row(norm=1.0, flags=0, blocked=0.0, ratio=1.0):
    values = [0.0] * (NUM_VERDICT + 1)
    values[NORM], values[FLAGS], values[BLOCKED] = norm, float(flags), blocked
    values[LOSS_RATIO] = ratio
    return values


def heard(rows, facts=USUAL):
    """Return the steps after which mail is read, if such rows were posted."""
    calm, steps = Calm(HealingConfig()), []
    for step, values in enumerate(rows):
        calm.note(step, values, facts[step] if isinstance(facts, list) else facts)
        if calm.is_time(step + 1):
            steps.append(step + 1)
            calm.heard(step + 1, step - LAG, Usual())
    return steps


def test_calm_steps_are_heard_together():
    assert heard([row()] * 31) == [1, 2, 3, 3 + TOGETHER]  # nothing is known before the first


@pytest.mark.parametrize("flags", [CLIPPED, SPIKE, CLIPPED | SPIKE])
def test_clipping_is_calm(flags):
    """Noise as real data has it brings a norm out of the ordinary every few steps."""
    assert heard([row(flags=flags)] * 31)[-2:] == [3, 3 + TOGETHER]


@pytest.mark.parametrize(
    "odd",
    [
        row(norm=math.nan),
        row(norm=5.0),
        row(flags=HAS_NAN),
        row(flags=CLIPPED + LOSS_SPIKE),
        row(blocked=1.0),
        row(ratio=1.6),
        row(ratio=-1.1),
        row(ratio=math.nan),
        None,
    ],
    ids=["nan", "leap", "flag", "flags", "blocked", "loss", "fall", "nan loss", "on a device"],
)
def test_what_could_be_trouble_is_heard_lag_steps_later(odd):
    rows = [row()] * 31
    assert 19 not in heard(rows)
    rows[16] = odd
    assert 16 + LAG + 1 in heard(rows)  # its mail can be read when two more were posted


@pytest.mark.parametrize(
    "odd", [HostFacts(lr=0.3), HostFacts(lr=0.1, flags=Flag.PREEMPTED)], ids=["lr", "news"]
)
def test_a_leap_of_the_rate_and_news_of_the_host_are_heard_at_once(odd):
    facts = [USUAL] * 31
    facts[16] = odd
    assert 16 + LAG + 1 in heard([row()] * 31, facts)


def test_what_grows_by_little_in_every_step_is_seen_to_leap():
    """Compared with what was heard of last, not with the step before."""
    growing = [row(norm=1.5 ** max(step - 13, 0)) for step in range(31)]
    assert 20 in heard(growing)
    rates = [HostFacts(lr=0.1 * 1.2 ** max(step - 13, 0)) for step in range(31)]
    assert 20 in heard([row()] * 31, rates)


def test_after_a_rollback_it_waits_as_before():
    calm, last = Calm(HealingConfig(), 5), 5 + TOGETHER
    assert [step for step in range(5, last + 2) if calm.is_time(step)] == [last, last + 1]
    calm.note(5, row(), USUAL)
    assert calm.is_time(6)  # nothing is known


def test_trouble_is_heard_of_also_if_steps_without_mail_come_after_it():
    calm = Calm(HealingConfig())
    calm.heard(10, 9, Usual())
    calm.note(10, row(), USUAL)
    calm.heard(11, 10, Usual())
    calm.note(11, row(blocked=1.0), USUAL)
    assert all(calm.is_time(step) for step in range(12, 40))
    calm.heard(40, 11, Usual())
    assert not calm.is_time(41)


def test_a_rate_that_nobody_knows_is_calm():
    assert heard([row()] * 31, HostFacts(lr=math.nan))[-2:] == [3, 3 + TOGETHER]


def test_no_record_is_lost_by_waiting():
    model, _, healer = build()
    step_of(model, healer, 33)
    assert healer.guarded.mailbox.dropped == 0
    healer.hear_the_rest()
    assert healer.latest.step == 32
    assert healer.monitor.watch.detectors["counter"].seen == 33


def test_what_is_told_of_a_run_is_as_new_as_ever():
    """Only the detectors wait: whoever asks for numbers hears of the step that is ``lag`` old."""
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
    """Of one that nobody has heard of, by what is usual; what is no number has none."""
    watch = Watch(HealingConfig())
    for step in range(100):
        watch.observe(Record(step, norm=1.0, loss=1.0 + 1e-3 * math.sin(step), lr=0.1))
    before = watch.metrics()["healing/loss_spike_ratio"]
    assert before == pytest.approx(1.0, abs=1e-2)
    unheard = Record(100, loss=loss)
    assert watch.metrics(unheard)["healing/loss_spike_ratio"] == pytest.approx(ratio, abs=1e-2)
    assert watch.metrics()["healing/loss_spike_ratio"] == before


def test_numbers_are_those_of_a_record_that_nobody_has_heard_of():
    model, _, healer = build()
    step_of(model, healer, 60)
    healer.snapshots()  # hears of all
    heard = healer.metrics()["healing/loss_spike_ratio"]
    assert heard == healer.monitor.watch.detectors["loss"].ratio
    step_of(model, healer, 3)
    assert healer.monitor.unheard.step == 62 - LAG
    assert healer.metrics()["healing/loss_spike_ratio"] < heard  # the loss falls
    assert healer.monitor.watch.detectors["loss"].ratio == heard


def test_a_forecast_hears_every_step_when_it_can():
    model, _, healer = build(forecast=True)
    for step in range(30):
        step_of(model, healer, 1)
        assert healer.monitor.watch.forecast.features.steps == max(0, step + 1 - LAG)


def test_nothing_else_waits_for_the_records():
    """Snapshots, checks and probes come when they are due, in whatever step that is."""
    model, _, healer = build(snapshot_interval=7, check_interval=13, quarantine_steps=0)
    captured, checked, looked = [], [], []
    capture, post = healer.training.capture, healer.monitor._health.post
    healer.training.capture = lambda **kw: captured.append(healer.training.step) or capture(**kw)
    healer.monitor._health.post = lambda step: checked.append(step) or post(step)
    healer.add_probe("look", lambda: looked.append(healer.last_step + 1), every=11)
    step_of(model, healer, 45)
    assert captured == [0, 1, 2, 4, 7, 14, 21, 28, 35, 42]
    assert checked == [1, 2, 4, 8, 13, 26, 39]
    assert looked == [11, 22, 33, 44]


def test_a_watchdog_hears_of_every_step():
    model, _, healer = build()
    beats = []

    class Watchdog:
        beat = staticmethod(beats.append)

    step_of(model, healer, 5)
    healer.monitor.cluster.watchdog = Watchdog()
    step_of(model, healer, 10)
    healer.monitor.cluster.watchdog = None
    assert beats == list(range(6, 16))


def test_a_stop_that_is_requested_between_two_hearings_is_heard_in_time():
    model, _, healer = build()
    step_of(model, healer, 23)
    healer.request_stop()
    with pytest.raises(HealingError):
        step_of(model, healer, LAG + 1)


def test_a_norm_that_leapt_and_stays_is_heard_of_in_every_step():
    """Until it is the usual one: detectors that count a streak must not wait."""
    rows = [row()] * 30 + [row(norm=1000.0)] * 300
    steps = heard(rows)
    assert set(range(31, 131)) <= set(steps)
    assert len([step for step in steps if step > 250]) < 10


@pytest.mark.parametrize(
    ("loss", "is_trouble"), [(0.14, False), (0.2, True), (-5.0, False), (math.nan, False)]
)
def test_a_loss_above_what_is_usual_is_heard_of_though_the_device_finds_it_common(loss, is_trouble):
    calm = Calm(HealingConfig())
    calm.note(0, row(), USUAL)
    calm.heard(1, 0, Usual(loss=0.1, loss_margin=0.05))
    values = row()
    values[LOSS] = loss
    calm.note(1, values, USUAL)
    assert calm.is_time(2) == is_trouble


@pytest.mark.parametrize(("norm", "is_trouble"), [(7.9, False), (8.1, True), (0.0, False)])
def test_a_norm_is_measured_against_the_usual_ones_and_not_the_last(norm, is_trouble):
    calm = Calm(HealingConfig())
    calm.note(0, row(norm=0.1), USUAL)
    calm.heard(1, 0, Usual(norm=2.0))
    calm.note(1, row(norm=norm), USUAL)
    assert calm.is_time(2) == is_trouble


def test_norms_that_scatter_are_heard_of_together():
    """Those of real data do so by a factor of ten, from one step to the next."""
    model, _, healer = build(zclip_enabled=False, disabled_detectors="not_learning")
    generator = torch.Generator().manual_seed(0)
    hearings = []
    hear = healer.guarded.mailbox.poll
    healer.guarded.mailbox.poll = lambda: hearings.append(healer.training.step) or hear()
    for _ in range(400):
        size = float(torch.randn((), generator=generator).exp())
        (size * model(torch.ones(2, 4)).mean()).backward()
        healer.step(torch.tensor(1.0))
        model.zero_grad()
    assert len([step for step in hearings if step > 100]) < 30


def test_the_usual_norm_is_known_when_there_are_enough():
    _, _, healer = build()
    watch = healer.monitor.watch
    for step in range(40):
        assert watch.usual().norm == (0.0 if step < 8 else pytest.approx(0.9 * step, abs=1.0))
        watch.observe(Record(step, norm=float(step), loss=1.0, lr=0.1, seconds=1.0))


def test_an_explosion_right_after_a_rollback_is_heard_as_soon_as_ever():
    model, _, healer = build()
    for step in range(140):
        explode(model, healer, 1.0 if step < 100 else 60.0)
    healer.training.restore(100)
    log = len(healer.recovery.log)
    for step in range(5 + LAG + 1):
        explode(model, healer, 1.0 if step < 5 else 200.0)
    told = [diagnosis for _, diagnosis, _ in list(healer.recovery.log)[log:]]
    assert [(d.cause, d.step) for d in told] == [(Cause.GRADIENT_EXPLOSION, 105)]


def explode(model, healer, norm):
    (norm * model(torch.ones(2, 4)).mean()).backward()
    healer.step(torch.tensor(1.0))
    model.zero_grad()
