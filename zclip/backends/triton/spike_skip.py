"""The rule spike_skip in Triton: csrc/math/spike_skip.h once more, in one program."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from zclip import layout
from zclip.backends.triton.launch import OPTIONS, bits_of
from zclip.backends.triton.loss import load_loss, loss_arguments
from zclip.backends.triton.number import float64_of, is_finite
from zclip.backends.triton.report import (
    KEEP,
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

NORMS_SEEN_COLUMN = tl.constexpr(layout.NORMS_SEEN_COLUMN)
LOSSES_SEEN_COLUMN = tl.constexpr(layout.LOSSES_SEEN_COLUMN)
WINDOW_COLUMN = tl.constexpr(layout.WINDOW_COLUMN)
SPIKE, LOSS_NAN = tl.constexpr(layout.SPIKE), tl.constexpr(layout.LOSS_NAN)
LOSS_SPIKE = tl.constexpr(layout.LOSS_SPIKE)

STD_FLOOR = tl.constexpr(1e-6)  # of |mean|: rounding noise among equal values is no spike


@triton.jit
def view_of(ring, seen, window, value, sigma, enough, on_nonfinite, BLOCK: tl.constexpr):
    """Return is_spike, z, threshold, mean and std of a value against its window.

    All are 0 while the window is too short to judge.
    """
    count = filled(seen, window)
    sums = tl.zeros([BLOCK], tl.float64)
    for start in range(0, count, BLOCK):
        i = start + tl.arange(0, BLOCK)
        sums += tl.load(ring + i, mask=i < count, other=0.0)
    mean = tl.sum(sums, axis=0) / count
    squares = tl.zeros([BLOCK], tl.float64)
    for start in range(0, count, BLOCK):
        i = start + tl.arange(0, BLOCK)
        distance = tl.load(ring + i, mask=i < count, other=0.0) - mean
        squares += tl.where(i < count, distance * distance, 0.0)
    std = tl.sqrt(tl.sum(squares, axis=0) / (count - 1))  # unbiased, as in OLMo-core
    floor = STD_FLOOR * tl.abs(mean)
    std = tl.where((std < floor) & (on_nonfinite != OFFICIAL), floor, std)
    ready = count >= enough
    # Not "value > threshold": a NaN must be skipped.
    is_spike = ready & ((value - mean <= sigma * std) == 0)
    z = tl.where(ready, (value - mean) / std, 0.0)
    threshold = tl.where(ready, mean + sigma * std, 0.0)
    return is_spike, z, threshold, tl.where(ready, mean, 0.0), tl.where(ready, std, 0.0)


@triton.jit
def push(ring, seen_column, seen, window, value, enters):
    """Write over the oldest value and count it."""
    tl.store(ring + next_place(seen, window), value, mask=enters)
    tl.store(seen_column, seen + 1.0, mask=enters)


@triton.jit(
    do_not_specialize=[
        "num_tensors",
        "loss_address",
        "window",
        "sigma_bits",
        "enough",
        "on_nonfinite",
    ]
)
def spike_skip(
    stats,  # float64 [num_tensors, 3]
    state,  # float64 [5 + 2 * window]: moved on
    norm,  # float32 or float64 []: written, as all below
    coefs,  # float64 [num_tensors]
    verdict,  # float32 [14]
    num_tensors,
    loss_address: tl.int64,
    window,
    sigma_bits: tl.int64,
    enough,  # how many values it takes to judge
    on_nonfinite,
    HAS_LOSS: tl.constexpr,
    DTYPE: tl.constexpr,  # of the loss
    BLOCK: tl.constexpr,
):
    """One program."""
    sigma = float64_of(sigma_bits)
    total, flags, worst = health_of(stats, num_tensors, BLOCK)
    norms, losses = state + WINDOW_COLUMN, state + WINDOW_COLUMN + window
    norms_seen = tl.load(state + NORMS_SEEN_COLUMN)
    losses_seen = tl.load(state + LOSSES_SEEN_COLUMN)
    norm_spike, z, threshold, mean, std = view_of(
        norms, norms_seen, window, total, sigma, enough, on_nonfinite, BLOCK
    )
    loss = tl.full([], 0.0, tl.float64)
    loss_spike = norm_spike & False
    bad_loss = loss_spike
    if HAS_LOSS:
        loss = load_loss(loss_address, DTYPE)
        bad_loss = is_finite(loss) == 0
        loss_spike, _, _, _, _ = view_of(
            losses, losses_seen, window, loss, sigma, enough, on_nonfinite, BLOCK
        )
    unfit = ((flags != 0) | bad_loss) & (on_nonfinite != OFFICIAL)
    norm_spike = norm_spike & (unfit == 0)
    loss_spike = loss_spike & (unfit == 0)
    refused = unfit | norm_spike | loss_spike
    flags += tl.where(norm_spike, SPIKE, 0) + tl.where(bad_loss, LOSS_NAN, 0)
    flags += tl.where(loss_spike, LOSS_SPIKE, 0)
    write_report(
        state,
        verdict,
        total,
        worst,
        flags,
        refused,
        refused & False,
        tl.where(refused, 0.0, total),
        z=z,
        threshold=threshold,
        mean=mean,
        std=std,
        loss=loss,
    )
    enters = (refused == 0) | (on_nonfinite == OFFICIAL)
    push(norms, state + NORMS_SEEN_COLUMN, norms_seen, window, total, enters)
    if HAS_LOSS:
        push(losses, state + LOSSES_SEEN_COLUMN, losses_seen, window, loss, enters)
    tl.store(norm, total)
    write_coef(coefs, num_tensors, tl.where(refused, REFUSE, KEEP), BLOCK)


def launch(
    state: Tensor,
    stats: Tensor,
    norm_dtype: torch.dtype,
    loss: Tensor,
    window: int,
    sigma: float,
    min_count: int,
    on_nonfinite: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return norm, coefs and verdict."""
    check_state(state, layout.WINDOW_COLUMN + 2 * window, "spike_skip")
    address, dtype = loss_arguments(loss, state, "spike_skip")
    norm, coefs, verdict = empty_results(stats, norm_dtype)
    spike_skip[(1,)](
        stats,
        state,
        norm,
        coefs,
        verdict,
        stats.shape[0],
        address,
        window,
        bits_of(sigma),
        max(2, min_count),
        on_nonfinite,
        HAS_LOSS=loss.numel() > 0,
        DTYPE=dtype,
        BLOCK=RULE_BLOCK,
        **OPTIONS,
    )
    return norm, coefs, verdict
