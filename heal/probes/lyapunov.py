"""Finite-time Lyapunov exponent of training, from the velocity of the weights."""

import math
from collections import deque
from collections.abc import Iterable

import torch
from torch import Tensor

SAMPLE = 4096  # weights that are followed; enough for a norm to within two percent
FEWEST = 3  # lengths of steps whose growth can be told


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
        >>> meter.observe(healer.last_step)  # after each step, or every tenth: nothing waits
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
        self._step = -1

    def restart(self) -> None:
        """Forget all steps: the weights were set, not trained, to where they are."""
        self._before = None
        self._lengths.clear()

    @torch.no_grad()
    def observe(self, step: int | None = None) -> None:
        """Measure the step since the last call; the length stays on the device.

        Args:
            step: its number. One that is not above the last tells of a rollback, whose leap is
                no step: the meter starts anew.
        """
        if step is not None:
            if step <= self._step:
                self.restart()
            self._step = step
        now = [p.detach().reshape(-1)[chosen].double() for p, chosen in self._followed]
        if self._before is not None:
            moves = [a - b for a, b in zip(now, self._before, strict=True)]
            first = moves[0].device
            squares = [m.square().sum().to(first, non_blocking=True) for m in moves]
            self._lengths.append(torch.stack(squares).sum().sqrt())
        self._before = now

    def exponent(self) -> float:
        """Return the mean log-growth of the steps, per observation; NaN before there are three.

        Least squares over the window, so that one odd step does not decide. A refused step moved
        nothing and is left out; so is all that came before the last burst to Inf or NaN.
        """
        if not self._lengths:
            return math.nan
        lengths = torch.stack(list(self._lengths)).cpu()
        burst = (~lengths.isfinite()).nonzero()
        if len(burst):
            lengths = lengths[int(burst[-1]) + 1 :]
        logs = lengths[lengths > 0].log()
        if len(logs) < FEWEST:
            return math.nan
        steps = torch.arange(len(logs), dtype=torch.float64)
        steps = steps - steps.mean()
        return float((steps * (logs - logs.mean())).sum() / steps.square().sum())
