"""Plain re-statements of the published algorithms, as rivals: one norm per tensor, host branches.

Written from the formulae, with the operations and the waits of the published code: ZClip reads one
number per step, AdaGC one per tensor and step.
"""

import torch


def total_norm(model):
    """The norm of all gradients as a Python float."""
    norms = [p.grad.norm(2) for p in model.parameters() if p.grad is not None]
    return torch.stack(norms).pow(2).sum().sqrt().item()


class ZClip:
    """arXiv 2504.02507, clip option "adaptive_scaling"."""

    def __init__(self, alpha=0.97, z_thresh=2.5, max_grad_norm=1.0, eps=1e-6, warmup_steps=25):
        self.alpha, self.z_thresh, self.eps = alpha, z_thresh, eps
        self.max_grad_norm, self.warmup_steps = max_grad_norm, warmup_steps
        self.buffer, self.mean, self.var = [], None, None

    def step(self, model):
        norm = total_norm(model)
        if self.mean is None:
            self.buffer.append(norm)
            if len(self.buffer) >= self.warmup_steps:
                self.mean = sum(self.buffer) / len(self.buffer)
                self.var = sum((x - self.mean) ** 2 for x in self.buffer) / len(self.buffer)
            if self.max_grad_norm is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), self.max_grad_norm)
            return norm
        std = self.var**0.5
        z = (norm - self.mean) / (std + self.eps)
        wanted = norm
        if z > self.z_thresh:
            wanted = self.mean + self.z_thresh * std / (z / self.z_thresh)
        allowed = wanted if self.max_grad_norm is None else min(wanted, self.max_grad_norm)
        if norm > allowed:
            for param in model.parameters():
                if param.grad is not None:
                    param.grad.mul_(allowed / (norm + 1e-6))
        self.mean = self.alpha * self.mean + (1 - self.alpha) * wanted
        self.var = self.alpha * self.var + (1 - self.alpha) * (wanted - self.mean) ** 2
        return norm


class AdaGC:
    """arXiv 2502.11034, seed "min_clipped"."""

    def __init__(self, lambda_rel=1.04, beta=0.99, lambda_abs=1.0, eps=1e-6, warmup_steps=100):
        self.lambda_rel, self.beta, self.lambda_abs, self.eps = lambda_rel, beta, lambda_abs, eps
        self.warmup_steps, self.steps, self.gamma = warmup_steps, 0, {}

    def step(self, model):
        self.steps += 1
        norm = total_norm(model)
        params = [p for p in model.parameters() if p.grad is not None]
        if self.steps <= self.warmup_steps:
            self._warm_up(params, norm)
            return norm
        for param in params:
            own = param.grad.norm(2)
            gamma = self.gamma.setdefault(param, own)
            if own > self.lambda_rel * gamma:
                param.grad.mul_(self.lambda_rel * gamma / (own + self.eps))
                own = self.lambda_rel * gamma
            self.gamma[param] = self.beta * gamma + (1 - self.beta) * own
        return norm

    def _warm_up(self, params, norm):
        coef = self.lambda_abs / (norm + self.eps)
        for param in params:
            if coef < 1:
                param.grad.mul_(coef)
            own = param.grad.norm(2)
            if param not in self.gamma or own < self.gamma[param]:
                self.gamma[param] = own
