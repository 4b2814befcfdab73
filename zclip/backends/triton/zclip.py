"""The rule zclip in Triton: csrc/math/zclip.h once more, in one program."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from zclip import layout
from zclip.backends.triton.launch import OPTIONS, bits_of
from zclip.backends.triton.number import float64_of
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

MEAN_COLUMN, VAR_COLUMN = tl.constexpr(layout.MEAN_COLUMN), tl.constexpr(layout.VAR_COLUMN)
SEEN_COLUMN = tl.constexpr(layout.SEEN_COLUMN)
BUFFER_COLUMN = tl.constexpr(layout.BUFFER_COLUMN)
ADAPTIVE_SCALING = tl.constexpr(layout.ZCLIP_MODES["adaptive_scaling"])
PERCENTILE = tl.constexpr(layout.ZCLIP_MODES["percentile"])
SPIKE = tl.constexpr(layout.SPIKE)


@triton.jit
def mean_and_variance(buffer, length, norm, BLOCK: tl.constexpr):
    """Of the warm-up: what stands in the buffer, and last ``norm``. Population variance."""
    sums = tl.zeros([BLOCK], tl.float64)
    for start in range(0, length - 1, BLOCK):
        i = start + tl.arange(0, BLOCK)
        sums += tl.load(buffer + i, mask=i < length - 1, other=0.0)
    mean = (tl.sum(sums, axis=0) + norm) / length
    squares = tl.zeros([BLOCK], tl.float64)
    for start in range(0, length - 1, BLOCK):
        i = start + tl.arange(0, BLOCK)
        distance = tl.load(buffer + i, mask=i < length - 1, other=0.0) - mean
        squares += tl.where(i < length - 1, distance * distance, 0.0)
    return mean, (tl.sum(squares, axis=0) + (norm - mean) * (norm - mean)) / length


@triton.jit(
    do_not_specialize=[
        "num_tensors",
        "alpha_bits",
        "z_thresh_bits",
        "limit_bits",
        "eps_bits",
        "warmup_steps",
        "clip_mode",
        "clip_factor_bits",
        "skip_update_on_spike",
        "skip_step_on_spike",
        "on_nonfinite",
    ]
)
def zclip(
    stats,  # float64 [num_tensors, 3]
    state,  # float64 [6 + warmup_steps]: moved on
    norm,  # float32 or float64 []: written, as all below
    coefs,  # float64 [num_tensors]
    verdict,  # float32 [14]
    num_tensors,
    alpha_bits: tl.int64,
    z_thresh_bits: tl.int64,
    limit_bits: tl.int64,
    eps_bits: tl.int64,
    warmup_steps,  # at least 1
    clip_mode,
    clip_factor_bits: tl.int64,
    skip_update_on_spike,
    skip_step_on_spike,
    on_nonfinite,
    BLOCK: tl.constexpr,
):
    """One program."""
    alpha, z_thresh = float64_of(alpha_bits), float64_of(z_thresh_bits)
    limit, eps = float64_of(limit_bits), float64_of(eps_bits)
    total, flags, worst = health_of(stats, num_tensors, BLOCK)
    refused = (flags != 0) & (on_nonfinite != OFFICIAL)
    mean, var = tl.load(state + MEAN_COLUMN), tl.load(state + VAR_COLUMN)
    seen = tl.load(state + SEEN_COLUMN)
    warming = seen < warmup_steps

    std = tl.sqrt(var)
    z = (total - mean) / (std + eps)
    by_percentile = clip_mode == PERCENTILE
    threshold = mean + z_thresh * tl.where(by_percentile, std, std + eps)
    is_outlier = tl.where(by_percentile, total > threshold, z > z_thresh)
    target = tl.where(by_percentile, threshold, mean)
    adaptive = (mean + z_thresh * std / (z / z_thresh)) * float64_of(clip_factor_bits)
    target = tl.where(clip_mode == ADAPTIVE_SCALING, adaptive, target)
    spike = is_outlier & (warming == 0) & (refused == 0)

    # Comparisons are written so that a NaN falls on the side where Python's min() lets it fall.
    learned = tl.where(spike, target, total)
    allowed = tl.where(limit < learned, limit, learned)
    coef = tl.where(total > allowed, allowed / (total + NORM_EPS), KEEP)
    wanted = tl.where(limit == float("inf"), KEEP, limit / (total + NORM_EPS))
    coef = tl.where(warming, tl.where(wanted >= 1.0, KEEP, wanted), coef)
    blocked = refused | (spike & (skip_step_on_spike != 0))
    coef = tl.where(blocked, REFUSE, coef)

    learns = (warming == 0) & (refused == 0) & ((spike & (skip_update_on_spike != 0)) == 0)
    averaged = alpha * mean + (1.0 - alpha) * learned
    distance = learned - averaged
    new_var = tl.where(learns, alpha * var + (1.0 - alpha) * (distance * distance), var)
    new_mean = tl.where(learns, averaged, mean)
    fills = warming & (refused == 0)
    if fills & (seen + 1.0 >= warmup_steps):
        new_mean, new_var = mean_and_variance(state + BUFFER_COLUMN, warmup_steps, total, BLOCK)
    write_report(
        state,
        verdict,
        total,
        worst,
        flags + tl.where(spike, SPIKE, 0),
        blocked,
        ((blocked | (coef >= 1.0)) == 0),
        tl.where(blocked, 0.0, total * coef),
        z=tl.where(warming, 0.0, z),
        threshold=tl.where(warming | (limit < threshold), limit, threshold),
        mean=tl.where(warming, 0.0, mean),
        std=tl.where(warming, 0.0, std),
    )
    tl.store(state + MEAN_COLUMN, new_mean)
    tl.store(state + VAR_COLUMN, new_var)
    tl.store(state + SEEN_COLUMN, tl.where(fills, seen + 1.0, seen))
    tl.store(state + BUFFER_COLUMN + seen.to(tl.int64), total, mask=fills)
    tl.store(norm, total)
    write_coef(coefs, num_tensors, coef, BLOCK)


def launch(
    state: Tensor,
    stats: Tensor,
    norm_dtype: torch.dtype,
    alpha: float,
    z_thresh: float,
    max_grad_norm: float,
    eps: float,
    warmup_steps: int,
    clip_mode: int,
    clip_factor: float,
    skip_update_on_spike: bool,
    skip_step_on_spike: bool,
    on_nonfinite: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return norm, coefs and verdict."""
    warmup_steps = max(1, warmup_steps)  # upstream stores a norm before it asks
    check_state(state, layout.BUFFER_COLUMN + warmup_steps, "zclip")
    norm, coefs, verdict = empty_results(stats, norm_dtype)
    zclip[(1,)](
        stats,
        state,
        norm,
        coefs,
        verdict,
        stats.shape[0],
        bits_of(alpha),
        bits_of(z_thresh),
        bits_of(max_grad_norm),
        bits_of(eps),
        warmup_steps,
        clip_mode,
        bits_of(clip_factor),
        int(skip_update_on_spike),
        int(skip_step_on_spike),
        on_nonfinite,
        BLOCK=RULE_BLOCK,
        **OPTIONS,
    )
    return norm, coefs, verdict
