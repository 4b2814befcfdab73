"""Small problems that set-ups change on purpose."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Generator, Tensor, nn

from benchmarks.healed_runs import Stream

STEPS, CHANGE = 500, 250  # steps of a set-up, and when what is meant to change does
BATCH = 32
F = nn.functional


def mlp(inputs: int, outputs: int, width: int = 48, dropout: float = 0.0) -> nn.Sequential:
    """Two hidden layers."""
    return nn.Sequential(
        nn.Linear(inputs, width),
        nn.ReLU(),
        nn.Dropout(dropout),
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Linear(width, outputs),
    )


def adam(model: nn.Module, lr: float = 2e-3, **options: Any) -> torch.optim.Optimizer:
    """AdamW, fused."""
    return torch.optim.AdamW(model.parameters(), lr=lr, fused=True, **options)


class Classes:
    """Inputs of 16 numbers in five classes that a linear teacher gives, with noise.

    Args:
        seed: of the teachers, of the data and, through torch's generator, of the weights.
        steps: batches of the stream.
        batch: samples of a batch.
        noise: of the teacher's answer.
    """

    def __init__(
        self, seed: int, steps: int = STEPS, batch: int = BATCH, noise: float = 0.3
    ) -> None:
        torch.manual_seed(seed)
        task = torch.Generator().manual_seed(seed)
        self.teachers = torch.randn(4, 16, 5, generator=task)
        self.seed, self.steps, self.batch, self.noise = seed, steps, batch, noise

    def draw(self, g: Generator, teacher: int = 0, count: int = 0) -> tuple[Tensor, Tensor]:
        """Return inputs and labels."""
        x = torch.randn(count or self.batch, 16, generator=g)
        answer = x @ self.teachers[teacher]
        return x, (answer + self.noise * torch.randn(answer.shape, generator=g)).argmax(1)

    def stream(self, change: Callable[[int, Generator, Tensor, Tensor], Any] | None = None) -> Any:
        """Return a loader; ``change(step, generator, x, y)`` makes each batch, if given."""

        def make(step: int, g: Generator) -> Any:
            x, y = self.draw(g)
            return (x, y) if change is None else change(step, g, x, y)

        return Stream(self.steps, make, 77 + self.seed)


def cross_entropy(model: nn.Module) -> Callable[[Any], Tensor]:
    """Return the loss of a model on batches of inputs and labels."""
    return lambda batch: F.cross_entropy(model(batch[0]), batch[1])


def ramp(step: int, length: int = 150) -> float:
    """Return 0 before the change, then a line up to 1."""
    return min(max((step - CHANGE) / length, 0.0), 1.0)
