"""global_norm_: from stats to one coefficient, a verdict and counters."""

import math

import pytest
import torch

from zclip import layout
from zclip.layout import ERROR, PROPAGATE, SKIP, ZERO

HEALTHY = [[9.0, 0, 0], [16.0, 0, 0]]  # norms 3 and 4, together 5
WITH_NAN = [[9.0, 0, 0], [16.0, 2, 0]]
WITH_INF = [[9.0, 0, 1], [16.0, 0, 0]]
WITH_BOTH = [[9.0, 0, 1], [16.0, 1, 0]]
OVERFLOWING = [[1e78, 0, 0], [1e78, 0, 0]]
INFINITE_SUM = [[math.inf, 0, 0], [1.0, 0, 0]]  # float64 gradients beyond 1e154


def run(backend, rows, max_norm=1.0, nonfinite=PROPAGATE, state=None):
    state = torch.zeros(3, dtype=torch.float64) if state is None else state
    stats = torch.tensor(rows, dtype=torch.float64).reshape(-1, 3)
    coefs, verdict = backend.global_norm_(state, stats, max_norm, nonfinite)
    assert coefs.dtype == torch.float64
    assert coefs.shape == (len(rows),)
    assert (verdict.dtype, verdict.shape) == (torch.float32, (layout.NUM_VERDICT,))
    return coefs, verdict.tolist(), state.tolist()


def test_a_norm_above_the_limit_is_clipped(backend):
    coefs, verdict, state = run(backend, HEALTHY)
    assert coefs.tolist() == [1 / (5 + 1e-6)] * 2
    assert verdict[layout.NORM] == 5
    assert verdict[layout.CLIPPED_NORM] == pytest.approx(1, rel=1e-6)
    assert verdict[layout.FLAGS] == layout.CLIPPED
    assert verdict[layout.THRESHOLD] == 1
    assert verdict[layout.WORST] == 1
    assert state == [1, 1, 0]


@pytest.mark.parametrize("max_norm", [5.1, 1e30, math.inf])
def test_a_norm_below_the_limit_gets_exactly_one(backend, max_norm):
    coefs, verdict, state = run(backend, HEALTHY, max_norm)
    assert coefs.tolist() == [1.0, 1.0]
    assert (verdict[layout.FLAGS], verdict[layout.BLOCKED]) == (0, 0)
    assert state == [1, 0, 0]


@pytest.mark.parametrize(
    ("rows", "nonfinite", "coef", "norm", "blocked"),
    [
        (WITH_NAN, PROPAGATE, math.nan, math.nan, 0),
        (WITH_INF, PROPAGATE, 0.0, math.inf, 0),
        (WITH_BOTH, PROPAGATE, math.nan, math.nan, 0),
        (OVERFLOWING, PROPAGATE, 1 / math.sqrt(2e78), math.inf, 0),
        (INFINITE_SUM, PROPAGATE, 0.0, math.inf, 0),
        (WITH_NAN, SKIP, layout.REFUSE, math.nan, 1),
        (WITH_INF, SKIP, layout.REFUSE, math.inf, 1),
        (OVERFLOWING, SKIP, layout.REFUSE, math.inf, 1),
        (INFINITE_SUM, SKIP, layout.REFUSE, math.inf, 1),
        (WITH_NAN, ZERO, 1 / (5 + 1e-6), 5, 0),
        (WITH_INF, ZERO, 1 / (5 + 1e-6), 5, 0),
        (OVERFLOWING, ZERO, 1 / math.sqrt(2e78), math.inf, 0),
        (WITH_NAN, ERROR, 1.0, math.nan, 1),
        (WITH_INF, ERROR, 1.0, math.inf, 1),
        (HEALTHY, SKIP, 1 / (5 + 1e-6), 5, 0),
        (HEALTHY, ERROR, 1 / (5 + 1e-6), 5, 0),
    ],
)
def test_what_each_mode_does(backend, rows, nonfinite, coef, norm, blocked):
    coefs, verdict, state = run(backend, rows, nonfinite=nonfinite)
    assert coefs.tolist() == pytest.approx([coef] * 2, rel=1e-12, nan_ok=True)
    assert verdict[layout.NORM] == pytest.approx(norm, nan_ok=True)
    assert verdict[layout.BLOCKED] == blocked
    assert state[layout.SKIP_COUNT] == blocked


@pytest.mark.parametrize(
    ("rows", "flags", "worst"),
    [
        (WITH_NAN, layout.HAS_NAN, 1),
        (WITH_INF, layout.HAS_INF, 0),
        (WITH_BOTH, layout.HAS_NAN | layout.HAS_INF, 0),
        (OVERFLOWING, layout.OVERFLOW, 0),
        (INFINITE_SUM, layout.OVERFLOW, 0),
    ],
)
def test_the_flags_say_what_was_wrong_and_where(backend, rows, flags, worst):
    _, verdict, _ = run(backend, rows, nonfinite=SKIP)
    assert (int(verdict[layout.FLAGS]), verdict[layout.WORST]) == (flags, worst)


def test_the_counters_go_on(backend):
    state = torch.zeros(3, dtype=torch.float64)
    for rows in (HEALTHY, WITH_NAN, HEALTHY, WITH_INF, [[0.25, 0, 0]]):
        _, verdict, _ = run(backend, rows, nonfinite=SKIP, state=state)
    assert state.tolist() == [5, 2, 2]
    assert [verdict[i] for i in (layout.STEP, layout.CLIPS, layout.SKIPS)] == [5, 2, 2]


def test_a_state_of_size_zero_counts_nothing(backend):
    _, verdict, state = run(backend, HEALTHY, state=torch.zeros(0, dtype=torch.float64))
    assert state == []
    assert [verdict[i] for i in (layout.STEP, layout.CLIPS, layout.SKIPS)] == [0, 0, 0]


def test_no_tensors_have_norm_zero_and_no_worst(backend):
    coefs, verdict, _ = run(backend, [])
    assert coefs.tolist() == []
    assert (verdict[layout.NORM], verdict[layout.WORST]) == (0, -1)
