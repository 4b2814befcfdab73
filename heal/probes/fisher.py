"""Empirical Fisher information: how much the loss minds each weight, from squared gradients."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from heal.probes.undisturbed import freeze_batch_statistics, pieces_of, undisturbed
from heal.step.micro_batch import TrainStep


def fisher_diagonal(
    model: Module, train_step: TrainStep, batch: Any, pieces: int | None = None
) -> dict[str, Tensor]:
    """Return the diagonal of the empirical Fisher matrix: mean squared gradient of one sample.

    Costs one forward and backward per piece. With fewer pieces than samples it is cheaper and too
    small: the gradients of samples partly cancel before they are squared. Batch norms use their
    running statistics, for one sample has none.

    Args:
        model: what is trained.
        train_step: takes a batch, returns its mean loss.
        batch: a tensor, or tensors in tuples, lists or dicts, with samples first.
        pieces: into how many the batch is cut; one per sample if None.

    Returns:
        By name of the parameter; zero where the loss does not depend on it.
    """
    with undisturbed(model) as params:
        freeze_batch_statistics(model)
        totals = {name: torch.zeros_like(p) for name, p in params}
        parts = pieces_of(batch, pieces)
        for part in parts:
            loss = train_step(part)
            grads = torch.autograd.grad(loss, [p for _, p in params], allow_unused=True)
            for (name, _), grad in zip(params, grads, strict=True):
                if grad is not None:
                    totals[name] += grad.detach().square()
        return {name: total / len(parts) for name, total in totals.items()}


def importance(model: Module, fisher: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the share of each parameter tensor in what the loss minds.

    It is the second-order cost of losing the tensor, ``0.5 * sum(F * w ** 2)``, over that of
    losing all (optimal brain damage with F for the Hessian); 0-dim tensors that sum to 1.
    """
    named = dict(model.named_parameters())
    costs = {name: 0.5 * (f * named[name].detach().square()).sum() for name, f in fisher.items()}
    total = torch.stack([cost.double() for cost in costs.values()]).sum()
    return {
        name: cost / total.clamp(min=torch.finfo(torch.float64).tiny)
        for name, cost in costs.items()
    }
