"""Watch the loss: is it a number, is it far above its average, has it been rising."""

import torch
from torch import Tensor

from zclip.layout import (
    BLOCKED,
    CLIP_COUNT,
    FLAGS,
    LAST_LOSS_COLUMN,
    LOSS,
    LOSS_DEVIATION_COLUMN,
    LOSS_MEAN_COLUMN,
    LOSS_NAN,
    LOSS_RATIO,
    LOSS_RISING,
    LOSS_SPIKE,
    LOSSES_ABSORBED_COLUMN,
    RISING_COLUMN,
    SKIP_COUNT,
    STEPS,
)

DEVIATIONS = 8.0  # mean absolute deviations; 6.4 standard deviations of normal noise
SMALLEST_SCALE = 1e-8  # a loss that was exactly 0 so far may become a little more


def watch_loss_(
    state: Tensor,
    loss: Tensor,
    verdict: Tensor,
    factor: float,
    rising_steps: int,
    decay: float,
    warmup_steps: int,
) -> None:
    """Judge the loss, and write what was found into the verdict.

    With ``m`` the running mean of the losses so far and ``d`` that of their distances from it, both
    of weight ``max(1 - decay, 1 / n)`` for the n-th loss, the loss ratio is::

        1 + (loss - m) / max(|m|, 8 d, 1e-8)

    which is ``loss / m`` for a positive loss that is steadier than an eighth of itself. Where the
    loss is noisy, near zero or negative, the ratio measures noise and raises no false alarm. The
    loss is a spike if the ratio exceeds ``factor`` and ``warmup_steps`` losses were absorbed. It is
    rising if each of the last ``rising_steps`` finite losses was above the one before it; 0 turns
    this off. A loss that is NaN or Inf blocks the step. Neither it nor a spike is absorbed into the
    statistics, and a NaN leaves no trace but its count.

    Args:
        state: float64 [8].
        loss: one element of any floating dtype. An empty tensor leaves everything as it was.
        verdict: float32 [14], from a clip rule; LOSS, LOSS_RATIO, FLAGS and BLOCKED are written.
        factor: how many times its mean makes a loss a spike.
        rising_steps: how many rises in a row are worth a flag.
        decay: of the running means; 0.99 remembers about 100 losses.
        warmup_steps: losses to absorb before any is called a spike.
    """
    if loss.numel() == 0:
        return
    value = loss.detach().reshape(()).to(state.dtype)
    before = state.clone()
    mean, deviation = before[LOSS_MEAN_COLUMN], before[LOSS_DEVIATION_COLUMN]
    absorbed, last = before[LOSSES_ABSORBED_COLUMN], before[LAST_LOSS_COLUMN]
    is_finite = value.isfinite()
    is_first = absorbed == 0

    scale = torch.maximum(mean.abs(), DEVIATIONS * deviation).clamp(min=SMALLEST_SCALE)
    distance = torch.where(is_first & is_finite, 0.0, value - mean)
    ratio = 1.0 + distance / scale
    spike = is_finite & ~is_first & (absorbed >= warmup_steps) & (ratio > factor)

    absorbs = is_finite & ~spike
    weight = (1.0 / (absorbed + 1)).clamp(min=1.0 - decay)
    new_mean = torch.where(is_first, value, mean + weight * distance)
    new_deviation = deviation + weight * (distance.abs() - deviation)
    rises = torch.where(~is_first & (value > last), before[RISING_COLUMN] + 1, 0.0)
    rises = torch.where(is_finite, rises, before[RISING_COLUMN])
    rising = is_finite & (rises >= rising_steps) & (rising_steps > 0)

    state[STEPS] += 1
    state[CLIP_COUNT] += spike
    state[SKIP_COUNT] += ~is_finite
    state[LOSS_MEAN_COLUMN] = torch.where(absorbs, new_mean, mean)
    state[LOSS_DEVIATION_COLUMN] = torch.where(absorbs, new_deviation, deviation)
    state[LOSSES_ABSORBED_COLUMN] += absorbs
    state[LAST_LOSS_COLUMN] = torch.where(is_finite, value, last)
    state[RISING_COLUMN] = rises

    found = LOSS_NAN * ~is_finite | LOSS_SPIKE * spike | LOSS_RISING * rising
    verdict[LOSS] = value
    verdict[LOSS_RATIO] = ratio
    verdict[FLAGS] = (verdict[FLAGS].long() | found).to(verdict.dtype)
    verdict[BLOCKED] = torch.where(is_finite, verdict[BLOCKED], 1.0)
