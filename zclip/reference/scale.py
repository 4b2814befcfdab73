"""What may be done to gradients in place."""

import torch
from torch import Tensor

from zclip.checks import check_one_device, check_tensors, check_writable
from zclip.layout import KEEP, REFUSE
from zclip.schemas import wide_dtype


def scale_(grads: list[Tensor], coefs: Tensor) -> None:
    """Multiply each gradient by its coefficient, in place, as :mod:`zclip.layout` defines it."""
    check_tensors(grads)
    check_one_device([*grads, coefs])
    check_writable(grads)
    for grad, coef in zip(grads, coefs.unbind(), strict=True):
        grad.copy_(scaled(grad, coef))


def scaled(grad: Tensor, coef: Tensor) -> Tensor:
    """Return ``grad`` times ``coef``, which is 0-dim or broadcasts over the gradient's rows."""
    # Multiplying in the wide dtype rounds once, also where float32 could not hold coef.
    product = (grad.to(wide_dtype(grad.device)) * coef).to(grad.dtype)
    product = torch.where(coef == REFUSE, 0, product)
    return torch.where(coef == KEEP, grad, product)


def zero_nonfinite_(grads: list[Tensor], stats: Tensor) -> None:
    """Replace every NaN and Inf by zero, in place. ``stats`` lets other backends skip the rest."""
    check_tensors(grads)
    check_one_device([*grads, stats])
    check_writable(grads)
    for grad in grads:
        grad.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)


def clamp_(grads: list[Tensor], limit: float) -> None:
    """Bound every element to ``[-limit, limit]``, in place; a NaN stays."""
    check_tensors(grads)
    check_one_device(grads)
    check_writable(grads)
    for grad in grads:
        if limit <= torch.finfo(grad.dtype).max:  # a larger limit bounds nothing, as infinity
            grad.clamp_(-limit, limit)
