"""adagc_ against the published trace, a plain restatement, and upstream's defects."""

import math

import pytest
import torch

from tests.backends import steps_for
from tests.rule_runs import noisy_norms, run
from tests.upstream import PlainAdaGC
from zclip.layout import (
    ADAGC_SEEDS,
    BLOCKED,
    CLIP_COUNT,
    CLIPPED_NORM,
    FLAGS,
    GAMMA_COLUMN,
    MEAN,
    NORM,
    ON_NONFINITE,
    OVERFLOW,
    REFUSE,
    SKIP_COUNT,
    STEPS,
    THRESHOLD,
)

# Norms of two tensors, what is left of them, and their gammas. Three steps are warm-up.
TRACE = [
    ((2.0, 1.0), (0.8944268, 0.4472134), (0.89442676, 0.44721338)),
    ((0.5, 0.25), (0.5, 0.25), (0.5, 0.25)),
    ((0.6, 0.3), (0.6, 0.3), (0.5, 0.25)),
    ((0.5, 0.3), (0.5, 0.2599991), (0.5, 0.25010002)),
    ((5.0, 0.2), (0.5199999, 0.2), (0.50020003, 0.24959902)),
    ((0.52, 0.21), (0.52, 0.21), (0.50039804, 0.24920304)),
]


def gammas(step):
    return step.state[GAMMA_COLUMN:].tolist()


def test_it_follows_the_official_trace(backend):
    steps = run(backend, "adagc_", [norms for norms, _, _ in TRACE], warmup_steps=3)
    for step, (norms, left, gamma) in zip(steps, TRACE, strict=True):
        assert [n * c for n, c in zip(norms, step.coefs, strict=True)] == pytest.approx(
            left, rel=1e-5
        )
        assert gammas(step) == pytest.approx(gamma, rel=1e-5)
        assert step.verdict[NORM].item() == pytest.approx(math.hypot(*norms), rel=1e-6)
        assert step.verdict[CLIPPED_NORM].item() == pytest.approx(math.hypot(*left), rel=1e-5)
    assert steps[0].verdict[THRESHOLD] == 1.0
    assert steps[4].verdict[MEAN].item() == pytest.approx(0.5)
    assert steps[4].verdict[THRESHOLD].item() == pytest.approx(0.52)
    assert steps[-1].state[[STEPS, CLIP_COUNT, SKIP_COUNT]].tolist() == [6, 3, 0]


@pytest.mark.parametrize("warmup_steps", [0, 1, 100])
@pytest.mark.parametrize("seed", ADAGC_SEEDS)
def test_400_steps_follow_a_plain_restatement(backend, seed, warmup_steps):
    plain = PlainAdaGC(seed=seed, warmup_steps=warmup_steps)
    history = list(zip(*(noisy_norms(400, seed=i) for i in range(3)), strict=True))
    history = history[: steps_for(backend, 400, 30)]
    settings = {"seed": ADAGC_SEEDS[seed], "warmup_steps": warmup_steps}
    for norms, step in zip(history, run(backend, "adagc_", history, **settings), strict=True):
        assert step.coefs == pytest.approx(plain.step(norms), rel=1e-9)
        assert gammas(step) == pytest.approx([plain.gamma[i] for i in range(3)], rel=1e-9)


@pytest.mark.parametrize("seed", ADAGC_SEEDS)
@pytest.mark.parametrize("at", [0, 1, 4])
def test_a_zero_norm_freezes_nothing(backend, at, seed):
    """An idle expert: upstream's gamma would become 0 and its tensor never train again."""
    norms = [0.5, 0.6, 0.5, 0.55, 0.5, 0.6]
    with_zero = [*norms[:at], 0.0, *norms[at:]]
    settings = {"warmup_steps": 3, "seed": ADAGC_SEEDS[seed]}
    history = [(norm, 0.7) for norm in with_zero]
    steps = run(backend, "adagc_", history, **settings)
    assert steps[at].coefs[0] == 1.0
    before = gammas(steps[at - 1])[0] if at else 0.0
    assert gammas(steps[at])[0] == before
    plain = PlainAdaGC(warmup_steps=3, seed=seed)
    for norms, step in zip(history, steps, strict=True):
        assert step.coefs == pytest.approx(plain.step(norms), rel=1e-9)
    assert 0.4 < gammas(steps[-1])[0] < 0.7
    assert steps[-1].coefs[0] > 0.8


def test_a_late_tensor_starts_at_its_first_norm(backend):
    history = [(0.5, 0.0)] * 5 + [(0.5, 3.0), (0.5, 30.0)]
    steps = run(backend, "adagc_", history, warmup_steps=3)
    assert gammas(steps[4])[1] == 0.0
    assert steps[5].coefs == [1.0, 1.0]
    assert gammas(steps[5])[1] == pytest.approx(3.0)
    assert steps[6].coefs[1] == pytest.approx(1.04 * 3.0 / 30.0, rel=1e-5)


def test_an_absent_tensor_changes_nothing_for_itself(backend):
    idle = [(0.5, 0.0)] * steps_for(backend, 20)
    steps = run(backend, "adagc_", [(0.5, 0.5)] * 4 + idle, warmup_steps=3)
    assert gammas(steps[-1])[1] == gammas(steps[3])[1]
    assert steps[-1].coefs[1] == 1.0


@pytest.mark.parametrize("at", [0, 2, 3, 7])
@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e200])
def test_a_bad_step_is_refused_and_leaves_no_trace(backend, bad, at):
    history = list(zip(noisy_norms(12, seed=1), noisy_norms(12, seed=2), strict=True))
    clean = run(backend, "adagc_", history, warmup_steps=3)
    history = [*history[:at], (1.0, bad), *history[at:]]
    steps = run(backend, "adagc_", history, warmup_steps=3)
    assert steps[at].coefs == [REFUSE, REFUSE]
    assert steps[at].verdict[BLOCKED] == 1
    assert [s.coefs for s in steps[:at] + steps[at + 1 :]] == [s.coefs for s in clean]
    assert gammas(steps[-1]) == gammas(clean[-1])
    assert steps[-1].state[[STEPS, SKIP_COUNT]].tolist() == [13, 1]
    if bad == 1e200:
        assert steps[at].verdict[FLAGS] == OVERFLOW


OFFICIAL = {"warmup_steps": 3, "on_nonfinite": ON_NONFINITE["official"]}


@pytest.mark.parametrize("at", [0, 1, 5])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_official_is_poisoned_as_upstream_is(backend, bad, at):
    history = list(zip(noisy_norms(8, seed=1), noisy_norms(8, seed=2), strict=True))
    history = [*history[:at], (bad, 0.5), *history[at:]]
    plain = PlainAdaGC(warmup_steps=3)
    for norms, step in zip(history, run(backend, "adagc_", history, **OFFICIAL), strict=True):
        assert step.coefs == pytest.approx(plain.step(norms), rel=1e-9, nan_ok=True)
        want = [plain.gamma.get(i, 0.0) for i in range(2)]
        assert gammas(step) == pytest.approx(want, rel=1e-9, nan_ok=True)
        assert step.verdict[BLOCKED] == 0
    if math.isnan(bad) and at != 1:  # in warm-up only an unset gamma takes a NaN
        assert math.isnan(gammas(step)[0])
        assert step.coefs[0] == 1.0 or at == 0


def test_a_coefficient_for_each_tensor(backend):
    steps = run(backend, "adagc_", [(1.0, 1.0, 1.0)] * 2 + [(1.0, 2.0, 4.0)], warmup_steps=0)
    assert steps[-1].coefs == pytest.approx([1.0, 0.52, 0.26], rel=1e-5)
    assert torch.isfinite(steps[-1].verdict).all()
