"""Sharpness: the largest curvature of the loss, by power iteration on Hessian-vector products."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from heal.micro_batch import TrainStep
from heal.probes.undisturbed import undisturbed
from heal.rng import RngState


@dataclass(frozen=True, slots=True)
class Sharpness:
    """The eigenvalue of the Hessian that is largest in magnitude, with its sign.

    ``residual`` is the length of ``H v - eigenvalue * v``: some eigenvalue lies within it.
    """

    eigenvalue: float
    residual: float
    iterations: int

    @property
    def largest_stable_lr(self) -> float:
        """The learning rate from which plain gradient descent leaves this valley: 2 / curvature."""
        return 2.0 / self.eigenvalue if self.eigenvalue > 0.0 else math.inf


def sharpness(
    model: Module,
    train_step: TrainStep,
    batch: Any,
    *,
    iterations: int = 30,
    tolerance: float = 1e-3,
    seed: int = 0,
) -> Sharpness:
    """Return the sharpness of the loss on one batch; each iteration costs about two backwards.

    Args:
        model: what is trained.
        train_step: takes a batch, returns its mean loss; twice differentiable.
        batch: what the loss is computed on.
        iterations: most products to take.
        tolerance: relative change of the eigenvalue at which to stop.
        seed: of the first direction; the run's generators are not touched.
    """
    with undisturbed(model) as named:
        params = [p for _, p in named]
        generator = torch.Generator().manual_seed(seed)
        direction = [torch.randn(p.shape, generator=generator).to(p) for p in params]
        direction = _scaled(direction, 1.0 / _length(direction))
        rng = RngState.now()
        value, residual, done = 0.0, math.inf, 0
        for done in range(1, iterations + 1):
            rng.put_back()  # the same dropout in every product: one Hessian, not several
            product = _product(train_step(batch), params, direction)
            before, value = value, float(_dot(product, direction))
            length = _length(product)
            residual = math.sqrt(max(length * length - value * value, 0.0))
            if length == 0.0 or not math.isfinite(length):
                break
            direction = _scaled(product, 1.0 / length)
            if done > 1 and abs(value - before) <= tolerance * abs(value):
                break
        return Sharpness(value, residual, done)


def _product(loss: Tensor, params: list[Tensor], direction: list[Tensor]) -> list[Tensor]:
    """Return the Hessian times a direction: the gradient of gradient times direction."""
    grads = torch.autograd.grad(loss, params, create_graph=True, allow_unused=True)
    used = [(g, v) for g, v in zip(grads, direction, strict=True) if g is not None]
    slope = torch.stack([(g * v).sum() for g, v in used]).sum()
    if not slope.requires_grad:  # a loss that is linear in its weights has no curvature
        return [torch.zeros_like(p) for p in params]
    products = torch.autograd.grad(slope, params, allow_unused=True)
    return [
        torch.zeros_like(p) if h is None else h.detach()
        for p, h in zip(params, products, strict=True)
    ]


def _dot(first: list[Tensor], second: list[Tensor]) -> Tensor:
    return torch.stack(
        [(a.double() * b.double()).sum() for a, b in zip(first, second, strict=True)]
    ).sum()


def _length(tensors: list[Tensor]) -> float:
    return float(_dot(tensors, tensors).sqrt())


def _scaled(tensors: list[Tensor], factor: float) -> list[Tensor]:
    return [t * factor for t in tensors]
