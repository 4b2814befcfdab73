"""ZClip (arXiv 2504.02507): clip a norm that is an outlier among the norms before it."""

import math

import torch
from torch import Tensor

from zclip.layout import (
    BUFFER_COLUMN,
    KEEP,
    MEAN_COLUMN,
    REFUSE,
    SEEN_COLUMN,
    SPIKE,
    VAR_COLUMN,
    ZCLIP_MODES,
)
from zclip.reference.report import NORM_EPS, health_of, report


def zclip_(
    state: Tensor,
    stats: Tensor,
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
) -> tuple[Tensor, Tensor]:
    """Clip by the z-score of the norm against running statistics of the norms before it.

    The first max(1, warmup_steps) norms are only clipped to ``max_grad_norm`` and stored; the
    last of them sets mean and variance. In the verdict, mean, std, z and threshold are those the
    step was judged by, all 0 but the threshold during warm-up; the threshold is the norm above
    which this step would be clipped.
    """
    health = health_of(stats)
    norm, refused = health.norm, health.refused(on_nonfinite)
    mean, var, seen = state[MEAN_COLUMN].clone(), state[VAR_COLUMN].clone(), state[SEEN_COLUMN]
    warming = seen < max(1, warmup_steps)

    std = var.sqrt()
    z = (norm - mean) / (std + eps)
    if clip_mode == ZCLIP_MODES["percentile"]:
        threshold = target = mean + z_thresh * std
        is_outlier = norm > threshold
    else:
        threshold = mean + z_thresh * (std + eps)
        is_outlier = z > z_thresh
        target = mean
        if clip_mode == ZCLIP_MODES["adaptive_scaling"]:
            target = (mean + z_thresh * std / (z / z_thresh)) * clip_factor
    spike = is_outlier & ~warming & ~refused

    # Comparisons are written so that a NaN falls on the side where Python's min() lets it fall.
    learned = torch.where(spike, target, norm)
    allowed = torch.where(max_grad_norm < learned, max_grad_norm, learned)
    coef = torch.where(norm > allowed, allowed / (norm + NORM_EPS), KEEP)
    coef = torch.where(warming, _warmup_coef(norm, max_grad_norm), coef)
    blocked = refused | (spike & skip_step_on_spike)
    coef = torch.where(blocked, REFUSE, coef)

    _fill_buffer(state, norm, warming & ~refused, max(1, warmup_steps))
    learns = ~warming & ~refused & ~(spike & skip_update_on_spike)
    new_mean = alpha * mean + (1 - alpha) * learned
    new_var = alpha * var + (1 - alpha) * (learned - new_mean) ** 2
    state[MEAN_COLUMN] = torch.where(learns, new_mean, state[MEAN_COLUMN])
    state[VAR_COLUMN] = torch.where(learns, new_var, state[VAR_COLUMN])

    verdict = report(
        state,
        stats,
        health,
        blocked=blocked,
        clipped=~blocked & ~(coef >= 1.0),
        clipped_norm=torch.where(blocked, 0.0, norm * coef),
        flags=SPIKE * spike,
        z=torch.where(warming, 0.0, z),
        threshold=torch.where(warming, max_grad_norm, threshold.clamp(max=max_grad_norm)),
        mean=torch.where(warming, 0.0, mean),
        std=torch.where(warming, 0.0, std),
    )
    return coef.expand(stats.shape[0]).clone(), verdict


def _warmup_coef(norm: Tensor, max_grad_norm: float) -> Tensor:
    if math.isinf(max_grad_norm):
        return torch.full_like(norm, KEEP)
    wanted = max_grad_norm / (norm + NORM_EPS)
    return torch.where(wanted >= 1.0, KEEP, wanted)


def _fill_buffer(state: Tensor, norm: Tensor, fills: Tensor, size: int) -> None:
    """Store the norm; when the buffer is full, set mean and population variance from it."""
    buffer, seen = state[BUFFER_COLUMN : BUFFER_COLUMN + size], state[SEEN_COLUMN]
    place = torch.arange(size, device=state.device)
    buffer.copy_(torch.where(fills & (place == seen), norm, buffer))
    is_last = fills & (seen + 1 >= size)
    seen += fills
    mean = buffer.sum() / size
    var = (buffer - mean).square().sum() / size
    state[MEAN_COLUMN] = torch.where(is_last, mean, state[MEAN_COLUMN])
    state[VAR_COLUMN] = torch.where(is_last, var, state[VAR_COLUMN])
