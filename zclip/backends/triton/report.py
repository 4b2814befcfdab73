"""What every clip rule begins and ends with: csrc/math/totals.h and report.h once more, in Triton.

Rules are one program each. All its threads compute the same numbers and one of them stores; so
every value of the state is loaded before a barrier and stored after it. "Not" is written == 0: in
the interpreter of Triton 3.9, ~ makes an integer of a truth value, which no mask may be.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from zclip import layout
from zclip.layout import NUM_STATS, NUM_VERDICT

KEEP, REFUSE = tl.constexpr(layout.KEEP), tl.constexpr(layout.REFUSE)
HAS_NAN, HAS_INF = tl.constexpr(layout.HAS_NAN), tl.constexpr(layout.HAS_INF)
OVERFLOW, CLIPPED = tl.constexpr(layout.OVERFLOW), tl.constexpr(layout.CLIPPED)
BLOCKED, FLAGS = tl.constexpr(layout.BLOCKED), tl.constexpr(layout.FLAGS)
NORM, CLIPPED_NORM = tl.constexpr(layout.NORM), tl.constexpr(layout.CLIPPED_NORM)
Z, THRESHOLD = tl.constexpr(layout.Z), tl.constexpr(layout.THRESHOLD)
MEAN, STD = tl.constexpr(layout.MEAN), tl.constexpr(layout.STD)
LOSS, WORST = tl.constexpr(layout.LOSS), tl.constexpr(layout.WORST)
CLIPS, SKIPS, STEP = (tl.constexpr(v) for v in (layout.CLIPS, layout.SKIPS, layout.STEP))
STEPS, CLIP_COUNT = tl.constexpr(layout.STEPS), tl.constexpr(layout.CLIP_COUNT)
SKIP_COUNT = tl.constexpr(layout.SKIP_COUNT)
VERDICT = tl.constexpr(NUM_VERDICT)
OFFICIAL = tl.constexpr(layout.ON_NONFINITE["official"])

NORM_EPS = tl.constexpr(1e-6)  # torch adds this to the norm before dividing
LARGEST_FLOAT = tl.constexpr(torch.finfo(torch.float32).max)
NOWHERE = tl.constexpr(2**31 - 1)  # an index that no tensor has
TENSOR_BLOCK = 1024  # rows of stats looked at together
RULE_BLOCK = 256  # the same where a rule does more with a row: one per thread, lest registers spill


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
def norm_of(sumsq, nans, infs):
    """A norm as torch would report it: NaN or Inf if an element is."""
    norm = tl.where(infs > 0.0, float("inf"), tl.sqrt(sumsq))
    return tl.where(nans > 0.0, float("nan"), norm)


@triton.jit
def flags_of(norm, nans, infs):
    """Return the flags that the gradients have whatever the rule; not 0 if nothing is to learn."""
    overflow = (nans + infs == 0.0) & (norm > LARGEST_FLOAT)
    flags = tl.where(nans > 0.0, HAS_NAN, 0) + tl.where(infs > 0.0, HAS_INF, 0)
    return flags + tl.where(overflow, OVERFLOW, 0)


@triton.jit
def health_of(stats, num_tensors, BLOCK: tl.constexpr):
    """Return norm, flags and worst index of the gradients as one vector."""
    sumsq, nans, infs, worst = total_of(stats, num_tensors, BLOCK)
    norm = norm_of(sumsq, nans, infs)
    return norm, flags_of(norm, nans, infs), worst


@triton.jit
def write_report(
    state,
    verdict,
    norm,
    worst,
    flags,
    blocked,
    clipped,
    clipped_norm,
    z=0.0,
    threshold=0.0,
    mean=0.0,
    std=0.0,
    loss=0.0,
    HAS_STATE: tl.constexpr = True,
):
    """Count the step in the state and write the verdict. What comes after may store anything."""
    column = tl.arange(0, 16)
    row = tl.where(column == BLOCKED, blocked, tl.zeros([16], tl.float64))
    row = tl.where(column == FLAGS, flags + tl.where(clipped, CLIPPED, 0), row)
    row = tl.where(column == NORM, norm, row)
    row = tl.where(column == CLIPPED_NORM, clipped_norm, row)
    row = tl.where(column == Z, z, row)
    row = tl.where(column == THRESHOLD, threshold, row)
    row = tl.where(column == MEAN, mean, row)
    row = tl.where(column == STD, std, row)
    row = tl.where(column == LOSS, loss, row)
    row = tl.where(column == WORST, worst, row)
    if HAS_STATE:
        steps = tl.load(state + STEPS) + 1.0
        clips = tl.load(state + CLIP_COUNT) + tl.where(clipped, 1.0, 0.0)
        skips = tl.load(state + SKIP_COUNT) + tl.where(blocked, 1.0, 0.0)
        tl.debug_barrier()
        tl.store(state + STEPS, steps)
        tl.store(state + CLIP_COUNT, clips)
        tl.store(state + SKIP_COUNT, skips)
        row = tl.where(column == STEP, steps, row)
        row = tl.where(column == CLIPS, clips, row)
        row = tl.where(column == SKIPS, skips, row)
    tl.store(verdict + column, row.to(tl.float32), mask=column < VERDICT)


@triton.jit
def write_coef(coefs, num_tensors, coef, BLOCK: tl.constexpr):
    """Give every gradient the one coefficient."""
    for start in range(0, num_tensors, BLOCK):
        i = start + tl.arange(0, BLOCK)
        tl.store(coefs + i, tl.zeros([BLOCK], tl.float64) + coef, mask=i < num_tensors)


def check_state(state: Tensor, size: int, op: str) -> None:
    """Raise RuntimeError unless ``state`` is float64 of this many elements, one after another."""
    if state.dtype != torch.float64 or not state.is_contiguous() or state.numel() != size:
        raise RuntimeError(
            f"zclip::{op}: state: expected a contiguous float64 tensor of {size} elements, got "
            f"{state.dtype} of {state.numel()}"
        )


def check_stats(stats: Tensor, state: Tensor, op: str) -> Tensor:
    """Return ``stats``, contiguous, if they are float64 [N, 3] beside the state."""
    if stats.dtype != torch.float64 or stats.dim() != 2 or stats.shape[1] != NUM_STATS:
        raise RuntimeError(
            f"zclip::{op}: stats: expected a float64 tensor of shape [N, {NUM_STATS}], got "
            f"{stats.dtype} of shape {tuple(stats.shape)}"
        )
    if stats.device != state.device:
        raise RuntimeError(
            f"zclip::{op}: expected stats and state on one device, got {stats.device} and "
            f"{state.device}"
        )
    return stats.contiguous()


def empty_results(stats: Tensor, norm_dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return norm, coefs and verdict for a rule to fill."""
    norm = stats.new_empty((), dtype=norm_dtype)
    coefs = stats.new_empty(stats.shape[0])
    return norm, coefs, stats.new_empty(NUM_VERDICT, dtype=torch.float32)
