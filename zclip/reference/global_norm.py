"""One coefficient for all gradients, from one limit on their norm."""

import torch
from torch import Tensor

from zclip.layout import ERROR, KEEP, REFUSE, SKIP
from zclip.reference.report import NORM_EPS, health_of, report


def global_norm_(
    state: Tensor, stats: Tensor, max_norm: float, nonfinite: int
) -> tuple[Tensor, Tensor]:
    """Choose one coefficient for all gradients: ``min(1, max_norm / (norm + 1e-6))``."""
    health = health_of(stats, nonfinite)
    blocked = health.unfit & (nonfinite in (SKIP, ERROR))
    wanted = max_norm / (health.norm + NORM_EPS)
    coef = torch.where(wanted >= 1.0, KEEP, wanted)
    coef = torch.where(blocked, REFUSE if nonfinite == SKIP else KEEP, coef)
    verdict = report(
        state,
        stats,
        health,
        blocked=blocked,
        clipped=~blocked & ~(coef >= 1.0),
        clipped_norm=torch.where(coef == REFUSE, 0.0, health.norm * coef),
        threshold=max_norm,
    )
    return coef.expand(stats.shape[0]).clone(), verdict
