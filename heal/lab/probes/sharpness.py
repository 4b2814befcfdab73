"""Sharpness: the largest curvature of the loss, by Lanczos on Hessian-vector products."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from heal.lab.probes.undisturbed import undisturbed
from heal.micro_batch import TrainStep
from heal.training_state import RngState

FEWEST_PRODUCTS = 8
"""A start that hardly points at the largest curvature looks settled on a lesser one at first."""

TIE = 1e-6  # share of an eigenvalue below which rounding decides which of two is larger


@dataclass(frozen=True, slots=True)
class Sharpness:
    """The eigenvalue of the Hessian that is largest in magnitude, with its sign.

    ``residual`` is the length of ``H v - eigenvalue * v``: some eigenvalue lies within it.
    ``is_converged`` tells whether it came below the tolerance; if not, the largest curvature is
    probably larger than what is told, and the limit of the learning rate lower.
    """

    eigenvalue: float
    residual: float
    iterations: int
    is_converged: bool

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
    tolerance: float = 1e-2,
    seed: int = 0,
) -> Sharpness:
    """Return the sharpness of the loss on one batch; each iteration costs about two backwards.

    Lanczos without reorthogonalisation: it holds three vectors of the weights' size, and rounding
    only repeats eigenvalues that were found (Paige 1980), which does no harm to the largest.

    Args:
        model: what is trained.
        train_step: takes a batch, returns its mean loss; twice differentiable.
        batch: what the loss is computed on.
        iterations: most products to take.
        tolerance: residual at which to stop, as a share of the eigenvalue. The eigenvalue itself
            is more exact: its error falls with the square of the residual.
        seed: of the first direction; the run's generators are not touched.

    Raises:
        ValueError: ``iterations`` is below 1.
    """
    if iterations < 1:
        raise ValueError(f"iterations: expected at least 1, got {iterations}")
    with undisturbed(model) as named:
        params = [p for _, p in named]
        generator = torch.Generator().manual_seed(seed)
        direction = [
            torch.randn(p.shape, generator=generator).to(p.device, _wide(p)) for p in params
        ]
        direction = _scaled(direction, 1.0 / _length(direction))
        before = [torch.zeros_like(v) for v in direction]
        rng = RngState.now()
        diagonal: list[float] = []
        beside: list[float] = [0.0]
        found = Sharpness(0.0, math.inf, 0, False)
        for done in range(1, iterations + 1):
            rng.put_back()  # the same dropout in every product: one Hessian, not several
            product = _product(train_step(batch), params, direction)
            diagonal.append(float(_dot(product, direction)))
            rest = [
                h - diagonal[-1] * v - beside[-1] * u
                for h, v, u in zip(product, direction, before, strict=True)
            ]
            length = _length(rest)
            if not math.isfinite(length):
                return Sharpness(math.nan, math.inf, done, False)
            value, residual = _largest(diagonal, beside[1:], length)
            # What is left is rounding: all that the start can reach was seen.
            is_exhausted = length <= _rounding(direction) * max(map(abs, diagonal + beside))
            settled = residual <= tolerance * abs(value) and done >= FEWEST_PRODUCTS
            found = Sharpness(value, residual, done, settled or is_exhausted)
            if found.is_converged:
                break
            beside.append(length)
            before, direction = direction, _scaled(rest, 1.0 / length)
        return found


def _largest(
    diagonal: Sequence[float], beside: Sequence[float], length: float
) -> tuple[float, float]:
    """Return the eigenvalue of the tridiagonal matrix largest in magnitude, and its residual.

    Of two as large as each other it is the positive one: that is where descent diverges.
    """
    matrix = torch.diag(torch.tensor(diagonal, dtype=torch.float64))
    if beside:
        off = torch.tensor(beside, dtype=torch.float64)
        matrix += torch.diag(off, 1) + torch.diag(off, -1)
    values, vectors = torch.linalg.eigh(matrix)
    at = 0 if float(-values[0]) > float(values[-1]) * (1.0 + TIE) else len(values) - 1
    return float(values[at]), abs(length * float(vectors[-1, at]))


def _product(loss: Tensor, params: list[Tensor], direction: list[Tensor]) -> list[Tensor]:
    """Return the Hessian times a direction: the gradient of gradient times direction."""
    grads = torch.autograd.grad(loss, params, create_graph=True, allow_unused=True)
    used = [(g, v) for g, v in zip(grads, direction, strict=True) if g is not None]
    slope = torch.stack([(g * v.to(g)).sum() for g, v in used]).sum()
    if not slope.requires_grad:  # a loss that is linear in its weights has no curvature
        return [torch.zeros_like(v) for v in direction]
    products = torch.autograd.grad(slope, params, allow_unused=True)
    return [
        torch.zeros_like(v) if h is None else h.detach().to(v)
        for v, h in zip(direction, products, strict=True)
    ]


def _dot(first: list[Tensor], second: list[Tensor]) -> Tensor:
    return torch.stack(
        [(a.double() * b.double()).sum() for a, b in zip(first, second, strict=True)]
    ).sum()


def _length(tensors: list[Tensor]) -> float:
    return float(_dot(tensors, tensors).sqrt())


def _scaled(tensors: list[Tensor], factor: float) -> list[Tensor]:
    return [t * factor for t in tensors]


def _wide(param: Tensor) -> torch.dtype:
    """Vectors of half precision would lose each other's direction within a few products."""
    return torch.promote_types(param.dtype, torch.float32)


def _rounding(tensors: list[Tensor]) -> float:
    """The share of a product that may be nothing but rounding: some units of the last place."""
    return 10.0 * max(torch.finfo(t.dtype).eps for t in tensors)
