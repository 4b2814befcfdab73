"""The loss as a rule gets it: one element of any format, where it lies, or none."""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from zclip.backends.triton.chunk import FORMAT_OF
from zclip.backends.triton.number import pointer_to, widen


@triton.jit
def load_loss(address, DTYPE: tl.constexpr):
    """Return the loss, float64."""
    return widen(tl.load(pointer_to(address, DTYPE)), DTYPE).to(tl.float64)


def loss_arguments(loss: Tensor, state: Tensor, op: str) -> tuple[int, Any]:
    """Return address and format for :func:`load_loss`; 0 and float64 if there is no loss.

    An address, not a pointer: for one that is aligned otherwise, as an element of a larger tensor
    may be, Triton would compile again.

    Raises:
        RuntimeError: there are several losses, of no format we know, or on another device.
    """
    if loss.numel() == 0:
        return 0, tl.float64
    if loss.numel() > 1 or loss.dtype not in FORMAT_OF or loss.device != state.device:
        raise RuntimeError(
            f"zclip::{op}: loss: expected one floating-point element, or none, on "
            f"{state.device}, got {loss.numel()} of {loss.dtype} on {loss.device}"
        )
    return loss.data_ptr(), FORMAT_OF[loss.dtype]
