"""A ring of the last values, kept in columns of a rule's state."""

import torch
from torch import Tensor


def filled_part(ring: Tensor, seen: Tensor) -> Tensor:
    """Return which places of ``ring`` hold a value, if ``seen`` were ever pushed."""
    return torch.arange(ring.numel(), device=ring.device) < seen


def push(ring: Tensor, seen: Tensor, value: Tensor, enters: Tensor) -> None:
    """Write ``value`` over the oldest one and count it in ``seen``, if it ``enters``."""
    place = torch.arange(ring.numel(), device=ring.device)
    is_next = place == seen.remainder(ring.numel())
    ring.copy_(torch.where(enters & is_next, value, ring))
    seen += enters
