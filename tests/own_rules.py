"""Rules as a user would write them, for :class:`zclip.PythonRule`."""

import torch

from zclip.layout import SUMSQ


def twice_the_average(stats, state):
    """Clip to twice the running average of the clipped norms."""
    norm, mean = stats[:, SUMSQ].sum().sqrt(), state[0]
    coef = torch.where(mean > 0, (2 * mean / norm).clamp(max=1.0), 1.0)
    mean.copy_(torch.where(mean > 0, 0.99 * mean + 0.01 * norm * coef, norm))
    return coef


def each_to_one(stats, state):
    """Clip each tensor to a norm of 1."""
    return (1.0 / stats[:, SUMSQ].sqrt()).clamp(max=1.0)


def skip_above_ten(stats, state):
    """Skip a step whose norm exceeds 10; count the steps that were looked at."""
    state += 1
    return torch.where(stats[:, SUMSQ].sum().sqrt() > 10.0, -1.0, 1.0)
