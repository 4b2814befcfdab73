"""AutoClip (Seetharaman et al. 2020): clip to a percentile of the norms seen so far."""

import math

import torch
from torch import Tensor

from zclip.layout import HISTORY_COLUMN, HISTORY_SEEN_COLUMN, KEEP, REFUSE
from zclip.reference.report import NORM_EPS, health_of, report
from zclip.reference.ring import filled_part, push


def auto_clip_(
    state: Tensor, stats: Tensor, percentile: float, history: int, on_nonfinite: int
) -> tuple[Tensor, Tensor]:
    """Clip to the percentile of the last ``history`` raw norms, this one included.

    The original remembers every norm of the run; here the oldest make room. Between two norms the
    percentile is interpolated as numpy does by default.
    """
    health = health_of(stats)
    refused = health.refused(on_nonfinite)
    ring, seen = state[HISTORY_COLUMN : HISTORY_COLUMN + history], state[HISTORY_SEEN_COLUMN]
    push(ring, seen, health.norm, ~refused)
    threshold = _percentile_of(ring, filled_part(ring, seen), percentile)

    wanted = threshold / (health.norm + NORM_EPS)
    coef = torch.where(wanted >= 1.0, KEEP, wanted)
    coef = torch.where(refused, REFUSE, coef)
    verdict = report(
        state,
        stats,
        health,
        blocked=refused,
        clipped=~refused & ~(coef >= 1.0),
        clipped_norm=torch.where(refused, 0.0, health.norm * coef),
        threshold=threshold,
    )
    return coef.expand(stats.shape[0]).clone(), verdict


def _percentile_of(values: Tensor, filled: Tensor, percentile: float) -> Tensor:
    """Percentile of the filled places; NaN if one of them is; 0 if there are none."""
    count = filled.sum()
    in_order = torch.where(filled, values, math.inf).sort().values
    rank = (percentile / 100.0) * (count - 1).clamp(min=0).to(values.dtype)
    low = rank.floor()
    high = torch.minimum(low + 1, (count - 1).clamp(min=0))
    below = in_order.gather(0, low.long()[None])[0]
    above = in_order.gather(0, high.long()[None])[0]
    # Equal neighbours first: between two infinities there is nothing to interpolate.
    between = torch.where(above == below, below, below + (rank - low) * (above - below))
    has_nan = torch.where(filled, values, 0.0).isnan().any()
    return torch.where(count == 0, 0.0, torch.where(has_nan, math.nan, between))
