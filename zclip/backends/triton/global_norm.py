"""The rule global_norm in Triton: csrc/math/global_norm.h once more, in one program.

It also rides on the launch that finishes the stats, whose last program to arrive applies it. That
cannot ride on partials, because its ticket must start at zero and partials is what makes it so:
nothing outlives a call, and two calls on two streams cannot meet.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from zclip import layout
from zclip.backends.triton.grad_stats import finish_row, launch_partials
from zclip.backends.triton.launch import OPTIONS, bits_of, on_device
from zclip.backends.triton.number import float64_of
from zclip.backends.triton.report import (
    KEEP,
    NORM_EPS,
    REFUSE,
    TENSOR_BLOCK,
    check_state,
    empty_results,
    flags_of,
    norm_of,
    total_of,
    write_coef,
    write_report,
)
from zclip.backends.triton.scale_ import launch_scale
from zclip.backends.triton.tensor_list import WRITE, TensorList
from zclip.layout import NUM_COUNTERS, NUM_STATS, NUM_VERDICT

SKIP, ZERO, ERROR = (tl.constexpr(v) for v in (layout.SKIP, layout.ZERO, layout.ERROR))


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
    norm = tl.where(nonfinite == ZERO, tl.sqrt(sumsq), norm_of(sumsq, nans, infs))
    flags = flags_of(norm, nans, infs)
    blocked = (flags != 0) & ((nonfinite == SKIP) | (nonfinite == ERROR))

    wanted = max_norm / (norm + NORM_EPS)
    coef = tl.where(wanted >= 1.0, KEEP, wanted)  # a NaN norm gives a NaN coefficient, as in torch
    coef = tl.where(blocked, tl.where(nonfinite == SKIP, REFUSE, KEEP), coef)
    clipped = (blocked | (coef >= 1.0)) == 0
    clipped_norm = tl.where(coef == REFUSE, 0.0, norm * coef)
    write_report(
        state,
        verdict,
        norm,
        worst,
        flags,
        blocked,
        clipped,
        clipped_norm,
        threshold=max_norm,
        HAS_STATE=HAS_STATE,
    )
    write_coef(coefs, num_tensors, coef, BLOCK)
    return norm


@triton.jit(do_not_specialize=["num_tensors", "max_norm_bits", "nonfinite"])
def global_norm(
    stats,  # float64 [num_tensors, 3]
    state,  # float64 [3]: moved on; any pointer if not HAS_STATE
    norm,  # float32 or float64 []: written, as all below
    coefs,  # float64 [num_tensors]
    verdict,  # float32 [14]
    num_tensors,
    max_norm_bits: tl.int64,
    nonfinite,
    HAS_STATE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program."""
    max_norm = float64_of(max_norm_bits)
    reported = global_norm_rule(
        stats, state, coefs, verdict, num_tensors, max_norm, nonfinite, HAS_STATE, BLOCK
    )
    tl.store(norm, reported)


@triton.jit(do_not_specialize=["num_chunks", "num_tensors", "max_norm_bits", "nonfinite"])
def clip_by_global_norm_finish(
    slots,  # float64 [3, num_chunks]
    tensor_chunks,  # int64 [num_tensors + 1]: where the chunks of each tensor begin
    owners,  # int64 [num_tensors]: the tensor's place in the list that the caller gave
    ticket,  # int32 [1]: zero at the start
    state,  # float64 [3]: moved on; any pointer if not HAS_STATE
    stats,  # float64 [num_tensors, 3]: written, one row per program
    norm,  # float32 or float64 [1]: written, as all below, by the last program to arrive
    coefs,  # float64 [num_tensors]
    verdict,  # float32 [14]
    num_chunks,
    num_tensors,
    max_norm_bits: tl.int64,
    nonfinite,
    HAS_STATE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per tensor. Who comes last does not matter: rows are added in index order."""
    finish_row(slots, tensor_chunks, owners, stats, num_chunks, False, BLOCK)
    # One thread stores the row and takes the ticket, so the release covers its stores; after the
    # barrier the acquire covers the loads of the other threads.
    tl.debug_barrier()
    arrived = tl.atomic_add(ticket, 1, sem="acq_rel", scope="gpu")
    tl.debug_barrier()
    if arrived == num_tensors - 1:
        max_norm = float64_of(max_norm_bits)
        reported = global_norm_rule(
            stats, state, coefs, verdict, num_tensors, max_norm, nonfinite, HAS_STATE, BLOCK
        )
        tl.store(norm, reported)


def check_counters(state: Tensor, op: str) -> None:
    """Raise RuntimeError unless ``state`` is float64 [3], or empty."""
    check_state(state, NUM_COUNTERS if state.numel() else 0, op)


def launch(
    state: Tensor, stats: Tensor, norm_dtype: torch.dtype, max_norm: float, nonfinite: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return norm, coefs and verdict."""
    check_counters(state, "rule_")
    norm, coefs, verdict = empty_results(stats, norm_dtype)
    global_norm[(1,)](
        stats,
        state,
        norm,
        coefs,
        verdict,
        stats.shape[0],
        bits_of(max_norm),
        nonfinite,
        HAS_STATE=state.numel() > 0,
        BLOCK=TENSOR_BLOCK,
        **OPTIONS,
    )
    return norm, coefs, verdict


def clip_by(
    grads: list[Tensor], state: Tensor, max_norm: float, nonfinite: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Measure, choose and scale in three launches, one fewer than by way of :func:`launch`."""
    check_counters(state, "clip_by_")
    tensors = TensorList(grads, WRITE)
    table = tensors.table
    count = len(grads)
    with on_device(table.device):
        slots, ticket = launch_partials(table)
        stats = slots.new_empty((count, NUM_STATS))
        norm = slots.new_empty((), dtype=torch.float64 if table.has_float64 else torch.float32)
        coefs = slots.new_empty(count)
        verdict = slots.new_empty(NUM_VERDICT, dtype=torch.float32)
        clip_by_global_norm_finish[(count,)](
            slots,
            table.tensor_chunks,
            table.owners,
            ticket,
            state,
            stats,
            norm,
            coefs,
            verdict,
            table.num_chunks,
            count,
            bits_of(max_norm),
            nonfinite,
            HAS_STATE=state.numel() > 0,
            BLOCK=TENSOR_BLOCK,
            **OPTIONS,
        )
        launch_scale(table, coefs, stats if nonfinite == layout.ZERO else None)
        tensors.write_back()
    return norm, stats, coefs, verdict
