"""The rule adagc in Triton: csrc/math/adagc.h once more, in one program."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from zclip import layout
from zclip.backends.triton.launch import OPTIONS, bits_of
from zclip.backends.triton.number import float64_of
from zclip.backends.triton.report import (
    KEEP,
    OFFICIAL,
    REFUSE,
    RULE_BLOCK,
    SKIP_COUNT,
    STEPS,
    check_state,
    empty_results,
    health_of,
    norm_of,
    write_report,
)

GAMMA_COLUMN = tl.constexpr(layout.GAMMA_COLUMN)
MIN_RAW = tl.constexpr(layout.ADAGC_SEEDS["min_raw"])
FIRST = tl.constexpr(layout.ADAGC_SEEDS["first"])


@triton.jit
def load_norms(stats, i, num_tensors):
    """Return the norms of the tensors at these indices; 0 beyond the last."""
    row = stats + i.to(tl.int64) * 3
    sumsq = tl.load(row, mask=i < num_tensors, other=0.0)
    nans = tl.load(row + 1, mask=i < num_tensors, other=0.0)
    infs = tl.load(row + 2, mask=i < num_tensors, other=0.0)
    return norm_of(sumsq, nans, infs)


@triton.jit(
    do_not_specialize=[
        "num_tensors",
        "lambda_rel_bits",
        "beta_bits",
        "lambda_abs_bits",
        "eps_bits",
        "warmup_steps",
        "seed",
        "on_nonfinite",
    ]
)
def adagc(
    stats,  # float64 [num_tensors, 3]
    state,  # float64 [3 + num_tensors]: moved on
    norm,  # float32 or float64 []: written, as all below
    coefs,  # float64 [num_tensors]
    verdict,  # float32 [14]
    num_tensors,
    lambda_rel_bits: tl.int64,
    beta_bits: tl.int64,
    lambda_abs_bits: tl.int64,
    eps_bits: tl.int64,
    warmup_steps,
    seed,
    on_nonfinite,
    BLOCK: tl.constexpr,
):
    """One program, BLOCK tensors at a time."""
    lambda_rel, beta = float64_of(lambda_rel_bits), float64_of(beta_bits)
    lambda_abs, eps = float64_of(lambda_abs_bits), float64_of(eps_bits)
    total, flags, worst = health_of(stats, num_tensors, BLOCK)
    refused = (flags != 0) & (on_nonfinite != OFFICIAL)
    # Skipped steps do not count, so that a run with a NaN learns what a run without it does.
    warming = tl.load(state + STEPS) + 1.0 - tl.load(state + SKIP_COUNT) <= warmup_steps
    wanted = lambda_abs / (total + eps)
    global_coef = tl.where(wanted < 1.0, wanted, KEEP)

    worst_gamma = tl.load(state + GAMMA_COLUMN + worst, mask=worst >= 0, other=0.0)
    worst_norm = load_norms(stats, tl.maximum(worst, 0), num_tensors)
    worst_gamma = tl.where(worst_gamma <= 0.0, worst_norm, worst_gamma)
    tl.debug_barrier()  # every thread has loaded that gamma before one of them moves it

    clipped = tl.zeros([BLOCK], tl.int32)
    squares = tl.zeros([BLOCK], tl.float64)
    for start in range(0, num_tensors, BLOCK):
        i = start + tl.arange(0, BLOCK)
        norms = load_norms(stats, i, num_tensors)
        gamma = tl.load(state + GAMMA_COLUMN + i, mask=i < num_tensors, other=0.0)
        is_set = (gamma <= 0.0) == 0
        seen = tl.where(seed == MIN_RAW, norms, norms * global_coef)
        lesser = tl.where(seen < gamma, seen, gamma)
        seeded = tl.where(seed == FIRST, beta * gamma + (1.0 - beta) * seen, lesser)
        seeded = tl.where(is_set, seeded, seen)

        before = tl.where(is_set, gamma, norms)
        limit = lambda_rel * before
        over = norms > limit
        averaged = beta * before + (1.0 - beta) * tl.where(over, limit, norms)

        # A norm of exactly zero teaches nothing: with gamma at zero the tensor would never train.
        absent = norms == 0.0
        coef = tl.where(over, limit / (norms + eps), KEEP)
        coef = tl.where(warming, global_coef, coef)
        coef = tl.where(refused, REFUSE, tl.where(absent, KEEP, coef))
        learned = tl.where(warming, seeded, averaged)
        unchanged = refused | absent | (learned == 0.0)
        tl.store(state + GAMMA_COLUMN + i, learned, mask=(i < num_tensors) & (unchanged == 0))
        tl.store(coefs + i, coef, mask=i < num_tensors)
        clipped = tl.where((coef >= 1.0) | (i >= num_tensors), clipped, 1)
        squares += norms * coef * (norms * coef)
    write_report(
        state,
        verdict,
        total,
        worst,
        flags,
        refused,
        (tl.max(clipped, axis=0) > 0) & (refused == 0),
        tl.where(refused, 0.0, tl.sqrt(tl.sum(squares, axis=0))),
        threshold=tl.where(warming, lambda_abs, lambda_rel * worst_gamma),
        mean=tl.where(warming, 0.0, worst_gamma),
    )
    tl.store(norm, total)


def launch(
    state: Tensor,
    stats: Tensor,
    norm_dtype: torch.dtype,
    lambda_rel: float,
    beta: float,
    lambda_abs: float,
    eps: float,
    warmup_steps: int,
    seed: int,
    on_nonfinite: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return norm, coefs and verdict."""
    count = stats.shape[0]
    check_state(state, layout.GAMMA_COLUMN + count, "adagc")
    norm, coefs, verdict = empty_results(stats, norm_dtype)
    adagc[(1,)](
        stats,
        state,
        norm,
        coefs,
        verdict,
        count,
        bits_of(lambda_rel),
        bits_of(beta),
        bits_of(lambda_abs),
        bits_of(eps),
        warmup_steps,
        seed,
        on_nonfinite,
        BLOCK=RULE_BLOCK,
        **OPTIONS,
    )
    return norm, coefs, verdict
