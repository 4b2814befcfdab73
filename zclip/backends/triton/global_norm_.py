"""Triton backend of zclip::global_norm_: csrc/math/global_norm.h once more, in one program."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from zclip import layout
from zclip.backends.triton.launch import OPTIONS, bits_of, on_device
from zclip.backends.triton.number import float64_of
from zclip.backends.triton.report import (
    KEEP,
    NORM_EPS,
    REFUSE,
    TENSOR_BLOCK,
    check_state,
    check_stats,
    empty_results,
    flags_of,
    norm_of,
    total_of,
    write_coef,
    write_report,
)
from zclip.layout import NUM_COUNTERS

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


def check_counters(state: Tensor, op: str) -> None:
    """Raise RuntimeError unless ``state`` is float64 [3], or empty."""
    check_state(state, NUM_COUNTERS if state.numel() else 0, op)


def global_norm_(
    state: Tensor, stats: Tensor, max_norm: float, nonfinite: int
) -> tuple[Tensor, Tensor]:
    """See :func:`zclip.reference.global_norm_`."""
    check_counters(state, "global_norm_")
    stats = check_stats(stats, state, "global_norm_")
    _, coefs, verdict = empty_results(stats, torch.float32)
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
