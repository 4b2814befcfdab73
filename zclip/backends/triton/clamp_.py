"""Triton backend of zclip::clamp_: one read and one write, one launch per dtype."""

import triton
import triton.language as tl
from torch import Tensor

from zclip.backends.triton.chunk import rewrite, shape_for
from zclip.backends.triton.launch import bits_of, on_device
from zclip.backends.triton.number import float64_of, narrow, widen
from zclip.backends.triton.tensor_list import WRITE, TensorList


@triton.jit
def clamped(x, limit):
    """As torch.clamp: a NaN compares false and stays."""
    below = tl.where(x > limit, limit, x)
    return tl.where(below < -limit, -limit, below)


@triton.jit(do_not_specialize=["first_chunk", "limit_bits"])
def clamp_chunks(
    addresses,  # int64 [num_chunks]: of each chunk's first element
    lengths,  # int64 [num_chunks]
    first_chunk,
    limit_bits: tl.int64,
    DTYPE: tl.constexpr,
    CHUNK: tl.constexpr,
    LANES: tl.constexpr,
    ROWS: tl.constexpr,
):
    """One program per chunk of one dtype."""
    chunk = first_chunk + tl.program_id(0)
    address = tl.load(addresses + chunk)
    length = tl.load(lengths + chunk).to(tl.int32)
    # Rounded to the format of the tensors first, as torch does.
    WIDE: tl.constexpr = tl.float64 if DTYPE == tl.float64 else tl.float32
    limit = widen(narrow(float64_of(limit_bits).to(WIDE), DTYPE), DTYPE)
    rewrite(address, length, limit, clamped, DTYPE, CHUNK, LANES, ROWS)


def clamp_(grads: list[Tensor], limit: float) -> None:
    """See :func:`zclip.ops.clamp_`."""
    tensors = TensorList(grads, WRITE)
    table = tensors.table
    with on_device(table.device):
        for group in table.groups:
            clamp_chunks[(group.num_chunks,)](
                table.addresses,
                table.lengths,
                group.first_chunk,
                bits_of(limit),
                **shape_for(group.dtype),
            )
        tensors.write_back()
