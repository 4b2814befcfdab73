"""Measuring and deciding in one call is clipping in one call, without the scaling."""

import pytest
import torch

from tests.grads import make_grads
from zclip import layout
from zclip.reference import IDS

CASES = {
    "global_norm": (3, [0.5, layout.SKIP]),
    "zclip": (8, [0.97, 2.5, 1.0, 1e-6, 2, 0, 1.0, 0, 0, 0]),
    "adagc": (6, [1.04, 0.99, 1.0, 1e-6, 2, 0, 0]),
    "auto_clip": (14, [10.0, 10, 0]),
}


@pytest.mark.parametrize("bad", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_it_decides_as_clip_by_does_and_only_reads(backend, name, bad):
    size, settings = CASES[name]
    read, written = (make_grads([(3, 4), (70,), (0,)]) for _ in range(2))
    if bad:
        read[1][3] = written[1][3] = float("nan")
    before = [g.clone() for g in read]
    states = [torch.zeros(size, dtype=torch.float64) for _ in range(2)]
    decided = backend.decide_by_(read, states[0], IDS[name], settings)
    clipped = backend.clip_by_(written, states[1], IDS[name], settings)
    for ours, theirs in zip(decided, clipped, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(states[0], states[1])
    for grad, old in zip(read, before, strict=True):
        torch.testing.assert_close(grad, old, rtol=0, atol=0, equal_nan=True)
