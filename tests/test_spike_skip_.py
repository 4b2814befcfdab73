"""spike_skip_: what stands out is refused, and nothing refused is remembered."""

import math

import pytest
import torch

from tests.backends import steps_for
from tests.rule_runs import DEFAULTS, fresh_state, noisy_norms, run, stats_of
from tests.upstream import PlainSpikeSkip
from zclip.layout import (
    BLOCKED,
    CLIP_COUNT,
    CLIPPED_NORM,
    FLAGS,
    HAS_NAN,
    LOSS,
    LOSS_NAN,
    LOSS_SPIKE,
    LOSSES_SEEN_COLUMN,
    MEAN,
    NORMS_SEEN_COLUMN,
    ON_NONFINITE,
    REFUSE,
    SKIP_COUNT,
    SPIKE,
    STD,
    STEPS,
    THRESHOLD,
    WINDOW_COLUMN,
    Z,
)

CALM = [1.0, 1.1, 0.9, 1.05, 0.95, 1.0]


@pytest.mark.parametrize("with_loss", [False, True])
@pytest.mark.parametrize(("window", "min_count"), [(1, 1), (2, 2), (7, 3), (128, 64)])
def test_400_steps_follow_a_plain_restatement(backend, window, min_count, with_loss):
    plain = PlainSpikeSkip(window, 3.0, min_count)
    norms = noisy_norms(400)[: steps_for(backend, 400, 30)]
    losses = noisy_norms(400, seed=1) if with_loss else None
    settings = {"window": window, "sigma": 3.0, "min_count": min_count}
    steps = run(backend, "spike_skip_", norms, losses, **settings)
    wanted = [plain.step(n, losses[i] if losses else None) for i, n in enumerate(norms)]
    assert [step.coefs[0] for step in steps] == wanted
    assert len(norms) < 400 or window < 3 or -1.0 in wanted
    assert steps[-1].state[[STEPS, CLIP_COUNT]].tolist() == [len(norms), 0]
    assert steps[-1].state[SKIP_COUNT] == wanted.count(-1.0)
    held = steps[-1].state[WINDOW_COLUMN : WINDOW_COLUMN + len(plain.norms)]
    assert sorted(held.tolist()) == pytest.approx(sorted(plain.norms))


def test_a_spike_of_the_norm_is_refused_and_forgotten(backend):
    steps = run(backend, "spike_skip_", [*CALM, 9.0, 1.0])
    spike, after = steps[6], steps[7]
    assert spike.coefs == [REFUSE]
    assert spike.verdict[[BLOCKED, FLAGS, CLIPPED_NORM]].tolist() == [1, SPIKE, 0]
    values = torch.tensor(CALM, dtype=torch.float64)
    std, mean = torch.std_mean(values)  # the unbiased one, as in OLMo-core
    assert spike.verdict[MEAN].item() == pytest.approx(mean.item())
    assert spike.verdict[STD].item() == pytest.approx(std.item())
    assert spike.verdict[Z].item() == pytest.approx(((9 - mean) / std).item())
    assert spike.verdict[THRESHOLD].item() == pytest.approx((mean + 6 * std).item())
    assert torch.equal(spike.state[3:], steps[5].state[3:])
    assert after.coefs == [1.0]


def test_a_spike_of_the_loss_is_refused_too(backend):
    steps = run(backend, "spike_skip_", [1.0] * 8, losses=[*CALM, 9.0, 1.0])
    assert [s.coefs[0] for s in steps] == [1.0] * 6 + [REFUSE, 1.0]
    assert steps[6].verdict[FLAGS] == LOSS_SPIKE
    assert steps[6].verdict[LOSS] == 9.0


def test_a_fall_is_no_spike(backend):
    steps = run(backend, "spike_skip_", [*CALM, 1e-9], losses=[*CALM, -100.0])
    assert steps[-1].coefs == [1.0]


def test_a_window_of_equal_values_forgives_rounding(backend):
    steps = run(backend, "spike_skip_", [1.0] * 10 + [1.0 + 1e-7, 1.1])
    assert [s.coefs[0] for s in steps[-2:]] == [1.0, REFUSE]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("shape", [(), (1,)])
def test_the_loss_may_have_any_float_dtype(backend, dtype, shape):
    state, settings = fresh_state("spike_skip_"), DEFAULTS["spike_skip_"].values()
    loss = torch.full(shape, 2.5, dtype=dtype)
    _, verdict = backend.spike_skip_(state, stats_of(1.0), loss, *settings)
    assert verdict[LOSS] == 2.5


def test_a_loss_that_comes_later_has_its_own_window(backend):
    state = run(backend, "spike_skip_", CALM)[-1].state
    (step,) = run(backend, "spike_skip_", [1.0], losses=[50.0], state=state)
    assert step.coefs == [1.0]
    assert step.state[[NORMS_SEEN_COLUMN, LOSSES_SEEN_COLUMN]].tolist() == [7, 1]


@pytest.mark.parametrize("at", [0, 3, 6])
@pytest.mark.parametrize(
    ("where", "bad"),
    [*(("norm", x) for x in (math.nan, math.inf, 1e200)), ("loss", math.nan), ("loss", -math.inf)],
)
def test_a_bad_step_is_refused_and_leaves_no_trace(backend, where, bad, at):
    norms, losses = noisy_norms(12, spikes=False), noisy_norms(12, seed=1, spikes=False)
    clean = run(backend, "spike_skip_", norms, losses, min_count=4)
    norms = [*norms[:at], bad if where == "norm" else 1.0, *norms[at:]]
    losses = [*losses[:at], bad if where == "loss" else 1.0, *losses[at:]]
    steps = run(backend, "spike_skip_", norms, losses, min_count=4)
    assert steps[at].coefs == [REFUSE]
    assert steps[at].verdict[BLOCKED] == 1
    assert [s.coefs for s in steps[:at] + steps[at + 1 :]] == [s.coefs for s in clean]
    assert torch.equal(steps[-1].state[3:], clean[-1].state[3:])
    assert steps[-1].state[[STEPS, SKIP_COUNT]].tolist() == [13, 1]
    if where == "loss":
        assert steps[at].verdict[FLAGS] == LOSS_NAN


def test_official_lets_everything_into_the_window(backend):
    """OLMo-core: a NaN passes while the window is short, and later refuses all until it leaves."""
    norms = [1.0, math.nan, 1.1, 0.9, 1.0, 1.1, 0.9, 1.0]
    settings = {"window": 4, "min_count": 3, "on_nonfinite": ON_NONFINITE["official"]}
    steps = run(backend, "spike_skip_", norms, **settings)
    assert [s.coefs[0] for s in steps] == [1, 1, 1, -1, -1, -1, 1, 1]
    assert steps[1].verdict[FLAGS] == HAS_NAN
    assert steps[-1].state[NORMS_SEEN_COLUMN] == 8
