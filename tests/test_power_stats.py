"""power_stats: the norms other than the Euclidean one."""

import math

import pytest
import torch

from tests.grads import DTYPES, dtype_name, make_grads
from zclip.layout import INF, NAN, SUMSQ


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@pytest.mark.parametrize("p", [0.5, 1.0, 2.0, 3.0, 4.5, math.inf])
def test_powers_match_float64(backend, p, dtype):
    grads = make_grads([(20_000,), (5, 7), (1,), (0,)], dtype)
    stats = backend.power_stats(grads, p)
    for row, grad in zip(stats, grads, strict=True):
        size = grad.double().abs().flatten()
        power = size.pow(p).sum() if math.isfinite(p) else max(size.tolist(), default=0.0)
        assert row[SUMSQ].item() == pytest.approx(float(power), rel=1e-9)
    assert not stats[:, [NAN, INF]].any()


@pytest.mark.parametrize("p", [1.0, 3.0, math.inf])
def test_bad_elements_are_counted_and_left_out(backend, p):
    grad = torch.tensor([1.0, -2.0, math.nan, math.inf, -math.inf])
    row = backend.power_stats([grad], p)[0]
    assert row.tolist() == [2.0 if math.isinf(p) else 1 + 2**p, 1, 2]
