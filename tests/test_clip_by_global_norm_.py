"""clip_by_global_norm_ is grad_stats, global_norm_ and scale_ in one call, and nothing else."""

import math
import mmap
import subprocess
import sys

import pytest
import torch

from tests.grads import DTYPES, dtype_name, make_grads
from zclip import layout


def three_calls(backend, grads, state, max_norm, nonfinite):
    stats = backend.grad_stats(grads)
    coefs, verdict = backend.global_norm_(state, stats, max_norm, nonfinite)
    if nonfinite == layout.ZERO:
        backend.zero_nonfinite_(grads, stats)
    backend.scale_(grads, coefs)
    return stats, coefs, verdict


@pytest.mark.parametrize("nonfinite", layout.NONFINITE.values(), ids=layout.NONFINITE)
@pytest.mark.parametrize("bad", [None, math.nan, math.inf], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
def test_one_call_equals_three(backend, dtype, bad, nonfinite):
    grads = make_grads([(20_000,), (3, 4), (0,)], dtype)
    if bad is not None:
        grads[0][17_000] = bad
    apart = [g.clone() for g in grads]
    states = torch.zeros(2, 3, dtype=torch.float64).unbind()

    norm, *together = backend.clip_by_global_norm_(grads, states[0], 1.0, nonfinite)

    wanted = three_calls(backend, apart, states[1], 1.0, nonfinite)
    for got, want in zip([*together, *grads], [*wanted, *apart], strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(*states)
    assert norm.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(norm.float(), together[2][layout.NORM], equal_nan=True)


PROTECTED = """
import ctypes, mmap, sys, torch, zclip
page = mmap.mmap(-1, 1 << 20)
grad = torch.frombuffer(page, dtype=torch.float32)
grad.fill_(0.5)
address = ctypes.c_void_p(grad.data_ptr())
assert ctypes.CDLL(None).mprotect(address, len(page), {protection}) == 0
{action}
"""
CLIP = "torch.ops.zclip.clip_by_([grad], torch.zeros(3, dtype=torch.float64), 0, ({}, 0))"
SCALE = "torch.ops.zclip.scale_([grad], torch.tensor([{}], dtype=torch.float64))"


@pytest.mark.parametrize(
    ("protection", "action", "survives"),
    [
        (mmap.PROT_READ, CLIP.format(1e9), True),
        (mmap.PROT_READ, CLIP.format(1.0), False),
        (0, SCALE.format(1.0), True),
        (0, SCALE.format(0.5), False),
    ],
    ids=["unclipped: not written", "clipped: written", "coef 1: not read", "coef 0.5: read"],
)
def test_what_needs_no_change_is_not_touched(protection, action, survives):
    """Memory that may not be written, or not even read, kills the process that tries."""
    source = PROTECTED.format(protection=protection, action=action)
    done = subprocess.run([sys.executable, "-c", source], check=False, capture_output=True)
    assert (done.returncode == 0) == survives, done.stderr
