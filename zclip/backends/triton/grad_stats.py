"""Triton backend of zclip::grad_stats: two launches (one more per further dtype).

A healthy chunk is read once. Float32 sums stay short: a lane adds at most 8 squares, 8 lanes are
folded, the rest is float64. So a result has passed through at most 8 + 7 roundings of 2^-24 and is
within 9e-7 of the exact sum for any data.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from zclip.backends.triton.chunk import aligned_pointer, full_tile, load_row, shape_for
from zclip.backends.triton.launch import OPTIONS, on_device
from zclip.backends.triton.number import is_finite, is_nan, widen
from zclip.backends.triton.table import Table
from zclip.backends.triton.tensor_list import READ, TensorList
from zclip.layout import NUM_STATS

FOLD = tl.constexpr(8)  # lanes added in float32 before going to float64
# As in csrc/math/grad_stats.h: below what a quick sum may have lost squares to underflow, and what
# the second reading multiplies tiny and huge numbers by, so that their squares do not.
TINY_SUM, TINY_SUM_OF_FLOAT64 = tl.constexpr(2.0**-84), tl.constexpr(2.0**-980)
NO_FACTOR, TINY_FACTOR, HUGE_FACTOR = (tl.constexpr(f) for f in (1.0, 2.0**96, 2.0**-70))
SLOT_BLOCK = 1024  # slots that the finish adds at a time


@triton.jit
def _fold(sums, LANES: tl.constexpr):
    folded = tl.sum(tl.reshape(sums, [LANES // FOLD, FOLD]), axis=1)
    return tl.sum(folded.to(tl.float64), axis=0)


@triton.jit
def sum_of_squares(
    address,
    length,
    DTYPE: tl.constexpr,
    CHUNK: tl.constexpr,
    LANES: tl.constexpr,
    ROWS: tl.constexpr,
    FACTOR: tl.constexpr,
):
    """Return the quick sum of a chunk, float64. FACTOR, a power of two, changes squares on the way.

    The numbers are multiplied by it and the sum divided by its square, both of which are exact.
    """
    WIDE: tl.constexpr = tl.float64 if DTYPE == tl.float64 else tl.float32
    sums = tl.zeros([LANES], WIDE)
    if length == CHUNK:
        pointer = aligned_pointer(address, DTYPE) + full_tile(ROWS, LANES)
        for start in tl.static_range(0, CHUNK, ROWS * LANES):
            x = widen(tl.load(pointer + start), DTYPE)
            if FACTOR != 1.0:
                x *= FACTOR
            sums += tl.sum(x * x, axis=0)
        total = _fold(sums, LANES)  # in both branches, lest the sums change layout where they join
    else:
        for start in range(0, length, LANES):
            x = load_row(address, start, length, DTYPE, LANES)
            if FACTOR != 1.0:
                x *= FACTOR
            sums += x * x
        total = _fold(sums, LANES)
    return total / FACTOR / FACTOR


@triton.jit
def second_reading(address, length, DTYPE: tl.constexpr, LANES: tl.constexpr):
    """Count what is not finite and sum the squares of the rest, all in float64."""
    sums = tl.zeros([LANES], tl.float64)
    nans = tl.zeros([LANES], tl.int32)
    infs = tl.zeros([LANES], tl.int32)
    for start in range(0, length, LANES):
        x = load_row(address, start, length, DTYPE, LANES)
        finite = is_finite(x)
        nan = is_nan(x)
        healthy = tl.where(finite, x, 0.0).to(tl.float64)
        sums += healthy * healthy
        nans += nan.to(tl.int32)
        infs += 1 - (finite | nan).to(tl.int32)
    return (
        tl.sum(sums, axis=0),
        tl.sum(nans, axis=0).to(tl.float64),
        tl.sum(infs, axis=0).to(tl.float64),
    )


@triton.jit(do_not_specialize=["first_chunk", "num_chunks"])
def grad_stats_partials(
    addresses,  # int64 [num_chunks]: of each chunk's first element
    lengths,  # int64 [num_chunks]
    slots,  # float64 [3, num_chunks]: written, one column per program
    ticket,  # int32 [1]: made zero for the kernel that comes next on this stream
    first_chunk,
    num_chunks,
    DTYPE: tl.constexpr,
    CHUNK: tl.constexpr,
    LANES: tl.constexpr,
    ROWS: tl.constexpr,
):
    """One program per chunk of one dtype. A suspicious sum sends it back to read again."""
    chunk = first_chunk + tl.program_id(0)
    address = tl.load(addresses + chunk)
    length = tl.load(lengths + chunk).to(tl.int32)
    if chunk == 0:
        tl.store(ticket, 0)
    sumsq = sum_of_squares(address, length, DTYPE, CHUNK, LANES, ROWS, NO_FACTOR)
    nan = tl.full([], 0.0, tl.float64)
    inf = tl.full([], 0.0, tl.float64)
    if DTYPE == tl.float64:
        if not (is_finite(sumsq) & (sumsq >= TINY_SUM_OF_FLOAT64)):
            sumsq, nan, inf = second_reading(address, length, DTYPE, LANES)
    else:
        # Zeros, tiny and huge numbers are read again as quickly as at first; a chunk with a NaN or
        # an Inf is the only one to be read in float64.
        if sumsq < TINY_SUM:
            sumsq = sum_of_squares(address, length, DTYPE, CHUNK, LANES, ROWS, TINY_FACTOR)
        elif not is_finite(sumsq):
            sumsq = sum_of_squares(address, length, DTYPE, CHUNK, LANES, ROWS, HUGE_FACTOR)
            if not is_finite(sumsq):
                sumsq, nan, inf = second_reading(address, length, DTYPE, LANES)
    tl.store(slots + chunk, sumsq)
    tl.store(slots + num_chunks + chunk, nan)
    tl.store(slots + 2 * num_chunks + chunk, inf)


@triton.jit
def finish_row(
    slots,
    tensor_chunks,
    owners,
    stats,
    num_chunks,
    FIRST_IS_MAX: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add the slots of one tensor, in a fixed order, into its row of stats."""
    member = tl.program_id(0)
    begin = tl.load(tensor_chunks + member)
    end = tl.load(tensor_chunks + member + 1)
    row = stats + tl.load(owners + member) * 3
    for column in tl.static_range(3):
        sums = tl.zeros([BLOCK], tl.float64)
        for start in range(begin, end, BLOCK):
            chunk = start + tl.arange(0, BLOCK)
            slot = tl.load(slots + column * num_chunks + chunk, mask=chunk < end, other=0.0)
            if FIRST_IS_MAX and column == 0:
                sums = tl.maximum(sums, slot)
            else:
                sums += slot
        if FIRST_IS_MAX and column == 0:
            tl.store(row + column, tl.max(sums, axis=0))
        else:
            tl.store(row + column, tl.sum(sums, axis=0))


@triton.jit(do_not_specialize=["num_chunks"])
def grad_stats_finish(
    slots,  # float64 [3, num_chunks]
    tensor_chunks,  # int64 [num_tensors + 1]: where the chunks of each tensor begin
    owners,  # int64 [num_tensors]: the tensor's place in the list that the caller gave
    stats,  # float64 [num_tensors, 3]: written, one row per program
    num_chunks,
    FIRST_IS_MAX: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per tensor."""
    finish_row(slots, tensor_chunks, owners, stats, num_chunks, FIRST_IS_MAX, BLOCK)


def launch_partials(table: Table) -> tuple[Tensor, Tensor]:
    """Measure every chunk; return the slots and a ticket that is zero once they are filled."""
    slots = table.addresses.new_empty((NUM_STATS, table.num_chunks), dtype=torch.float64)
    ticket = table.addresses.new_empty(1, dtype=torch.int32)
    if not table.groups:
        ticket.zero_()
    for group in table.groups:
        grad_stats_partials[(group.num_chunks,)](
            table.addresses,
            table.lengths,
            slots,
            ticket,
            group.first_chunk,
            table.num_chunks,
            **shape_for(group.dtype),
        )
    return slots, ticket


def launch_finish(table: Table, slots: Tensor, first_is_max: bool = False) -> Tensor:
    """Return the stats that the slots amount to."""
    count = len(table.numels)
    stats = slots.new_empty((count, NUM_STATS))
    grad_stats_finish[(count,)](
        slots,
        table.tensor_chunks,
        table.owners,
        stats,
        table.num_chunks,
        FIRST_IS_MAX=first_is_max,
        BLOCK=SLOT_BLOCK,
        **OPTIONS,
    )
    return stats


def grad_stats(grads: list[Tensor]) -> Tensor:
    """See :func:`zclip.ops.grad_stats`."""
    tensors = TensorList(grads, READ)  # owns the copies that the table may point into
    table = tensors.table
    with on_device(table.device):
        slots, _ = launch_partials(table)
        return launch_finish(table, slots)
