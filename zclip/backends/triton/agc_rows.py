"""The kernels of zclip::agc_ that touch memory: each program reads, or scales, one row.

A row is read in float64, in one pass, whatever it holds; its factor follows from csrc/math/agc.h.
"""

import triton
import triton.language as tl

from zclip.backends.triton.chunk import load_row, rewrite
from zclip.backends.triton.grad_stats import second_reading
from zclip.backends.triton.number import float64_of, is_finite
from zclip.backends.triton.report import BLOCKED, KEEP, REFUSE, norm_of
from zclip.backends.triton.scale_ import SMALLEST_NORMAL_FLOAT, nothing, scaled, scaled_wide

SMALLEST_GRAD_NORM = tl.constexpr(1e-6)  # timm divides by no less


@triton.jit
def member_of(row, first_rows, num_tensors, BLOCK: tl.constexpr):
    """Return which tensor of the table a row belongs to: as many end at or before it."""
    ended = tl.zeros([BLOCK], tl.int32)
    for start in range(0, num_tensors, BLOCK):
        i = start + tl.arange(0, BLOCK)
        end = tl.load(first_rows + 1 + i, mask=i < num_tensors, other=row + 1)
        ended += (end <= row).to(tl.int32)
    return tl.sum(ended, axis=0)


@triton.jit
def sum_of_finite_squares(address, length, DTYPE: tl.constexpr, LANES: tl.constexpr):
    """Of the weights, whose NaN and Inf do not count: this rule judges gradients."""
    sums = tl.zeros([LANES], tl.float64)
    for start in range(0, length, LANES):
        x = load_row(address, start, length, DTYPE, LANES)
        healthy = tl.where(is_finite(x), x, 0.0).to(tl.float64)
        sums += healthy * healthy
    return tl.sum(sums, axis=0)


@triton.jit(do_not_specialize=["first_row", "num_rows", "num_tensors", "clip_bits", "eps_bits"])
def agc_rows(
    grads,  # int64 [num_tensors]: of each gradient's first element
    weights,  # int64 [num_tensors]
    lengths,  # int64 [num_tensors]: elements in a row
    first_rows,  # int64 [num_tensors + 1]: where the rows of each tensor begin
    slots,  # float64 [4, num_rows]: written, one column per program
    first_row,
    num_rows,
    num_tensors,
    clip_bits: tl.int64,
    eps_bits: tl.int64,
    DTYPE: tl.constexpr,
    WEIGHT_DTYPE: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per row of one pair of dtypes: what is in it, and its factor."""
    row = first_row + tl.program_id(0).to(tl.int64)
    member = member_of(row, first_rows, num_tensors, BLOCK)
    length = tl.load(lengths + member)
    before = (row - tl.load(first_rows + member)) * length
    grad = tl.load(grads + member) + before * (DTYPE.primitive_bitwidth // 8)
    weight = tl.load(weights + member) + before * (WEIGHT_DTYPE.primitive_bitwidth // 8)
    sumsq, nans, infs = second_reading(grad, length, DTYPE, LANES)
    weight_norm = tl.sqrt(sum_of_finite_squares(weight, length, WEIGHT_DTYPE, LANES))

    norm, eps = norm_of(sumsq, nans, infs), float64_of(eps_bits)
    limit = float64_of(clip_bits) * tl.where(weight_norm < eps, eps, weight_norm)
    # A NaN norm gives a NaN factor, as in timm.
    wanted = limit / tl.where(norm < SMALLEST_GRAD_NORM, SMALLEST_GRAD_NORM, norm)
    tl.store(slots + row, sumsq)
    tl.store(slots + num_rows + row, nans)
    tl.store(slots + 2 * num_rows + row, infs)
    tl.store(slots + 3 * num_rows + row, tl.where(norm <= limit, KEEP, wanted))


@triton.jit(do_not_specialize=["first_row", "num_rows", "num_tensors"])
def agc_scale(
    grads,  # int64 [num_tensors]
    lengths,  # int64 [num_tensors]
    first_rows,  # int64 [num_tensors + 1]
    slots,  # float64 [4, num_rows]
    verdict,  # float32 [14]
    first_row,
    num_rows,
    num_tensors,
    DTYPE: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per row of one dtype; it leaves at once if there is nothing to do."""
    row = first_row + tl.program_id(0).to(tl.int64)
    coef = tl.load(slots + 3 * num_rows + row)
    coef = tl.where(tl.load(verdict + BLOCKED) != 0.0, REFUSE, coef)
    if coef != KEEP:
        member = member_of(row, first_rows, num_tensors, BLOCK)
        length = tl.load(lengths + member)
        before = (row - tl.load(first_rows + member)) * length
        address = tl.load(grads + member) + before * (DTYPE.primitive_bitwidth // 8)
        if coef == REFUSE:
            rewrite(address, length, coef, nothing, DTYPE, 0, LANES, 1)
        elif (tl.abs(coef) < SMALLEST_NORMAL_FLOAT) & (coef != 0.0):
            rewrite(address, length, coef, scaled_wide, DTYPE, 0, LANES, 1)
        else:
            rewrite(address, length, coef, scaled, DTYPE, 0, LANES, 1)
