"""AGC (arXiv 2102.06171): bound the gradient of each output unit by the size of its weights."""

import torch
from torch import Tensor

from zclip.checks import check_one_device, check_tensors, check_writable
from zclip.layout import KEEP, REFUSE
from zclip.reference.grad_stats import grad_stats
from zclip.reference.report import health_of, report
from zclip.reference.scale import scaled
from zclip.schemas import norm_dtype, wide_dtype

SMALLEST_GRAD_NORM = 1e-6  # timm divides by no less


def agc_(
    grads: list[Tensor],
    params: list[Tensor],
    state: Tensor,
    clip: float,
    eps: float,
    on_nonfinite: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Scale each row to at most ``clip * max(norm of its weights, eps)``.

    Rows are timm's: all dimensions but the first are one unit; a tensor of one dimension or none
    is a single unit. Weights that are NaN or Inf count as 0 in the norm of their row.

    Returns:
        The norm of all gradients, their stats, the smallest row coefficient of each tensor (to
        look at: the gradients are scaled already) and the verdict.
    """
    check_tensors(grads)
    check_tensors(params, "params[{}]".format)
    check_one_device([*grads, *params])
    check_writable(grads)
    stats = grad_stats(grads)
    health = health_of(stats)
    refused = health.refused(on_nonfinite)
    least, squares = [], []
    for grad, param in zip(grads, params, strict=True):
        rows = _rows(grad)
        weights = _rows(param)
        norms = rows.square().sum(1).sqrt()
        finite = torch.where(weights.isfinite(), weights, 0.0)
        limit = clip * finite.square().sum(1).sqrt().clamp(min=eps)
        wanted = limit / norms.clamp(min=SMALLEST_GRAD_NORM)
        coefs = torch.where(norms <= limit, KEEP, wanted)
        coefs = torch.where(refused, REFUSE, coefs)
        squares.append((norms * coefs).square().sum())
        least.append(coefs.amin() if coefs.numel() else torch.full_like(health.norm, KEEP))
        shape = (-1, *[1] * (grad.dim() - 1)) if grad.dim() > 1 else ()
        if grad.numel():
            grad.copy_(scaled(grad, coefs.reshape(shape)))
    coefs = torch.stack(least)
    coefs = torch.where(refused, REFUSE, coefs)
    verdict = report(
        state,
        stats,
        health,
        blocked=refused,
        clipped=~refused & (~(coefs >= 1.0)).any(),
        clipped_norm=torch.where(refused, 0.0, torch.stack(squares).sum().sqrt()),
    )
    return health.norm.to(norm_dtype(grads)), stats, coefs, verdict


def _rows(tensor: Tensor) -> Tensor:
    """Return the tensor as a matrix of one row per unit, in the wide dtype."""
    wide = tensor.detach().to(wide_dtype(tensor.device))
    if tensor.dim() <= 1:
        return wide.reshape(1, tensor.numel())
    units = tensor.shape[0]
    return wide.reshape(units, tensor.numel() // units if units else 0)
