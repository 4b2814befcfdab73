"""agc_: every output unit against its own weights, rows as timm cuts them."""

import math

import pytest
import torch

from tests.grads import DTYPES, dtype_name, make_grads
from zclip.layout import (
    BLOCKED,
    CLIPPED,
    CLIPPED_NORM,
    FLAGS,
    HAS_INF,
    HAS_NAN,
    NORM,
    ON_NONFINITE,
    OVERFLOW,
    REFUSE,
    SUMSQ,
)

# Linear, bias, scalar, convolution, a row longer than a chunk, no rows, rows of nothing.
SHAPES = [(5, 7), (70,), (), (4, 3, 3, 3), (2, 16385), (0, 4), (3, 0)]
TOLERANCE = {  # one rounding of the result, and the row norms' own 1e-6
    torch.float32: 2e-6,
    torch.bfloat16: 2**-8,
    torch.float16: 2**-10,
    torch.float64: 2e-6,
}


def counters():
    return torch.zeros(3, dtype=torch.float64)


def plain_agc(grad, param, clip, eps):
    """The rule in float64, unit by unit."""
    grad, param = grad.double(), param.double()
    rows = grad.unbind() if grad.dim() > 1 else [grad]
    weights = param.unbind() if grad.dim() > 1 else [param]
    scaled, coefs = [], [1.0]
    for row, weight in zip(rows, weights, strict=True):
        limit = clip * max(weight.norm().item(), eps)
        norm = row.norm().item()
        coef = limit / max(norm, 1e-6) if norm > limit else 1.0
        scaled.append(row * coef)
        coefs.append(coef)
    return (torch.stack(scaled) if scaled else grad).reshape(grad.shape), min(coefs)


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
def test_each_row_is_bounded_by_its_weights(backend, dtype):
    params = make_grads(SHAPES, dtype, seed=1)
    grads = make_grads(SHAPES, dtype, seed=2, scale=0.02)
    grads[0][1] *= 100
    before = [g.clone() for g in grads]
    state = counters()
    norm, stats, coefs, verdict = backend.agc_(grads, params, state, 0.05, 1e-3, 0)
    total = 0.0
    for i, (grad, old, param) in enumerate(zip(grads, before, params, strict=True)):
        want, least = plain_agc(old, param, 0.05, 1e-3)
        tolerance = TOLERANCE[dtype]
        smallest = torch.finfo(dtype).smallest_normal
        torch.testing.assert_close(grad.double(), want, rtol=tolerance, atol=smallest)
        assert coefs[i].item() == pytest.approx(least, rel=1e-6)
        assert stats[i, SUMSQ].item() == pytest.approx(old.double().square().sum().item(), rel=1e-6)
        total += want.square().sum().item()
    raw = math.sqrt(sum(g.double().square().sum().item() for g in before))
    assert norm.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert norm.item() == pytest.approx(raw, rel=1e-6)
    assert verdict[NORM].item() == pytest.approx(raw, rel=1e-6)
    assert verdict[CLIPPED_NORM].item() == pytest.approx(math.sqrt(total), rel=1e-6)
    assert verdict[FLAGS] == CLIPPED
    assert state.tolist() == [1, 1, 0]


def test_small_rows_stay_bitwise_untouched(backend):
    params = make_grads([(8, 5)], seed=1)
    grads = make_grads([(8, 5)], seed=2, scale=1e-5)
    grads[0][3] *= 1e6
    before = grads[0].clone()
    backend.agc_(grads, params, counters(), 0.01, 1e-3, 0)
    kept = torch.arange(8) != 3
    assert torch.equal(grads[0][kept], before[kept])
    assert not torch.equal(grads[0][3], before[3])


def test_weights_near_zero_count_as_eps(backend):
    grads = [torch.ones(2, 3)]
    backend.agc_(grads, [torch.zeros(2, 3)], counters(), 0.01, 1e-3, 0)
    assert grads[0].norm(dim=1).tolist() == pytest.approx([1e-5] * 2, rel=1e-5)


@pytest.mark.parametrize("layout", ["transposed", "channels_last", "strided", "expanded-param"])
def test_any_strides_give_the_same_rows(backend, layout):
    grad, param = make_grads([(6, 4, 3, 5), (6, 4, 3, 5)], seed=3)
    views = {
        "transposed": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
        "channels_last": lambda x: x.contiguous(memory_format=torch.channels_last),
        "strided": lambda x: torch.stack([x, x], -1)[..., 0],
        "expanded-param": lambda x: x,
    }
    if layout == "expanded-param":
        param = param[:1].expand(6, 4, 3, 5)
    ours = views[layout](grad)
    backend.agc_([ours], [views[layout](param)], counters(), 0.3, 1e-3, 0)
    want, _ = plain_agc(grad, param, 0.3, 1e-3)
    torch.testing.assert_close(ours.double(), want, rtol=2e-6, atol=0)


@pytest.mark.parametrize("bad", [math.nan, -math.inf])
def test_a_bad_step_is_refused(backend, bad):
    params, grads = make_grads([(4, 4), (3,)], seed=1), make_grads([(4, 4), (3,)], seed=2)
    grads[0][2, 1] = bad
    state = counters()
    _, _, coefs, verdict = backend.agc_(grads, params, state, 0.01, 1e-3, 0)
    assert coefs.tolist() == [REFUSE, REFUSE]
    assert all((g == 0).all() for g in grads)
    assert verdict[[BLOCKED, FLAGS]].tolist() == [1, HAS_NAN if math.isnan(bad) else HAS_INF]
    assert state.tolist() == [1, 0, 1]


def test_an_overflow_is_refused(backend):
    grads, params = [torch.full((4, 4), 3e38)], [torch.ones(4, 4)]
    _, _, coefs, verdict = backend.agc_(grads, params, counters(), 0.01, 1e-3, 0)
    assert coefs.tolist() == [REFUSE]
    assert verdict[FLAGS] == OVERFLOW


def test_official_confines_the_damage_to_a_row_as_timm_does(backend):
    params, grads = make_grads([(3, 4)], seed=1), [torch.full((3, 4), 1e-4)]
    grads[0][0, 1], grads[0][1, 2] = math.nan, math.inf
    official = ON_NONFINITE["official"]
    _, _, coefs, verdict = backend.agc_(grads, params, counters(), 0.01, 1e-3, official)
    assert grads[0][0].isnan().all()
    assert grads[0][1].isnan().tolist() == [False, False, True, False]
    assert grads[0][1][0] == 0
    assert (grads[0][2] == 1e-4).all()
    assert coefs.isnan().all()
    assert verdict[BLOCKED] == 0


def test_bad_weights_leave_the_gradient_finite(backend):
    params, grads = make_grads([(3, 4)], seed=1), make_grads([(3, 4)], seed=2)
    params[0][1, 1] = math.nan
    backend.agc_(grads, params, counters(), 0.01, 1e-3, 0)
    assert grads[0].isfinite().all()


def test_parameters_that_require_grad_are_read_only(backend):
    params = [torch.randn(3, 4, requires_grad=True)]
    before = params[0].detach().clone()
    with torch.no_grad():
        backend.agc_([torch.randn(3, 4)], params, counters(), 0.01, 1e-3, 0)
    assert torch.equal(params[0], before)
