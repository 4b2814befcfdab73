"""Triton backend of zclip::watch_loss_: csrc/math/watch_loss.h once more, in one program."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from zclip import layout
from zclip.backends.triton.launch import OPTIONS, bits_of, on_device
from zclip.backends.triton.loss import load_loss, loss_arguments
from zclip.backends.triton.number import float64_of, is_finite
from zclip.backends.triton.report import (
    BLOCKED,
    CLIP_COUNT,
    FLAGS,
    LOSS,
    SKIP_COUNT,
    STEPS,
    check_state,
)
from zclip.layout import NUM_LOSS_STATE, NUM_VERDICT

MEAN_COLUMN = tl.constexpr(layout.LOSS_MEAN_COLUMN)
DEVIATION_COLUMN = tl.constexpr(layout.LOSS_DEVIATION_COLUMN)
ABSORBED_COLUMN = tl.constexpr(layout.LOSSES_ABSORBED_COLUMN)
LAST_COLUMN = tl.constexpr(layout.LAST_LOSS_COLUMN)
RISING_COLUMN = tl.constexpr(layout.RISING_COLUMN)
LOSS_RATIO = tl.constexpr(layout.LOSS_RATIO)
LOSS_NAN, LOSS_SPIKE = tl.constexpr(layout.LOSS_NAN), tl.constexpr(layout.LOSS_SPIKE)
LOSS_RISING = tl.constexpr(layout.LOSS_RISING)

DEVIATIONS = tl.constexpr(8.0)  # mean absolute ones; 6.4 standard deviations of normal noise
SMALLEST_SCALE = tl.constexpr(1e-8)  # a loss that was exactly 0 so far may become a little more


@triton.jit(
    do_not_specialize=["loss_address", "factor_bits", "rising_steps", "decay_bits", "warmup_steps"]
)
def watch_loss(
    state,  # float64 [8]: moved on
    verdict,  # float32 [14]: added to
    loss_address: tl.int64,
    factor_bits: tl.int64,
    rising_steps,
    decay_bits: tl.int64,
    warmup_steps,
    DTYPE: tl.constexpr,
):
    """One program. The rule is that of zclip/reference/watch_loss.py."""
    loss = load_loss(loss_address, DTYPE)
    mean, deviation = tl.load(state + MEAN_COLUMN), tl.load(state + DEVIATION_COLUMN)
    absorbed, last = tl.load(state + ABSORBED_COLUMN), tl.load(state + LAST_COLUMN)
    rises, steps = tl.load(state + RISING_COLUMN), tl.load(state + STEPS)
    spikes, nans = tl.load(state + CLIP_COUNT), tl.load(state + SKIP_COUNT)
    flags, blocked = tl.load(verdict + FLAGS).to(tl.int32), tl.load(verdict + BLOCKED)
    tl.debug_barrier()  # every thread loads, one of them stores

    finite, first = is_finite(loss), absorbed == 0.0
    noise = DEVIATIONS * deviation
    scale = tl.where(tl.abs(mean) < noise, noise, tl.abs(mean))
    scale = tl.where(scale < SMALLEST_SCALE, SMALLEST_SCALE, scale)
    distance = tl.where(first & finite, 0.0, loss - mean)
    ratio = 1.0 + distance / scale
    spike = finite & (first == 0) & (absorbed >= warmup_steps) & (ratio > float64_of(factor_bits))

    absorbs = finite & (spike == 0)
    share, least = 1.0 / (absorbed + 1.0), 1.0 - float64_of(decay_bits)
    weight = tl.where(share < least, least, share)
    new_mean = tl.where(first, loss, mean + weight * distance)
    new_deviation = deviation + weight * (tl.abs(distance) - deviation)
    rises = tl.where(finite, tl.where((first == 0) & (loss > last), rises + 1.0, 0.0), rises)
    rising = finite & (rises >= rising_steps) & (rising_steps > 0)

    tl.store(state + STEPS, steps + 1.0)
    tl.store(state + CLIP_COUNT, spikes + tl.where(spike, 1.0, 0.0))
    tl.store(state + SKIP_COUNT, nans + tl.where(finite, 0.0, 1.0))
    tl.store(state + MEAN_COLUMN, new_mean, mask=absorbs)
    tl.store(state + DEVIATION_COLUMN, new_deviation, mask=absorbs)
    tl.store(state + ABSORBED_COLUMN, absorbed + 1.0, mask=absorbs)
    tl.store(state + LAST_COLUMN, loss, mask=finite)
    tl.store(state + RISING_COLUMN, rises)

    flags |= tl.where(finite, 0, LOSS_NAN) | tl.where(spike, LOSS_SPIKE, 0)
    flags |= tl.where(rising, LOSS_RISING, 0)
    tl.store(verdict + FLAGS, flags.to(tl.float32))
    tl.store(verdict + LOSS, loss.to(tl.float32))
    tl.store(verdict + LOSS_RATIO, ratio.to(tl.float32))
    tl.store(verdict + BLOCKED, tl.where(finite, blocked, 1.0))


def watch_loss_(
    state: Tensor,
    loss: Tensor,
    verdict: Tensor,
    factor: float,
    rising_steps: int,
    decay: float,
    warmup_steps: int,
) -> None:
    """See :func:`zclip.reference.watch_loss_`."""
    check_state(state, NUM_LOSS_STATE, "watch_loss_")
    is_verdict = verdict.dtype == torch.float32 and verdict.is_contiguous()
    if not is_verdict or verdict.numel() != NUM_VERDICT or verdict.device != state.device:
        raise RuntimeError(
            f"zclip::watch_loss_: verdict: expected a contiguous float32 tensor of {NUM_VERDICT} "
            f"elements on {state.device}, got {verdict.dtype} of {verdict.numel()} on "
            f"{verdict.device}"
        )
    address, dtype = loss_arguments(loss, state, "watch_loss_")
    if loss.numel() == 0:
        return
    with on_device(state.device):
        watch_loss[(1,)](
            state,
            verdict,
            address,
            bits_of(factor),
            rising_steps,
            bits_of(decay),
            warmup_steps,
            DTYPE=dtype,
            **OPTIONS,
        )
