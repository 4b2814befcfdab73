"""Features are numbers whatever the stream, and do not know its scale."""

import json
import math

import numpy as np
import pytest

from heal.lab.forecast.features import ABOUT, LIMIT, NAMES, Features
from heal.record import Flag, Record
from tests.heal.detectors.streams import healthy_streams, learning_curve, records

AT = {name: i for i, name in enumerate(NAMES)}


def follow(stream):
    features = Features()
    return [features.observe(record) for record in stream]


def last(stream, name):
    return follow(stream)[-1][AT[name]]


def test_there_are_more_than_twelve_and_each_says_what_it_is():
    assert len(NAMES) >= 12
    assert all(len(about) > 20 for about in ABOUT.values())
    assert len(follow(records([1.0]))[0]) == len(NAMES)


NASTY = {
    "nan": [math.nan] * 50,
    "inf": [math.inf, -math.inf] * 25,
    "zero": [0.0] * 50,
    "negative": [-3.0, -2.0] * 25,
    "tiny": [1e-40, 2e-40] * 25,
    "huge": [1e38, 1e37] * 25,
    "mixed": [1.0, math.nan, 0.0, -1e30, math.inf, 1e-30] * 10,
}


@pytest.mark.parametrize("losses", NASTY.values(), ids=NASTY)
@pytest.mark.parametrize("norms", NASTY.values(), ids=NASTY)
def test_every_feature_is_a_finite_plain_float(losses, norms):
    stream = records(losses, norms=(norms * 2)[: len(losses)], lrs=(norms * 2)[: len(losses)])
    for values in follow(stream):
        assert all(type(v) is float and abs(v) <= LIMIT for v in values)


@pytest.mark.parametrize("factor", [1e-6, 1e5])
def test_the_scale_of_losses_norms_and_rates_does_not_matter(factor):
    g = np.random.default_rng(0)
    losses = learning_curve(300) + 0.05 * g.standard_normal(300)
    norms, lrs = np.exp(g.standard_normal(300)), np.linspace(1e-3, 1e-2, 300)

    def scaled(by):
        stream = records(by * losses, norms=by * norms, lrs=by * lrs)
        return follow(stream)

    for one, other in zip(scaled(1.0), scaled(factor), strict=True):
        assert one == pytest.approx(other, rel=1e-6, abs=1e-6)


def test_a_growing_rate_a_growing_norm_and_a_rising_loss_are_seen():
    t = np.arange(300)
    growth = np.where(t < 200, 1.0, 1.03 ** np.maximum(t - 200, 0))
    noise = 1 + 0.02 * np.random.default_rng(0).standard_normal(300)
    sick = list(records(growth * noise, norms=growth, lrs=1e-3 * growth))
    calm = list(records(noise, norms=np.ones(300), lrs=np.full(300, 1e-3)))
    for name in (
        "loss_rise",
        "loss_climb",
        "norm_growth",
        "lr_ratio",
        "lr_growth",
        "lr_climb",
        "z_run",
    ):
        assert last(sick, name) > last(calm, name) + 0.3, name


def test_a_zigzag_turns_round_more_often_than_noise():
    zigzag = [1.0 + 0.1 * (-1) ** t for t in range(100)]
    assert last(records(zigzag), "loss_reversals") > 0.2
    assert last(records(zigzag), "loss_autocorrelation") < -0.5


def test_a_refused_step_and_a_clipped_one_are_counted():
    flags = [Flag(0)] * 60 + [Flag.CLIPPED] * 10
    stream = [Record(step=i, loss=1.0, norm=1.0, flags=f) for i, f in enumerate(flags)]
    assert last(stream, "clip_rate") > 0.2
    stream += [Record(step=70, flags=Flag.HAS_NAN, blocked=True)]
    assert last(stream, "refused_rate") > 0.02


def test_a_rate_that_is_not_the_scheduled_one_and_slow_steps_are_seen():
    stream = list(records([1.0] * 50, lrs=[1e-2] * 50, scheduled_lrs=[1e-3] * 50))
    assert last(stream, "lr_override") == pytest.approx(math.log(10))
    seconds = [0.1] * 150 + [1.0] * 10
    assert last(records([1.0] * 160, seconds=seconds), "throughput") > 1.0


def test_a_rate_that_goes_to_and_fro_is_told_from_one_that_rises():
    t = np.arange(200)
    swinging = 1e-3 * np.exp(0.5 * np.sin(2 * np.pi * t / 20))
    rising, held = 1e-3 * 1.02**t, np.full(200, 1e-3)
    swing = [last(records(np.ones(200), lrs=lrs), "lr_swing") for lrs in (swinging, rising, held)]
    assert swing[0] > 1.0
    assert swing[1] < 0.01
    assert swing[2] < 1e-9


def test_a_climb_is_above_the_highest_rate_that_was_held_and_no_warm_up_nor_restart():
    t = np.arange(200)
    climbing = 1e-3 * np.where(t < 100, 1.0, 1.02 ** np.maximum(t - 100, 0))
    warm_up = 1e-3 * np.minimum(1.0, (t + 1) / 150)
    stairs = 1e-3 * np.minimum(1.0, 2.0 ** (t // 20 - 6))
    restarts = 1e-3 * (0.51 + 0.49 * np.cos(np.pi * (t % 70) / 70))
    found = [
        max(values[AT["lr_climb"]] for values in follow(records(np.ones(200), lrs=lrs)))
        for lrs in (climbing, warm_up, stairs, restarts)
    ]
    assert found[0] == pytest.approx(99 * math.log(1.02), rel=1e-3)
    assert found[1:] == [0.0, 0.0, 0.0]


def follow_weights(norms, every=10):
    features = Features()
    for step, record in enumerate(records(np.ones(len(norms)))):
        values = features.observe(record)
        if step % every == 0:
            features.observe_weights(norms[step])
    return dict(zip(NAMES, values, strict=True))


def test_weights_that_drift_are_seen_against_their_habit():
    t = np.arange(301)
    calm = 5.0 * np.exp(1e-4 * t)
    drifting = calm * np.where(t < 200, 1.0, 1.01 ** np.maximum(t - 200, 0))
    calm, drifting = follow_weights(calm), follow_weights(drifting)
    assert calm["weight_surge"] == pytest.approx(0.0, abs=1e-6)
    assert drifting["weight_surge"] > 1.0
    assert drifting["weight_rate"] == pytest.approx(math.log1p(200 * math.log(1.01 * 1.0001)), 1e-2)
    assert drifting["weight_growth"] > calm["weight_growth"] + 1.0


def test_an_update_is_measured_against_the_weights():
    """Alike in every step: a rate that grows, and weights that shrink while it does not."""
    steps = np.arange(301)
    growth = np.where(steps < 200, 1.0, 1.02 ** np.maximum(steps - 200, 0))

    def ratio(lrs, weights):
        features = Features()
        for step, lr in enumerate(lrs.tolist()):
            values = features.observe(Record(step=step, loss=1.0, clipped_norm=0.5, lr=lr))
            if step % 10 == 0:
                features.observe_weights(weights[step])
        return values[AT["update_ratio"]]

    calm, faster = np.full(301, 1e-3), 1e-3 * growth
    assert ratio(calm, np.full(301, 5.0)) == pytest.approx(0.0, abs=1e-9)
    assert ratio(faster, np.full(301, 5.0)) > 0.5
    assert ratio(calm, 5.0 / growth) == pytest.approx(ratio(faster, np.full(301, 5.0)), rel=0.15)
    assert ratio(faster, 5.0 * growth) == pytest.approx(0.0, abs=0.15)


def test_the_first_norm_of_the_weights_is_no_change_of_the_update():
    features = Features()
    for step in range(60):
        values = features.observe(Record(step=step, loss=1.0, clipped_norm=0.5, lr=1e-3))
        if step == 50:
            features.observe_weights(40.0)
    assert values[AT["update_ratio"]] == pytest.approx(0.0, abs=1e-9)


def test_rarer_checks_say_about_the_same():
    drifting = 5.0 * 1.01 ** np.arange(301)
    often, seldom = follow_weights(drifting), follow_weights(drifting, every=30)
    for name in ("weight_rate", "weight_growth"):
        assert seldom[name] == pytest.approx(often[name], rel=0.1), name
    behind = 128 * math.log(1.01) * (1.0 - math.exp(-300 / 128))  # a mean of 128 steps, on a slope
    assert often["weight_growth"] == pytest.approx(math.log1p(20 * behind), rel=0.05)


def test_norms_that_come_too_often_or_are_no_numbers_are_left_out():
    norms = np.exp(np.random.default_rng(0).standard_normal(101))
    assert follow_weights(norms, every=1) == follow_weights(norms)
    features = Features()
    features.observe(Record(step=0, loss=1.0))
    for norm in (math.nan, math.inf, 0.0, -1.0):
        features.observe_weights(norm)
    assert features.w == 0.0


def test_one_freak_loss_leaves_little_behind():
    losses = [1.0 + 0.01 * (-1) ** t for t in range(200)]
    freak = list(losses)
    freak[150] = 1e20
    one, other = follow(records(losses))[-1], follow(records(freak))[-1]
    assert abs(one[AT["loss_undone"]] - other[AT["loss_undone"]]) < 0.1


def test_the_state_goes_through_json_and_back():
    _, losses = next(healthy_streams(0, steps=200))
    stream = list(records(losses, lrs=np.full(200, 1e-3)))
    whole = Features()
    for record in stream[:100]:
        whole.observe(record)
    again = Features()
    again.load_state(json.loads(json.dumps(whole.state(), allow_nan=False)))
    for record in stream[100:]:
        assert again.observe(record) == whole.observe(record)


def test_the_state_of_a_new_run_goes_through_json_too():
    again = Features()
    again.load_state(json.loads(json.dumps(Features().state(), allow_nan=False)))
    assert again.observe(Record(step=0, loss=1.0)) == Features().observe(Record(step=0, loss=1.0))


def test_the_work_of_a_step_does_not_grow_with_the_run():
    """Nothing is kept per step: the state has the same size for ever."""
    features = Features()
    for record in records(np.ones(500)):
        features.observe(record)
    assert not any(isinstance(v, (list, dict)) for v in features.state().values())
