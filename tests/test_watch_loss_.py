"""watch_loss_: true alarms, no false ones, and statistics that nothing bad gets into."""

import math

import pytest
import torch

from tests.backends import steps_for
from zclip.layout import (
    BLOCKED,
    CLIP_COUNT,
    CLIPPED,
    FLAGS,
    LOSS,
    LOSS_MEAN_COLUMN,
    LOSS_NAN,
    LOSS_RATIO,
    LOSS_RISING,
    LOSS_SPIKE,
    LOSSES_ABSORBED_COLUMN,
    NORM,
    NUM_LOSS_STATE,
    NUM_VERDICT,
    SKIP_COUNT,
    STEPS,
)


def watch(backend, losses, factor=3.0, rising_steps=0, decay=0.99, warmup_steps=10, state=None):
    """Return the verdict after each loss, and the last state."""
    state = torch.zeros(NUM_LOSS_STATE, dtype=torch.float64) if state is None else state
    verdicts = []
    for loss in losses:
        verdict = torch.zeros(NUM_VERDICT)
        loss = torch.as_tensor(loss, dtype=torch.float64)
        backend.watch_loss_(state, loss, verdict, factor, rising_steps, decay, warmup_steps)
        verdicts.append(verdict)
    return verdicts, state


def flags(verdicts):
    return [int(v[FLAGS]) for v in verdicts]


def noise(count, mean, std, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (mean + std * torch.randn(count, generator=generator, dtype=torch.float64)).tolist()


def test_the_ratio_of_a_steady_loss_is_loss_over_mean(backend):
    verdicts, state = watch(backend, [2.0] * 20 + [3.0])
    assert verdicts[-1][LOSS] == 3.0
    assert verdicts[-1][LOSS_RATIO].item() == pytest.approx(1.5)
    assert verdicts[0][LOSS_RATIO] == 1.0
    assert state[LOSS_MEAN_COLUMN].item() == pytest.approx(2.0 + 1.0 / 21)


def test_a_spike_is_flagged_and_not_absorbed(backend):
    calm = noise(50, 2.0, 0.05)
    _, clean = watch(backend, calm)
    verdicts, state = watch(backend, [*calm, 6.5])
    assert flags(verdicts) == [0] * 50 + [LOSS_SPIKE]
    assert verdicts[-1][BLOCKED] == 0
    same = [LOSS_MEAN_COLUMN, LOSS_MEAN_COLUMN + 1, LOSSES_ABSORBED_COLUMN]
    assert torch.equal(state[same], clean[same])
    assert state[CLIP_COUNT] == 1
    assert watch(backend, [2.0], state=state)[0][0][FLAGS] == 0


def test_nothing_is_a_spike_in_warm_up(backend):
    assert flags(watch(backend, [1.0, 50.0, 1.0, 90.0], warmup_steps=10)[0]) == [0] * 4


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("mean", "std"), [(0.0, 1.0), (0.0, 1e-4), (-5.0, 1.0), (0.01, 0.1), (3.0, 0.3), (0.0, 0.0)]
)
def test_noise_around_any_mean_raises_no_alarm(backend, mean, std, seed):
    losses = noise(400, mean, std, seed)[: steps_for(backend, 400, 30)]
    verdicts, _ = watch(backend, losses, factor=2.0)
    assert not any(flags(verdicts))


@pytest.mark.parametrize(
    ("mean", "std", "spike"), [(0.0, 1.0, 30.0), (-5.0, 0.1, 6.0), (0.0, 1e-4, 0.01)]
)
def test_a_spike_is_seen_near_zero_and_below(backend, mean, std, spike):
    verdicts, _ = watch(backend, [*noise(100, mean, std), spike], factor=2.0)
    assert flags(verdicts) == [0] * 100 + [LOSS_SPIKE]


def test_a_falling_loss_raises_no_alarm(backend):
    losses = [10.0 * math.exp(-i / 30) + 0.5 for i in range(steps_for(backend, 200, 40))]
    assert not any(flags(watch(backend, losses, factor=2.0, rising_steps=5)[0]))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("at", [0, 5, 30])
def test_a_bad_loss_blocks_the_step_and_leaves_no_trace(backend, at, bad):
    calm = noise(40, 2.0, 0.1)
    clean_verdicts, clean = watch(backend, calm, rising_steps=3)
    verdicts, state = watch(backend, [*calm[:at], bad, *calm[at:]], rising_steps=3)
    assert verdicts[at][[BLOCKED, FLAGS]].tolist() == [1, LOSS_NAN]
    assert flags(verdicts[:at] + verdicts[at + 1 :]) == flags(clean_verdicts)
    assert torch.equal(state[3:], clean[3:])
    assert state[[STEPS, SKIP_COUNT]].tolist() == [41, 1]


def test_rising_counts_rises_in_a_row(backend):
    losses = [1.0, 1.1, 1.2, 1.15, 1.16, 1.17, 1.18, 1.19, 1.18]
    verdicts, _ = watch(backend, losses, rising_steps=3)
    assert flags(verdicts) == [0] * 6 + [LOSS_RISING] * 2 + [0]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_bad_loss_neither_counts_as_a_rise_nor_ends_one(backend, bad):
    verdicts, _ = watch(backend, [1.0, 1.1, bad, 1.2, 1.3], rising_steps=3)
    assert flags(verdicts) == [0, 0, LOSS_NAN, 0, LOSS_RISING]


def test_a_diverging_loss_is_rising_although_it_spikes(backend):
    losses = [1.0] * 20 + [2.0**i for i in range(1, 8)]
    verdicts, _ = watch(backend, losses, rising_steps=4)
    assert flags(verdicts)[-1] == LOSS_RISING | LOSS_SPIKE


def test_what_stands_in_the_verdict_stays(backend):
    verdict = torch.zeros(NUM_VERDICT)
    verdict[BLOCKED], verdict[FLAGS], verdict[NORM] = 1.0, CLIPPED + LOSS_NAN, 7.0
    state = torch.zeros(NUM_LOSS_STATE, dtype=torch.float64)
    backend.watch_loss_(state, torch.tensor(math.nan), verdict, 3.0, 0, 0.9, 0)
    assert verdict[[BLOCKED, FLAGS, NORM]].tolist() == [1, CLIPPED + LOSS_NAN, 7]
    backend.watch_loss_(state, torch.tensor(1.0), verdict, 3.0, 0, 0.9, 0)
    assert verdict[[BLOCKED, FLAGS]].tolist() == [1, CLIPPED + LOSS_NAN]


def test_no_loss_changes_nothing(backend):
    _, state = watch(backend, [1.0, 2.0])
    verdict, before = torch.zeros(NUM_VERDICT), state.clone()
    backend.watch_loss_(state, torch.empty(0), verdict, 3.0, 0, 0.9, 0)
    assert torch.equal(state, before)
    assert not verdict.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_the_loss_may_have_any_float_dtype(backend, dtype):
    verdict, state = torch.zeros(NUM_VERDICT), torch.zeros(NUM_LOSS_STATE, dtype=torch.float64)
    loss = torch.tensor([2.5], dtype=dtype, requires_grad=True)
    with torch.no_grad():
        backend.watch_loss_(state, loss, verdict, 3.0, 0, 0.9, 0)
    assert verdict[LOSS] == 2.5
