"""auto_clip_: the percentile is numpy's, and history is a ring."""

import math

import numpy as np
import pytest
import torch

from tests.backends import steps_for
from tests.rule_runs import noisy_norms, run
from tests.upstream import torch_clip_coef
from zclip.layout import (
    BLOCKED,
    CLIP_COUNT,
    HISTORY_SEEN_COLUMN,
    ON_NONFINITE,
    REFUSE,
    SKIP_COUNT,
    STEPS,
    THRESHOLD,
)


@pytest.mark.parametrize("history", [1, 2, 50, 400])
@pytest.mark.parametrize("percentile", [0.0, 10.0, 37.5, 50.0, 100.0])
def test_it_clips_to_numpys_percentile(backend, percentile, history):
    norms = noisy_norms(120)[: steps_for(backend, 120, 12)]
    steps = run(backend, "auto_clip_", norms, percentile=percentile, history=history)
    for i, step in enumerate(steps):
        threshold = np.percentile(norms[max(0, i + 1 - history) : i + 1], percentile)
        assert step.coefs[0] == pytest.approx(torch_clip_coef(norms[i], threshold), rel=1e-12)
        assert step.verdict[THRESHOLD].item() == pytest.approx(threshold, rel=1e-6)
    clipped = sum(s.coefs[0] < 1 for s in steps)
    assert steps[-1].state[[STEPS, CLIP_COUNT, SKIP_COUNT]].tolist() == [len(norms), clipped, 0]


@pytest.mark.parametrize("values", [[0.0], [0.0, 0.0, 1.0], [1.0] * 5, [5e-324, 1e-300, 1e30]])
def test_ties_zeros_and_extremes(backend, values):
    steps = run(backend, "auto_clip_", values, percentile=60.0)
    got = steps[-1].verdict[THRESHOLD].item()
    assert got == pytest.approx(np.float32(np.percentile(values, 60.0)).item(), rel=1e-6)


@pytest.mark.parametrize("at", [0, 4])
@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e200])
def test_a_bad_step_is_refused_and_leaves_no_trace(backend, bad, at):
    norms = noisy_norms(10)[: steps_for(backend, 10, 8)]
    clean = run(backend, "auto_clip_", norms, history=6)
    steps = run(backend, "auto_clip_", [*norms[:at], bad, *norms[at:]], history=6)
    assert steps[at].coefs == [REFUSE]
    assert steps[at].verdict[BLOCKED] == 1
    assert torch.equal(steps[-1].state[3:], clean[-1].state[3:])
    assert [s.coefs for s in steps[:at] + steps[at + 1 :]] == [s.coefs for s in clean]


def test_official_is_poisoned_for_as_long_as_it_remembers(backend):
    norms = [1.0, math.nan, 1.0, 2.0, 1.0, 1.5, 1.0]
    official = {"on_nonfinite": ON_NONFINITE["official"]}
    steps = run(backend, "auto_clip_", norms, history=4, **official)
    assert [math.isnan(s.coefs[0]) for s in steps] == [False] + [True] * 4 + [False] * 2
    assert steps[-1].state[HISTORY_SEEN_COLUMN] == 7


def test_official_remembers_an_infinite_norm(backend):
    official = {"on_nonfinite": ON_NONFINITE["official"], "percentile": 50.0}
    steps = run(backend, "auto_clip_", [1.0, math.inf, 3.0, 2.0], **official)
    assert steps[1].verdict[THRESHOLD] == math.inf
    assert steps[3].verdict[THRESHOLD].item() == pytest.approx(2.5)


def test_between_two_infinities_the_percentile_is_infinite(backend):
    official = {"on_nonfinite": ON_NONFINITE["official"], "percentile": 75.0}
    steps = run(backend, "auto_clip_", [math.inf, math.inf, 1.0], **official)
    assert [s.verdict[THRESHOLD].item() for s in steps] == [math.inf] * 3
