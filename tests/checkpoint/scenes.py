"""Small runs and stores for the tests of checkpoints."""

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from heal import checkpoint

torch.set_num_threads(1)


@dataclass
class Run:
    """A model with all that training changes: frozen weights, buffers, moments, a schedule."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: Any

    def train(self, steps: int) -> "Run":
        for _ in range(steps):
            x = torch.randn(6, 4) + random.random()
            self.model(x).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()
        return self

    def save(self, directory: Path, step: int, **options: Any) -> Path:
        return checkpoint.save(
            directory, step, self.model, self.optimizer, self.scheduler, **options
        )

    def load(self, directory: Path, **options: Any) -> Any:
        return checkpoint.load(directory, self.model, self.optimizer, self.scheduler, **options)

    def bits(self) -> list[Any]:
        """All that training changes, and what the generators would draw next."""
        moments = [
            value for p in self.model.parameters() for value in self.optimizer.state[p].values()
        ]
        tensors = [*self.model.state_dict().values(), *moments, torch.get_rng_state()]
        drawn = torch.tensor(random.getstate()[1])
        return [t.detach().clone() for t in (*tensors, drawn)]


def run(seed: int = 0) -> Run:
    torch.manual_seed(seed)
    random.seed(seed)
    layers = [nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 2)]
    model = nn.Sequential(*layers)
    model[0].bias.requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 5, 5])
    return Run(model, optimizer, scheduler)


def assert_same(first: list[Any], second: list[Any]) -> None:
    assert len(first) == len(second)
    for i, (a, b) in enumerate(zip(first, second, strict=True)):
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        assert torch.equal(a, b), f"item {i} differs"


def saved_at(directory: Path, *steps: int) -> dict[int, list[Any]]:
    """Save a run at these steps; return what it was at each."""
    there = run()
    done, bits = 0, {}
    for step in steps:
        there.train(step - done)
        done = step
        there.save(directory, step, keep=len(steps))
        bits[step] = there.bits()
    return bits


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())
