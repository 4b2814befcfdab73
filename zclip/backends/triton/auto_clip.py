"""The rule auto_clip in Triton: csrc/math/auto_clip.h once more, in one program.

The percentile is found without sorting and without memory, whatever the length of the history:
doubles that are not negative are ordered like their bits, so a value is found three bits at a time.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from zclip import layout
from zclip.backends.triton.launch import OPTIONS, bits_of
from zclip.backends.triton.number import float64_of, is_nan
from zclip.backends.triton.report import (
    KEEP,
    NORM_EPS,
    OFFICIAL,
    REFUSE,
    RULE_BLOCK,
    check_state,
    empty_results,
    health_of,
    write_coef,
    write_report,
)
from zclip.backends.triton.ring import filled, next_place

HISTORY_SEEN_COLUMN = tl.constexpr(layout.HISTORY_SEEN_COLUMN)
HISTORY_COLUMN = tl.constexpr(layout.HISTORY_COLUMN)
DIGIT_BITS = tl.constexpr(3)  # tried at once; 63 bits, all but the sign, are 21 digits
DIGITS = tl.constexpr(8)
HIGHEST_DIGIT = tl.constexpr(60)  # the bit where it begins


@triton.jit
def value_of_rank(ring, count, place, value, rank, BLOCK: tl.constexpr):
    """Return the norm that ``rank`` others stand before in ascending order; none may be NaN.

    Of the norms, ``value`` stands at ``place`` already: it is stored later, when all have loaded.
    """
    answer = tl.full([], 0, tl.int64)
    shift = tl.full([], HIGHEST_DIGIT, tl.int64)
    while shift >= 0:
        candidates = answer + (tl.arange(0, DIGITS).to(tl.int64) << shift)
        below = tl.full([DIGITS], 0, tl.int32)
        for start in range(0, count, BLOCK):
            i = start + tl.arange(0, BLOCK)
            norms = tl.where(i == place, value, tl.load(ring + i, mask=i < count, other=0.0))
            bits = norms.to(tl.int64, bitcast=True)
            less = (bits[None, :] < candidates[:, None]) & (i < count)[None, :]
            below += tl.sum(less.to(tl.int32), axis=1)
        digit = tl.sum((below <= rank).to(tl.int64), axis=0) - 1
        answer += digit << shift
        shift -= DIGIT_BITS
    return answer.to(tl.float64, bitcast=True)


@triton.jit
def percentile_of(ring, count, place, value, percentile, BLOCK: tl.constexpr):
    """Linear between neighbours, as numpy.percentile; NaN if a value is; 0 if there are none."""
    rank = percentile / 100.0 * tl.maximum(count - 1, 0)
    low = rank.to(tl.int32)
    below = value_of_rank(ring, count, place, value, low, BLOCK)
    nans = tl.zeros([BLOCK], tl.int32)
    not_above = tl.zeros([BLOCK], tl.int32)
    next_above = tl.full([BLOCK], float("inf"), tl.float64)
    for start in range(0, count, BLOCK):
        i = start + tl.arange(0, BLOCK)
        norms = tl.where(i == place, value, tl.load(ring + i, mask=i < count, other=0.0))
        nans += (is_nan(norms) & (i < count)).to(tl.int32)
        not_above += ((norms <= below) & (i < count)).to(tl.int32)
        is_next = (norms > below) & (norms < next_above) & (i < count)
        next_above = tl.where(is_next, norms, next_above)
    above = tl.min(next_above, axis=0)
    # Equal neighbours first: between two infinities there is nothing to interpolate.
    alone = (low + 1 >= count) | (tl.sum(not_above, axis=0) > low + 1)
    between = tl.where(alone, below, below + (rank - low) * (above - below))
    between = tl.where(tl.sum(nans, axis=0) > 0, float("nan"), between)
    return tl.where(count == 0, 0.0, between)


@triton.jit(do_not_specialize=["num_tensors", "percentile_bits", "history", "on_nonfinite"])
def auto_clip(
    stats,  # float64 [num_tensors, 3]
    state,  # float64 [4 + history]: moved on
    norm,  # float32 or float64 []: written, as all below
    coefs,  # float64 [num_tensors]
    verdict,  # float32 [14]
    num_tensors,
    percentile_bits: tl.int64,
    history,
    on_nonfinite,
    BLOCK: tl.constexpr,
):
    """One program."""
    total, flags, worst = health_of(stats, num_tensors, BLOCK)
    refused = (flags != 0) & (on_nonfinite != OFFICIAL)
    seen = tl.load(state + HISTORY_SEEN_COLUMN)
    place = next_place(seen, history)
    now_seen = seen + tl.where(refused, 0.0, 1.0)
    count = filled(now_seen, history)
    new_at = tl.where(refused, -1, place)
    threshold = percentile_of(
        state + HISTORY_COLUMN, count, new_at, total, float64_of(percentile_bits), BLOCK
    )
    wanted = threshold / (total + NORM_EPS)
    coef = tl.where(wanted >= 1.0, KEEP, wanted)
    coef = tl.where(refused, REFUSE, coef)
    write_report(
        state,
        verdict,
        total,
        worst,
        flags,
        refused,
        ((refused | (coef >= 1.0)) == 0),
        tl.where(refused, 0.0, total * coef),
        threshold=threshold,
    )
    tl.store(state + HISTORY_SEEN_COLUMN, now_seen)
    tl.store(state + HISTORY_COLUMN + place, total, mask=(refused == 0))
    tl.store(norm, total)
    write_coef(coefs, num_tensors, coef, BLOCK)


def launch(
    state: Tensor,
    stats: Tensor,
    norm_dtype: torch.dtype,
    percentile: float,
    history: int,
    on_nonfinite: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return norm, coefs and verdict."""
    check_state(state, layout.HISTORY_COLUMN + history, "auto_clip")
    norm, coefs, verdict = empty_results(stats, norm_dtype)
    auto_clip[(1,)](
        stats,
        state,
        norm,
        coefs,
        verdict,
        stats.shape[0],
        bits_of(percentile),
        history,
        on_nonfinite,
        BLOCK=RULE_BLOCK,
        **OPTIONS,
    )
    return norm, coefs, verdict
