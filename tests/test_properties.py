"""Random shapes, dtypes, strides and special values against float64."""

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import zclip
from tests.grads import DTYPES
from zclip.layout import INF, NAN, SUMSQ

special = st.sampled_from([0.0, -0.0, math.nan, math.inf, -math.inf, 1e-45, 1e-38, 3e38, 65504.0])
shapes = st.lists(st.integers(0, 9), min_size=0, max_size=4).map(tuple)


@st.composite
def tensors(draw):
    """A tensor with any shape, dtype, magnitude and stride, sprinkled with special values."""
    dtype = draw(st.sampled_from(DTYPES))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    shape = draw(shapes)
    large = draw(st.booleans()) and len(shape) > 0
    if large:
        shape = (draw(st.integers(1, 3)) * 8192 + draw(st.integers(-2, 2)), *shape[1:2])
    scale = 10.0 ** draw(st.integers(-30, 30))
    tensor = (torch.randn(shape, generator=generator, dtype=torch.float64) * scale).to(dtype)
    for value in draw(st.lists(special, max_size=4)):
        if tensor.numel():
            where = int(torch.randint(tensor.numel(), (), generator=generator))
            tensor.view(-1)[where] = value
    return draw(st.sampled_from(VIEWS))(tensor)


VIEWS = [
    lambda t: t,
    lambda t: t.permute(tuple(reversed(range(t.dim())))),
    lambda t: t[::2] if t.dim() else t,
    lambda t: t[..., 1:] if t.dim() else t,
    lambda t: t.unsqueeze(0).transpose(0, -1),
]


def truth(tensor):
    x = tensor.double()
    finite = x[x.isfinite()]
    return finite.square().sum().item(), x.isnan().sum().item(), x.isinf().sum().item()


@settings(max_examples=120, deadline=None)
@given(st.lists(tensors(), min_size=1, max_size=5))
def test_stats_are_exact(grads):
    for row, grad in zip(zclip.grad_stats(grads).tolist(), grads, strict=True):
        sumsq, nan, inf = truth(grad)
        assert (row[NAN], row[INF]) == (nan, inf)
        assert math.isclose(row[SUMSQ], sumsq, rel_tol=1e-6)


@settings(max_examples=120, deadline=None)
@given(
    st.lists(tensors(), min_size=1, max_size=5),
    st.sampled_from(["propagate", "skip", "zero"]),
    st.sampled_from([0.0, 1e-3, 1.0, 1e9, math.inf]),
)
def test_clipping_leaves_at_most_the_limit(grads, nonfinite, max_norm):
    params = []
    for grad in grads:
        params.append(torch.nn.Parameter(torch.zeros_like(grad)))
        params[-1].grad = grad
    before = [g.clone() for g in grads]
    sums, nans, infs = zip(*map(truth, grads), strict=True)
    exact = math.sqrt(sum(sums))

    norm = zclip.clip_grad_norm_(params, max_norm, nonfinite=nonfinite).item()

    bad = sum(nans) + sum(infs) > 0
    if nonfinite == "zero":
        before = [b.nan_to_num(0.0, 0.0, 0.0) for b in before]
        bad = False
    if bad:
        assert not math.isfinite(norm)
        if nonfinite == "skip":
            assert not any(g.any() for g in grads)
        return
    if exact <= torch.finfo(torch.float32).max:
        assert math.isclose(norm, exact, rel_tol=1e-6, abs_tol=1e-45)
    elif nonfinite == "skip":
        assert not any(g.any() for g in grads)
        return
    if max_norm >= exact + 1e-5 * exact + 1e-6:
        assert all(torch.equal(g, b) for g, b in zip(grads, before, strict=True))
        return
    coef = min(1.0, max_norm / (exact + 1e-6))
    for grad, was in zip(grads, before, strict=True):
        limits = torch.finfo(grad.dtype)
        # The norm may be off by 1e-6; the product is rounded once, and may become subnormal.
        rtol = 1e-6 + 2 * limits.eps
        torch.testing.assert_close(
            grad.double(), was.double() * coef, rtol=rtol, atol=limits.smallest_normal
        )
