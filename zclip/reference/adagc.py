"""AdaGC (arXiv 2502.11034): clip each tensor by the running average of its own norm."""

import torch
from torch import Tensor

from zclip.layout import ADAGC_SEEDS, GAMMA_COLUMN, KEEP, REFUSE, SKIP_COUNT, STEPS
from zclip.reference.report import health_of, norms_of, report, worst_of


def adagc_(
    state: Tensor,
    stats: Tensor,
    lambda_rel: float,
    beta: float,
    lambda_abs: float,
    eps: float,
    warmup_steps: int,
    seed: int,
    on_nonfinite: int,
) -> tuple[Tensor, Tensor]:
    """Clip by one global limit for ``warmup_steps`` accepted steps, then tensor by tensor.

    A norm of exactly zero teaches nothing: upstream's gamma would become zero, and its tensor
    would never train again. So a tensor with no gradient may be passed as a row of zeros, and one
    that appears late starts at its first non-zero norm. In the verdict, mean and threshold are
    gamma and limit of the tensor that ``WORST`` names; the threshold is ``lambda_abs`` in warm-up.
    """
    health, norms = health_of(stats), norms_of(stats)
    refused = health.refused(on_nonfinite)
    # Skipped steps do not count, so that a run with a NaN learns what a run without it does.
    warming = state[STEPS] + 1 - state[SKIP_COUNT] <= warmup_steps
    gamma = state[GAMMA_COLUMN:]
    is_set, absent = ~(gamma <= 0.0), norms == 0.0

    global_coef = lambda_abs / (health.norm + eps)
    global_coef = torch.where(global_coef < 1.0, global_coef, KEEP)
    seen = norms if seed == ADAGC_SEEDS["min_raw"] else norms * global_coef
    if seed == ADAGC_SEEDS["first"]:
        seeded = beta * gamma + (1 - beta) * seen
    else:
        seeded = torch.where(seen < gamma, seen, gamma)
    seeded = torch.where(is_set, seeded, seen)

    before = torch.where(is_set, gamma, norms)
    limit = lambda_rel * before
    over = norms > limit
    averaged = beta * before + (1 - beta) * torch.where(over, limit, norms)

    coefs = torch.where(over, limit / (norms + eps), KEEP)
    coefs = torch.where(warming, global_coef, coefs)
    coefs = torch.where(refused, REFUSE, torch.where(absent, KEEP, coefs))

    learned = torch.where(warming, seeded, averaged)
    unchanged = refused | absent | (learned == 0.0)
    judged_by = before
    gamma.copy_(torch.where(unchanged, gamma, learned))

    worst = worst_of(stats).long().clamp(min=0)
    has_worst = stats.shape[0] > 0
    mean = judged_by.gather(0, worst[None])[0] if has_worst else 0.0
    verdict = report(
        state,
        stats,
        health,
        blocked=refused,
        clipped=~refused & (~(coefs >= 1.0)).any(),
        clipped_norm=torch.where(refused, 0.0, (norms * coefs).square().sum().sqrt()),
        threshold=torch.where(warming, lambda_abs, lambda_rel * mean),
        mean=torch.where(warming, 0.0, mean),
    )
    return coefs, verdict
