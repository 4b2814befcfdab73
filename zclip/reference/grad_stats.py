"""What one reading of a list of tensors learns about them."""

import math

import torch
from torch import Tensor

from zclip.checks import check_one_device, check_tensors
from zclip.schemas import wide_dtype


def grad_stats(grads: list[Tensor]) -> Tensor:
    """Sum of squares of the finite elements, and how many are NaN and Inf, per tensor."""
    return power_stats(grads, 2.0)


def power_stats(grads: list[Tensor], p: float) -> Tensor:
    """As :func:`grad_stats` with ``|x|**p`` for the square; the largest ``|x|`` if p is inf."""
    check_tensors(grads)
    check_one_device(grads)
    rows = []
    for grad in grads:
        x = grad.detach().to(wide_dtype(grad.device))
        size = torch.where(x.isfinite(), x, 0).abs()
        power = size.pow(p).sum()
        if math.isinf(p):
            power = size.amax() if x.numel() else size.sum()
        rows.append(torch.stack([power, x.isnan().sum(), x.isinf().sum()]))
    return torch.stack(rows)


def read_probe(tensors: list[Tensor]) -> Tensor:
    """Read every element and do next to nothing with it: a yardstick for benchmarks."""
    return torch.stack([t.sum() for t in tensors])
