"""Plain re-statements of the published algorithms, as rivals: one norm per tensor, host branches.

Written from the formulae, with the operations and the waits of the published code: ZClip reads one
number per step, AdaGC one per tensor and step.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

Parameters = Sequence[Parameter]


def _gradients(params: Parameters) -> list[Tensor]:
    return [p.grad for p in params if p.grad is not None]


def total_norm(params: Parameters) -> float:
    """Return the norm of all gradients as a Python float, which waits for the device."""
    norms = [g.norm(2) for g in _gradients(params)]
    return torch.stack(norms).pow(2).sum().sqrt().item()


class ZClip:
    """arXiv 2504.02507, clip option "adaptive_scaling"."""

    def __init__(
        self,
        alpha: float = 0.97,
        z_thresh: float = 2.5,
        max_grad_norm: float | None = 1.0,
        eps: float = 1e-6,
        warmup_steps: int = 25,
    ) -> None:
        self.alpha, self.z_thresh, self.eps = alpha, z_thresh, eps
        self.max_grad_norm, self.warmup_steps = max_grad_norm, warmup_steps
        self.buffer: list[float] = []
        self.mean: float | None = None
        self.var = 0.0

    @torch.no_grad()
    def step(self, params: Parameters) -> float:
        """Clip in place; return the norm before."""
        norm = total_norm(params)
        if self.mean is None:
            self.buffer.append(norm)
            if len(self.buffer) >= self.warmup_steps:
                self.mean = sum(self.buffer) / len(self.buffer)
                self.var = sum((x - self.mean) ** 2 for x in self.buffer) / len(self.buffer)
            if self.max_grad_norm is not None:
                torch.nn.utils.clip_grad_norm_(params, self.max_grad_norm)
            return norm
        std = self.var**0.5
        z = (norm - self.mean) / (std + self.eps)
        wanted = norm
        if z > self.z_thresh:
            wanted = self.mean + self.z_thresh * std / (z / self.z_thresh)
        allowed = wanted if self.max_grad_norm is None else min(wanted, self.max_grad_norm)
        if norm > allowed:
            for grad in _gradients(params):
                grad.mul_(allowed / (norm + 1e-6))
        self.mean = self.alpha * self.mean + (1 - self.alpha) * wanted
        self.var = self.alpha * self.var + (1 - self.alpha) * (wanted - self.mean) ** 2
        return norm


class AdaGC:
    """arXiv 2502.11034, seed "min_clipped"."""

    def __init__(
        self,
        lambda_rel: float = 1.04,
        beta: float = 0.99,
        lambda_abs: float = 1.0,
        eps: float = 1e-6,
        warmup_steps: int = 100,
    ) -> None:
        self.lambda_rel, self.beta, self.lambda_abs, self.eps = lambda_rel, beta, lambda_abs, eps
        self.warmup_steps, self.steps = warmup_steps, 0
        self.gamma: dict[int, Tensor] = {}

    @torch.no_grad()
    def step(self, params: Parameters) -> float:
        """Clip in place; return the norm before."""
        self.steps += 1
        norm = total_norm(params)
        grads = _gradients(params)
        if self.steps <= self.warmup_steps:
            self._warm_up(grads, norm)
            return norm
        for i, grad in enumerate(grads):
            own = grad.norm(2)
            gamma = self.gamma.setdefault(i, own)
            if own > self.lambda_rel * gamma:  # waits, once per tensor
                grad.mul_(self.lambda_rel * gamma / (own + self.eps))
                own = self.lambda_rel * gamma
            self.gamma[i] = self.beta * gamma + (1 - self.beta) * own
        return norm

    def _warm_up(self, grads: list[Tensor], norm: float) -> None:
        coef = self.lambda_abs / (norm + self.eps)
        for i, grad in enumerate(grads):
            if coef < 1:
                grad.mul_(coef)
            own = grad.norm(2)
            if i not in self.gamma or own < self.gamma[i]:
                self.gamma[i] = own
