"""zclip_ against the published traces, upstream's algorithm, and upstream's defects."""

import math

import pytest
import torch

from tests.backends import steps_for
from tests.rule_runs import fresh_state, noisy_norms, run
from tests.upstream import PlainZClip
from zclip.layout import (
    BLOCKED,
    BUFFER_COLUMN,
    CLIP_COUNT,
    CLIPPED,
    CLIPPED_NORM,
    FLAGS,
    MEAN,
    MEAN_COLUMN,
    NORM,
    ON_NONFINITE,
    OVERFLOW,
    REFUSE,
    SEEN_COLUMN,
    SKIP_COUNT,
    SPIKE,
    STD,
    STEPS,
    THRESHOLD,
    VAR_COLUMN,
    ZCLIP_MODES,
    Z,
)

WARM_UP = [1.0, 1.2, 0.9, 1.1, 1.05]
THEN = [1.0, 1.3, 5.0, 1.1, 50.0, 0.8]

# After each norm of THEN: the norm left, mean, variance. From the official code, in float32.
TRACES = {
    "adaptive_scaling": (
        {},
        [
            (1.0, 1.0485, 0.0097705721),
            (1.291309, 1.0557843, 0.011141625),
            (1.0734392, 1.056314, 0.010816175),
            (1.1, 1.0576245, 0.01054556),
            (1.0589713, 1.0576649, 0.010229244),
            (0.8, 1.049935, 0.011796392),
        ],
    ),
    "percentile": (
        {"clip_mode": ZCLIP_MODES["percentile"]},
        [
            (1.0, 1.0485, 0.0097705721),
            (1.2956146, 1.0559135, 0.011201167),
            (1.3205022, 1.0638511, 0.012841228),
            (1.1, 1.0649356, 0.012492877),
            (1.3443644, 1.0733185, 0.014322068),
            (0.8, 1.0651189, 0.016001047),
        ],
    ),
    "mean, no update on a spike": (
        {"clip_mode": ZCLIP_MODES["mean"], "skip_update_on_spike": True},
        [
            (1.0, 1.0485, 0.0097705721),
            (1.0484992, 1.0485, 0.0097705721),
            (1.0484998, 1.0485, 0.0097705721),
            (1.1, 1.050045, 0.0095523201),
        ],
    ),
    "max_grad_norm and clip_factor": (
        {"max_grad_norm": 1.0, "clip_factor": 0.7},
        [
            (1.0, 1.0485, 0.0097705721),
            (0.9039163, 1.0441625, 0.010067519),
            (0.74204803, 1.0350991, 0.012341859),
            (0.99999905, 1.0370461, 0.012090499),
        ],
    ),
}


@pytest.mark.parametrize("name", TRACES)
def test_it_follows_the_official_trace(backend, name):
    settings, trace = TRACES[name]
    norms = WARM_UP + THEN[: len(trace)]
    steps = run(backend, "zclip_", norms, warmup_steps=5, **settings)
    assert steps[4].state[MEAN_COLUMN].item() == pytest.approx(1.05, rel=1e-5)
    assert steps[4].state[VAR_COLUMN].item() == pytest.approx(0.01, rel=1e-5)
    for norm, step, (left, mean, var) in zip(norms[5:], steps[5:], trace, strict=True):
        assert norm * step.coefs[0] == pytest.approx(left, rel=1e-5)
        assert step.state[MEAN_COLUMN].item() == pytest.approx(mean, rel=1e-5)
        assert step.state[VAR_COLUMN].item() == pytest.approx(var, rel=1e-5)


MODES = {
    "adaptive": ({"option": "adaptive_scaling"}, {}),
    "mean": ({"option": "mean"}, {"clip_mode": ZCLIP_MODES["mean"]}),
    "percentile": ({"option": "percentile"}, {"clip_mode": ZCLIP_MODES["percentile"]}),
}
EXTRAS = {
    "plain": {},
    "factor": {"clip_factor": 0.7},
    "no-update": {"skip_update_on_spike": True},
    "max-norm": {"max_grad_norm": 1.0},
    "all": {"clip_factor": 0.9, "skip_update_on_spike": True, "max_grad_norm": 1.3, "alpha": 0.9},
}


@pytest.mark.parametrize(
    ("extra", "warmup_steps"),
    [("plain", 0), ("plain", 1), ("plain", 5), *((extra, 25) for extra in EXTRAS), ("all", 5)],
)
@pytest.mark.parametrize("mode", MODES)
def test_400_steps_follow_upstreams_algorithm(backend, mode, extra, warmup_steps):
    theirs, ours = MODES[mode]
    plain = PlainZClip(**theirs, **EXTRAS[extra], warmup_steps=warmup_steps)
    norms = noisy_norms(400, seed=warmup_steps)[: steps_for(backend, 400, 30)]
    steps = run(backend, "zclip_", norms, **ours, **EXTRAS[extra], warmup_steps=warmup_steps)
    clipped = 0
    for norm, step in zip(norms, steps, strict=True):
        coef = plain.step(norm)
        clipped += coef < 1
        assert step.coefs[0] == pytest.approx(coef, rel=1e-9)
        assert step.verdict[NORM].item() == pytest.approx(norm, rel=1e-6)
        assert step.verdict[CLIPPED_NORM].item() == pytest.approx(norm * coef, rel=1e-6)
        if plain.mean is not None:
            assert step.state[MEAN_COLUMN].item() == pytest.approx(plain.mean, rel=1e-9)
            assert step.state[VAR_COLUMN].item() == pytest.approx(plain.var, rel=1e-7, abs=1e-20)
    assert steps[-1].state[[STEPS, CLIP_COUNT, SKIP_COUNT]].tolist() == [len(norms), clipped, 0]


def test_the_buffer_holds_the_raw_norms_of_the_warm_up(backend):
    steps = run(backend, "zclip_", WARM_UP, warmup_steps=5, max_grad_norm=0.5)
    for i, step in enumerate(steps):
        assert step.state[SEEN_COLUMN] == i + 1
        buffer = step.state[BUFFER_COLUMN : BUFFER_COLUMN + i + 1]
        torch.testing.assert_close(buffer, torch.tensor(WARM_UP[: i + 1], dtype=torch.float64))
        assert step.coefs[0] == pytest.approx(0.5 / (WARM_UP[i] + 1e-6))


def test_no_warm_up_is_a_warm_up_of_one(backend):
    steps = [run(backend, "zclip_", [2.0, 3.0], warmup_steps=w) for w in (0, 1)]
    for none, one in zip(*steps, strict=True):
        assert none.coefs == one.coefs
        assert torch.equal(none.state, one.state)


def test_a_state_set_by_hand_is_used_at_once(backend):
    """Upstream's own test: mean 1, var 0.25, z_thresh 2, norm 3 clips to 1.5."""
    state = fresh_state("zclip_")
    state[MEAN_COLUMN], state[VAR_COLUMN], state[SEEN_COLUMN] = 1.0, 0.25, 25
    (step,) = run(backend, "zclip_", [3.0], state=state, z_thresh=2.0)
    assert 3.0 * step.coefs[0] == pytest.approx(1.5, rel=1e-5)


def test_the_verdict_says_what_the_step_was_judged_by(backend):
    steps = run(backend, "zclip_", [*WARM_UP, 1.3], warmup_steps=5)
    first, last = steps[0].verdict, steps[-1].verdict
    assert first[[Z, MEAN, STD]].tolist() == [0, 0, 0]
    assert first[THRESHOLD] == math.inf
    assert last[MEAN].item() == pytest.approx(1.05)
    assert last[STD].item() == pytest.approx(0.1)
    assert last[Z].item() == pytest.approx(2.5, rel=1e-4)
    assert last[THRESHOLD].item() == pytest.approx(1.3, rel=1e-5)


def test_the_threshold_is_never_above_max_grad_norm(backend):
    steps = run(backend, "zclip_", [*WARM_UP, 1.0], warmup_steps=5, max_grad_norm=1.1)
    assert [s.verdict[THRESHOLD].item() for s in steps] == pytest.approx([1.1] * 6)


def test_equal_norms_ratchet_as_upstream_does(backend):
    plain = PlainZClip(warmup_steps=5)
    norms = [1.0] * 5 + [1.5, 1.5, 1.0, 0.9, 1.5]
    for norm, step in zip(norms, run(backend, "zclip_", norms, warmup_steps=5), strict=True):
        assert step.coefs[0] == pytest.approx(plain.step(norm), rel=1e-9)


def test_no_gradients_count_as_a_norm_of_zero(backend):
    state = fresh_state("zclip_", warmup_steps=1)
    (step,) = run(backend, "zclip_", [()], state=state, warmup_steps=1)
    assert step.coefs == []
    assert state[SEEN_COLUMN] == 1
    assert state[MEAN_COLUMN] == 0


@pytest.mark.parametrize("skips_update", [False, True])
def test_a_spike_can_refuse_the_step(backend, skips_update):
    settings = {"warmup_steps": 5, "skip_update_on_spike": skips_update}
    norms = [*WARM_UP, 9.0, 1.0]
    refusing = run(backend, "zclip_", norms, skip_step_on_spike=True, **settings)
    clipping = run(backend, "zclip_", norms, **settings)
    spike = refusing[5]
    assert spike.coefs == [REFUSE]
    assert spike.verdict[[BLOCKED, FLAGS, CLIPPED_NORM]].tolist() == [1, SPIKE, 0]
    assert spike.state[[CLIP_COUNT, SKIP_COUNT]].tolist() == [0, 1]
    assert clipping[5].verdict[FLAGS] == SPIKE + CLIPPED
    assert torch.equal(refusing[-1].state[3:], clipping[-1].state[3:])
    assert refusing[-1].coefs == [1.0]


@pytest.mark.parametrize("at", [0, 2, 4, 7])
@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e200])
def test_a_bad_step_is_refused_and_leaves_no_trace(backend, bad, at):
    norms = WARM_UP + THEN
    clean = run(backend, "zclip_", norms, warmup_steps=5)
    norms = [*norms[:at], bad, *norms[at:]]
    steps = run(backend, "zclip_", norms, warmup_steps=5)
    assert steps[at].coefs == [REFUSE]
    assert steps[at].verdict[BLOCKED] == 1
    assert [s.coefs for s in steps[:at] + steps[at + 1 :]] == [s.coefs for s in clean]
    assert torch.equal(steps[-1].state[3:], clean[-1].state[3:])
    assert steps[-1].state[[STEPS, SKIP_COUNT]].tolist() == [len(norms), 1]
    if bad == 1e200:
        assert steps[at].verdict[FLAGS] == OVERFLOW


OFFICIAL = {"warmup_steps": 5, "on_nonfinite": ON_NONFINITE["official"]}


@pytest.mark.parametrize("max_grad_norm", [None, 1.0])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("at", [0, 4, 7])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_official_is_poisoned_as_upstream_is(backend, bad, at, mode, max_grad_norm):
    theirs, ours = MODES[mode]
    plain = PlainZClip(**theirs, warmup_steps=5, max_grad_norm=max_grad_norm)
    limit = {} if max_grad_norm is None else {"max_grad_norm": max_grad_norm}
    norms = WARM_UP + THEN
    norms = [*norms[:at], bad, *norms[at:]]
    for norm, step in zip(
        norms, run(backend, "zclip_", norms, **ours, **limit, **OFFICIAL), strict=True
    ):
        assert step.coefs[0] == pytest.approx(plain.step(norm), rel=1e-9, nan_ok=True)
        assert step.verdict[BLOCKED] == 0
    for column, value in ((MEAN_COLUMN, plain.mean), (VAR_COLUMN, plain.var)):
        assert step.state[column].item() == pytest.approx(value, rel=1e-9, nan_ok=True)
    if math.isnan(bad):
        assert math.isnan(step.state[MEAN_COLUMN])


def test_official_lets_an_infinite_norm_make_zeros_and_nan(backend):
    """After warm-up: the coefficient is 0, so finite elements vanish and the Inf becomes NaN."""
    state = run(backend, "zclip_", WARM_UP, warmup_steps=5)[-1].state
    (step,) = run(backend, "zclip_", [math.inf], state=state, **OFFICIAL)
    assert step.coefs == [0.0]
    grad = torch.tensor([1.0, math.inf])
    backend.scale_([grad], torch.tensor(step.coefs, dtype=torch.float64))
    assert grad[0] == 0
    assert grad[1].isnan()
    assert state[MEAN_COLUMN].item() == pytest.approx(1.05)


def test_every_tensor_gets_the_one_coefficient(backend):
    state = fresh_state("zclip_", warmup_steps=1)
    (step,) = run(backend, "zclip_", [(3.0, 4.0)], state=state, warmup_steps=1, max_grad_norm=1.0)
    assert step.coefs == pytest.approx([1 / (5 + 1e-6)] * 2)
