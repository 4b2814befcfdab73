"""Finite-time Lyapunov exponent of training, from the velocity of the weights."""

import math
from collections import deque
from collections.abc import Iterable

import torch
from torch import Tensor

SAMPLE = 4096  # weights that are followed; enough for a norm to within two percent


class LyapunovMeter:
    """Follows a fixed sample of weights and measures how fast their steps grow or shrink.

    For a deterministic, smooth training the steps of the weights obey the linearised dynamics, so
    that the mean growth of their length is the largest exponent: below 0 it converges, above 0 it
    diverges. For gradient descent on a quadratic it is ``log(max(abs(1 - lr * curvature)))`` of the
    directions that are alive. Noise in the gradients keeps the steps at a constant length, and the
    exponent near 0: a value above 0 means something, one near 0 does not.

    Args:
        parameters: what is trained.
        window: steps over which growth is averaged.
        seed: of the choice of weights; the run's generators are not touched.

    Example:
        >>> meter = LyapunovMeter(model.parameters())
        >>> meter.observe()  # after each step, or after every tenth: nothing waits
        >>> meter.exponent()  # waits for the device
    """

    def __init__(self, parameters: Iterable[Tensor], window: int = 30, seed: int = 0) -> None:
        if window < 2:
            raise ValueError(f"window is {window}; wanted at least 2 steps")
        params = [p for p in parameters if p.requires_grad and p.numel()]
        if not params:
            raise ValueError("there are no trainable parameters to follow")
        total = sum(p.numel() for p in params)
        generator = torch.Generator().manual_seed(seed)
        self._followed = []
        for param in params:
            count = max(1, min(param.numel(), SAMPLE * param.numel() // total + 1))
            chosen = torch.randperm(param.numel(), generator=generator)[:count].sort().values
            self._followed.append((param, chosen.to(param.device)))
        self._before: list[Tensor] | None = None
        self._lengths: deque[Tensor] = deque(maxlen=window + 1)

    @torch.no_grad()
    def observe(self) -> None:
        """Measure the step since the last call; the length stays on the device."""
        now = [p.detach().reshape(-1)[chosen].double() for p, chosen in self._followed]
        if self._before is not None:
            moves = [a - b for a, b in zip(now, self._before, strict=True)]
            first = moves[0].device
            squares = [m.square().sum().to(first, non_blocking=True) for m in moves]
            self._lengths.append(torch.stack(squares).sum().sqrt())
        self._before = now

    def exponent(self) -> float:
        """Return the mean log-growth of the steps, per observation; NaN before there are three.

        Least squares over the window, so that one odd step does not decide.
        """
        if len(self._lengths) < 3:
            return math.nan
        lengths = torch.stack(list(self._lengths)).cpu()
        if not bool((lengths > 0).all()) or not bool(lengths.isfinite().all()):
            return math.nan
        logs = lengths.log()
        steps = torch.arange(len(logs), dtype=torch.float64)
        steps = steps - steps.mean()
        return float((steps * (logs - logs.mean())).sum() / steps.square().sum())
