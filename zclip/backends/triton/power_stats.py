"""Triton backend of zclip::power_stats: the norms other than the Euclidean one, all in float64."""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from zclip.backends.triton.chunk import load_row, shape_for
from zclip.backends.triton.grad_stats import launch_finish
from zclip.backends.triton.launch import bits_of, on_device
from zclip.backends.triton.number import float64_of, is_finite, is_nan
from zclip.backends.triton.tensor_list import READ, TensorList
from zclip.layout import NUM_STATS

LARGEST, SUM, POWER = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
"""Which norm: infinity, one, or any other."""


@triton.jit(do_not_specialize=["first_chunk", "num_chunks", "p_bits"])
def power_stats_partials(
    addresses,  # int64 [num_chunks]: of each chunk's first element
    lengths,  # int64 [num_chunks]
    slots,  # float64 [3, num_chunks]: written, one column per program
    first_chunk,
    num_chunks,
    p_bits: tl.int64,
    KIND: tl.constexpr,
    DTYPE: tl.constexpr,
    CHUNK: tl.constexpr,
    LANES: tl.constexpr,
    ROWS: tl.constexpr,
):
    """One program per chunk of one dtype, one row at a time: float64 leaves room for no more."""
    chunk = first_chunk + tl.program_id(0)
    address = tl.load(addresses + chunk)
    length = tl.load(lengths + chunk).to(tl.int32)
    p = float64_of(p_bits)
    sums = tl.zeros([LANES], tl.float64)
    nans = tl.zeros([LANES], tl.int32)
    infs = tl.zeros([LANES], tl.int32)
    for start in range(0, length, LANES):
        x = load_row(address, start, length, DTYPE, LANES)
        finite = is_finite(x)
        nan = is_nan(x)
        size = tl.abs(tl.where(finite, x, 0.0).to(tl.float64))
        if KIND == LARGEST:
            sums = tl.maximum(sums, size)
        elif KIND == SUM:
            sums += size
        else:
            # The logarithm of zero would be minus infinity: right in the end, but not portably.
            power = tl.exp2(p * tl.log2(tl.where(size > 0.0, size, 1.0)))
            sums += tl.where(size > 0.0, power, 0.0)
        nans += nan.to(tl.int32)
        infs += 1 - (finite | nan).to(tl.int32)
    total = tl.max(sums, axis=0) if KIND == LARGEST else tl.sum(sums, axis=0)
    tl.store(slots + chunk, total)
    tl.store(slots + num_chunks + chunk, tl.sum(nans, axis=0).to(tl.float64))
    tl.store(slots + 2 * num_chunks + chunk, tl.sum(infs, axis=0).to(tl.float64))


def power_stats(grads: list[Tensor], p: float) -> Tensor:
    """See :func:`zclip.ops.power_stats`."""
    tensors = TensorList(grads, READ)  # owns the copies that the table may point into
    table = tensors.table
    kind = LARGEST if math.isinf(p) else SUM if p == 1.0 else POWER
    with on_device(table.device):
        slots = table.addresses.new_empty((NUM_STATS, table.num_chunks), dtype=torch.float64)
        for group in table.groups:
            power_stats_partials[(group.num_chunks,)](
                table.addresses,
                table.lengths,
                slots,
                group.first_chunk,
                table.num_chunks,
                bits_of(p),
                KIND=kind.value,
                **shape_for(group.dtype),
            )
        return launch_finish(table, slots, first_is_max=math.isinf(p))
