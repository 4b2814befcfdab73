"""Triton backend of zclip::global_norm_: csrc/math/global_norm.h once more, in one program."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from zclip import layout
from zclip.backends.triton.launch import OPTIONS, bits_of, on_device
from zclip.backends.triton.number import float64_of
from zclip.layout import NUM_COUNTERS, NUM_STATS, NUM_VERDICT

KEEP, REFUSE = tl.constexpr(layout.KEEP), tl.constexpr(layout.REFUSE)
SKIP, ZERO, ERROR = (tl.constexpr(v) for v in (layout.SKIP, layout.ZERO, layout.ERROR))
HAS_NAN, HAS_INF = tl.constexpr(layout.HAS_NAN), tl.constexpr(layout.HAS_INF)
OVERFLOW, CLIPPED = tl.constexpr(layout.OVERFLOW), tl.constexpr(layout.CLIPPED)
BLOCKED, FLAGS = tl.constexpr(layout.BLOCKED), tl.constexpr(layout.FLAGS)
NORM, CLIPPED_NORM = tl.constexpr(layout.NORM), tl.constexpr(layout.CLIPPED_NORM)
THRESHOLD, WORST = tl.constexpr(layout.THRESHOLD), tl.constexpr(layout.WORST)
CLIPS, SKIPS, STEP = (tl.constexpr(v) for v in (layout.CLIPS, layout.SKIPS, layout.STEP))
STEPS, CLIP_COUNT = tl.constexpr(layout.STEPS), tl.constexpr(layout.CLIP_COUNT)
SKIP_COUNT = tl.constexpr(layout.SKIP_COUNT)
VERDICT = tl.constexpr(NUM_VERDICT)

NORM_EPS = tl.constexpr(1e-6)  # torch adds this to the norm before dividing
LARGEST_FLOAT = tl.constexpr(torch.finfo(torch.float32).max)
NOWHERE = tl.constexpr(2**31 - 1)  # an index that no tensor has
TENSOR_BLOCK = 1024  # rows of stats looked at together


@triton.jit
def total_of(stats, num_tensors, BLOCK: tl.constexpr):
    """Return sum of squares, NaN count, Inf count and worst index; rows in a fixed order."""
    sumsq = tl.zeros([BLOCK], tl.float64)
    nans = tl.zeros([BLOCK], tl.float64)
    infs = tl.zeros([BLOCK], tl.float64)
    largest = tl.full([BLOCK], -1.0, tl.float64)
    largest_at = tl.full([BLOCK], NOWHERE, tl.int32)
    first_bad = tl.full([BLOCK], NOWHERE, tl.int32)
    for start in range(0, num_tensors, BLOCK):
        i = start + tl.arange(0, BLOCK)
        row = stats + i.to(tl.int64) * 3
        power = tl.load(row, mask=i < num_tensors, other=0.0)
        nan = tl.load(row + 1, mask=i < num_tensors, other=0.0)
        inf = tl.load(row + 2, mask=i < num_tensors, other=0.0)
        larger = (power > largest) & (i < num_tensors)
        largest_at = tl.where(larger, i, largest_at)
        largest = tl.where(larger, power, largest)
        first_bad = tl.minimum(first_bad, tl.where(nan + inf > 0.0, i, NOWHERE))
        sumsq += power
        nans += nan
        infs += inf
    bad = tl.min(first_bad, axis=0)
    top = tl.max(largest, axis=0)
    at_top = tl.min(tl.where(largest == top, largest_at, NOWHERE), axis=0)
    worst = tl.where(bad < NOWHERE, bad, at_top)
    worst = tl.where(num_tensors > 0, worst, -1)
    return tl.sum(sumsq, axis=0), tl.sum(nans, axis=0), tl.sum(infs, axis=0), worst


@triton.jit
def global_norm_rule(
    stats,
    state,
    coefs,
    verdict,
    num_tensors,
    max_norm,
    nonfinite,
    HAS_STATE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Fill coefs and verdict, move the counters if there are any, and return the norm."""
    sumsq, nans, infs, worst = total_of(stats, num_tensors, BLOCK)
    norm = tl.sqrt(sumsq)
    reports_bad = nonfinite != ZERO
    norm = tl.where((infs > 0.0) & reports_bad, float("inf"), norm)
    norm = tl.where((nans > 0.0) & reports_bad, float("nan"), norm)
    bad = nans + infs > 0.0
    overflow = (nans + infs == 0.0) & (norm > LARGEST_FLOAT)
    blocked = (bad | overflow) & ((nonfinite == SKIP) | (nonfinite == ERROR))

    wanted = max_norm / (norm + NORM_EPS)
    coef = tl.where(wanted >= 1.0, KEEP, wanted)  # a NaN norm gives a NaN coefficient, as in torch
    coef = tl.where(blocked, tl.where(nonfinite == SKIP, REFUSE, KEEP), coef)
    clipped = tl.where(blocked | (coef >= 1.0), 0, 1)
    flags = tl.where(nans > 0.0, HAS_NAN, 0) + tl.where(infs > 0.0, HAS_INF, 0)
    flags += tl.where(overflow, OVERFLOW, 0) + clipped * CLIPPED

    column = tl.arange(0, 16)
    row = tl.where(column == BLOCKED, blocked.to(tl.float32), 0.0)
    row = tl.where(column == FLAGS, flags.to(tl.float32), row)
    row = tl.where(column == NORM, norm.to(tl.float32), row)
    clipped_norm = tl.where(coef == REFUSE, 0.0, norm * coef)
    row = tl.where(column == CLIPPED_NORM, clipped_norm.to(tl.float32), row)
    row = tl.where(column == THRESHOLD, max_norm.to(tl.float32), row)
    row = tl.where(column == WORST, worst.to(tl.float32), row)
    if HAS_STATE:
        steps = tl.load(state + STEPS) + 1.0
        clips = tl.load(state + CLIP_COUNT) + clipped
        skips = tl.load(state + SKIP_COUNT) + blocked.to(tl.float64)
        tl.debug_barrier()  # every thread loads the counters, one of them stores
        tl.store(state + STEPS, steps)
        tl.store(state + CLIP_COUNT, clips)
        tl.store(state + SKIP_COUNT, skips)
        row = tl.where(column == STEP, steps.to(tl.float32), row)
        row = tl.where(column == CLIPS, clips.to(tl.float32), row)
        row = tl.where(column == SKIPS, skips.to(tl.float32), row)
    tl.store(verdict + column, row, mask=column < VERDICT)
    for start in range(0, num_tensors, BLOCK):
        i = start + tl.arange(0, BLOCK)
        tl.store(coefs + i, tl.zeros([BLOCK], tl.float64) + coef, mask=i < num_tensors)
    return norm


@triton.jit(do_not_specialize=["num_tensors", "max_norm_bits", "nonfinite"])
def global_norm(
    stats,  # float64 [num_tensors, 3]
    state,  # float64 [3]: moved on; any pointer if not HAS_STATE
    coefs,  # float64 [num_tensors]: written
    verdict,  # float32 [14]: written
    num_tensors,
    max_norm_bits: tl.int64,
    nonfinite,
    HAS_STATE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program."""
    max_norm = float64_of(max_norm_bits)
    global_norm_rule(
        stats, state, coefs, verdict, num_tensors, max_norm, nonfinite, HAS_STATE, BLOCK
    )


def check_state(state: Tensor, op: str) -> None:
    """Raise RuntimeError unless ``state`` is float64 [3] or [0]."""
    is_counters = state.dtype == torch.float64 and state.is_contiguous()
    if not is_counters or state.numel() not in (0, NUM_COUNTERS):
        raise RuntimeError(
            f"zclip::{op}: state must be a contiguous float64 tensor of {NUM_COUNTERS} or 0 "
            f"elements, got {state.dtype} of {state.numel()}"
        )


def global_norm_(
    state: Tensor, stats: Tensor, max_norm: float, nonfinite: int
) -> tuple[Tensor, Tensor]:
    """See :func:`zclip.reference.global_norm_`."""
    check_state(state, "global_norm_")
    if stats.dtype != torch.float64 or stats.dim() != 2 or stats.shape[1] != NUM_STATS:
        raise RuntimeError(
            "zclip::global_norm_: stats must be a float64 tensor of shape [N, 3], got "
            f"{stats.dtype} of shape {tuple(stats.shape)}"
        )
    stats = stats.contiguous()
    coefs = stats.new_empty(stats.shape[0])
    verdict = stats.new_empty(NUM_VERDICT, dtype=torch.float32)
    with on_device(stats.device):
        global_norm[(1,)](
            stats,
            state,
            coefs,
            verdict,
            stats.shape[0],
            bits_of(max_norm),
            nonfinite,
            HAS_STATE=state.numel() > 0,
            BLOCK=TENSOR_BLOCK,
            **OPTIONS,
        )
    return coefs, verdict
