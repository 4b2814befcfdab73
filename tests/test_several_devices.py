"""Tensors on several devices in one call: split, served apart, put together again.

There is one device here, so it is given two names; the splitting is the same.
"""

import math

import pytest
import torch

import zclip
from tests.grads import make_grads
from tests.test_functional import exact_norm, parameters
from zclip import ops


@pytest.fixture
def two_devices(monkeypatch):
    """Odd tensors seem to live on another device, and no kernel takes both at once."""

    def alternating(tensors):
        names = (torch.device("cpu"), torch.device("cpu", 0))
        groups = {name: list(range(i, len(tensors), 2)) for i, name in enumerate(names)}
        return {name: members for name, members in groups.items() if members}

    monkeypatch.setattr(ops, "by_device", alternating)
    monkeypatch.setattr(ops, "serve", lambda op, tensors, *arguments, **keywords: None)


@pytest.mark.parametrize("nonfinite", ["propagate", "skip", "zero"])
@pytest.mark.parametrize("bad", [None, math.nan, math.inf])
@pytest.mark.parametrize("norm_type", [2.0, 1.0, math.inf])
def test_clipping_across_devices_is_clipping(request, norm_type, bad, nonfinite):
    together, apart = parameters(), parameters()
    for params in (together, apart):
        if bad is not None:
            params[1].grad[2] = bad
    norm = zclip.clip_grad_norm_(together, 0.5, norm_type, nonfinite=nonfinite)

    request.getfixturevalue("two_devices")
    split = zclip.clip_grad_norm_(apart, 0.5, norm_type, nonfinite=nonfinite)

    torch.testing.assert_close(split, norm, equal_nan=True)
    for a, b in zip(apart, together, strict=True):
        torch.testing.assert_close(a.grad, b.grad, equal_nan=True)


def test_rows_come_back_in_the_order_of_the_tensors(two_devices):
    grads = [torch.full((2,), float(i)) for i in range(7)]
    assert zclip.grad_stats(grads)[:, 0].tolist() == [2.0 * i * i for i in range(7)]


def test_each_tensor_gets_its_own_coefficient(two_devices):
    grads = make_grads([(3,)] * 5)
    want = [g * 0.1 * i for i, g in enumerate(grads, 1)]
    ops.scale_(grads, torch.arange(1, 6, dtype=torch.float64) * 0.1)
    for grad, scaled in zip(grads, want, strict=True):
        torch.testing.assert_close(grad, scaled)


def test_values_are_bounded_on_every_device(two_devices):
    params = parameters()
    zclip.clip_grad_value_(params, 0.1)
    assert max(p.grad.abs().max() for p in params) <= 0.1


def test_the_total_norm_spans_all_devices(two_devices):
    params = parameters()
    norm = zclip.get_total_norm([p.grad for p in params])
    assert norm.item() == pytest.approx(exact_norm(params), rel=1e-6)
