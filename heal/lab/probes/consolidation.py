"""Empirical Fisher information: how much the loss minds each weight, from squared gradients."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Module

from heal.actions import Rollback, action_in_words
from heal.lab.probes.undisturbed import freeze_batch_statistics, pieces_of, undisturbed
from heal.micro_batch import TrainStep

if TYPE_CHECKING:
    from heal.healer import Healer


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


# Elastic weight consolidation: holds weights near those of a snapshot, the important ones most.
#
# This is the form on demand, around a ``train_step``. The action ``AnchorWeights`` of healing, by
# a hook, needs none. Whether it helps is in docs/forecast.md.


class Anchor:
    """Adds ``strength / 2 * sum(F * (w - w0) ** 2)`` to what is minimised (arXiv:1612.00796).

    The loss that is reported stays the loss of the data: only its gradient is changed.

    Args:
        model: what is trained.
        fisher: importance of each weight, by name, as of :func:`fisher_diagonal`.
        strength: the factor; 0 changes nothing.

    Example:
        >>> anchor = Anchor(model, fisher_diagonal(model, train_step, batch), strength=10.0)
        >>> loss = anchor(train_step(batch))
    """

    def __init__(self, model: Module, fisher: dict[str, Tensor], strength: float) -> None:
        named = dict(model.named_parameters())
        unknown = sorted(set(fisher) - set(named))
        if unknown:
            raise ValueError(f"the model has no parameter {unknown[0]!r}, which the Fisher names")
        self.strength = strength
        self._held = [(named[n], f, named[n].detach().clone()) for n, f in fisher.items()]

    def penalty(self) -> Tensor:
        """Return what is added to the loss: 0-dim, on the device of the weights."""
        parts = [(f * (p - start).square()).sum() for p, f, start in self._held]
        return 0.5 * self.strength * torch.stack([part.to(parts[0]) for part in parts]).sum()

    def __call__(self, loss: Tensor) -> Tensor:
        """Return a loss of the same value with the gradient of the anchored one."""
        penalty = self.penalty().to(loss)
        return loss + (penalty - penalty.detach())


class AnchoredRecovery:
    """Anchors a run for some steps after each rollback, to the weights that it returned to.

    If the Fisher information cannot be had, the run goes on without an anchor and a note says why.

    Args:
        healer: whose rollbacks are followed.
        strength: of the anchor.
        steps: how long it holds.

    Attributes:
        make_anchor: takes model, Fisher and strength; :class:`Anchor` unless replaced.

    Example:
        >>> recovery = AnchoredRecovery(healer, strength=10.0, steps=100)
        >>> healer.run(recovery.wrap(train_step), loader, steps=10_000)
    """

    def __init__(self, healer: "Healer", strength: float = 10.0, steps: int = 100) -> None:
        self.healer = healer
        self.strength = strength
        self.steps = steps
        self.make_anchor: Callable[[Module, dict[str, Tensor], float], Anchor] = Anchor
        self._anchor: Anchor | None = None
        self._left = 0
        self._known = len(healer.recoveries)

    @property
    def is_holding(self) -> bool:
        """Whether the next step is anchored."""
        return self._left > 0

    def wrap(self, train_step: TrainStep) -> TrainStep:
        """Return ``train_step`` with the anchor in place where it is due."""

        def anchored(batch: Any) -> Tensor:
            if self._was_rolled_back():
                self._set_anchor(train_step, batch)
            loss = train_step(batch)
            if self._anchor is None or self._left <= 0:
                return loss
            self._left -= 1
            return self._anchor(loss)

        return anchored

    def _set_anchor(self, train_step: TrainStep, batch: Any) -> None:
        self._anchor, self._left = None, 0
        try:
            fisher = fisher_diagonal(self.healer.model, train_step, batch)
            self._anchor = self.make_anchor(self.healer.model, fisher, self.strength)
            self._left = self.steps
        except Exception as error:  # what is only to help must not end the run
            self.healer.note(f"the run is not anchored after its rollback: {error!r}")

    def _was_rolled_back(self) -> bool:
        new = self.healer.recoveries[self._known :]
        self._known = len(self.healer.recoveries)
        return any(action_in_words(Rollback.__name__) in entry["actions"] for entry in new)
