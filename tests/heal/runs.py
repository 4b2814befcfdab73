"""Small training runs for the tests of the healing loop: with a healer, and bare."""

import random
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from heal import Healer, HealingConfig
from heal.actions import HealingError, Rollback, ScaleLr, SkipBatches
from heal.policy import LR_FLOOR
from heal.testing import Chaos

torch.set_num_threads(1)  # tiny tensors: threads cost more than they bring

QUICK = {"snapshot_interval": 10, "quarantine_steps": 4, "check_interval": 10, "lr_ramp_steps": 20}
"""Settings for runs of a hundred steps instead of a hundred thousand."""


def quick(**changes: Any) -> HealingConfig:
    return HealingConfig(**{**QUICK, "zclip_enabled": False, **changes})


def mlp(dropout: float = 0.1) -> nn.Module:
    layers = [nn.Linear(8, 32), nn.GELU(), nn.Dropout(dropout), nn.Linear(32, 16), nn.GELU()]
    return nn.Sequential(*layers, nn.Linear(16, 1))


class TinyGpt(nn.Module):
    """One attention block over a small alphabet, with tied embeddings."""

    def __init__(self, alphabet: int = 16, width: int = 16, length: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(alphabet, width)
        nn.init.normal_(self.embed.weight, std=0.1)
        self.place = nn.Parameter(torch.randn(length, width) * 0.02)
        self.block = nn.TransformerEncoderLayer(
            width, 2, 2 * width, dropout=0.1, batch_first=True, norm_first=True
        )
        self.head = nn.Linear(width, alphabet, bias=False)
        self.head.weight = self.embed.weight
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.place
        return self.head(self.block(x, src_mask=self.mask, is_causal=True))


@dataclass
class Setup:
    """Model, optimizer and loader, all from one seed; ``train_step`` computes the loss."""

    model: nn.Module
    optimizer: Any
    loader: Any
    train_step: Any
    scheduler: Any = None
    config: HealingConfig = field(default_factory=quick)
    options: dict[str, Any] = field(default_factory=dict)

    def healer(self, **options: Any) -> Healer:
        return Healer(
            self.model,
            self.optimizer,
            self.scheduler,
            self.config,
            **{"sleep": lambda seconds: None, **self.options, **options},
        )

    def run(self, steps: int, **options: Any) -> Healer:
        healer = self.healer(**options)
        healer.run(self.train_step, self.loader, steps, progress=False)
        return healer

    def bare(self, steps: int) -> None:
        """The same without a healer."""
        done = 0
        while True:
            for batch in self.loader:
                self.optimizer.zero_grad()
                self.train_step(batch).backward()
                self.optimizer.step()
                if self.scheduler is not None:
                    self.scheduler.step()
                done += 1
                if done == steps:
                    return


def seeded(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)


def regression(seed: int = 0, *, workers: int = 0, model: Any = None, **config: Any) -> Setup:
    seeded(seed)
    model = mlp() if model is None else model()
    inputs = torch.randn(256, 8)
    targets = inputs[:, :1].sin() + 0.1 * torch.randn(256, 1)
    loader = DataLoader(
        TensorDataset(inputs, targets), batch_size=16, shuffle=True, num_workers=workers
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)

    def train_step(batch):
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    return Setup(model, optimizer, loader, train_step, config=quick(**config))


def language(seed: int = 0, **config: Any) -> Setup:
    seeded(seed)
    model = TinyGpt()
    starts = torch.randint(0, 16, (256, 1))
    tokens = (starts + 3 * torch.arange(9)) % 16
    loader = DataLoader(TensorDataset(tokens), batch_size=16, shuffle=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)

    def train_step(batch):
        logits = model(batch[0][:, :-1])
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch[0][:, 1:].flatten())

    return Setup(model, optimizer, loader, train_step, config=quick(**config))


def fingerprint(setup: Setup) -> list[Any]:
    """All that training changes, and the generators, as something that can be compared."""
    model = [t.detach().clone() for t in (*setup.model.parameters(), *setup.model.buffers())]
    state = [
        value.detach().clone() if isinstance(value, torch.Tensor) else value
        for group in setup.optimizer.param_groups
        for p in group["params"]
        for value in setup.optimizer.state.get(p, {}).values()
    ]
    rng = [torch.get_rng_state(), torch.tensor(random.getstate()[1])]
    lrs = [torch.as_tensor(group["lr"]) for group in setup.optimizer.param_groups]
    return [*model, *state, *lrs, *rng]


def assert_same(first: list[Any], second: list[Any]) -> None:
    assert len(first) == len(second)
    for i, (a, b) in enumerate(zip(first, second, strict=True)):
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b, f"item {i} differs"


def roll_back_after_skipped(healer: Healer, patience: int = 5) -> None:
    """Have every ``patience``-th skipped step in a row rolled back, with a lower rate after it.

    For tests that need some rollback, whatever it is for. Snapshots from before must be there.
    """
    config = healer.config

    @healer.on_instability
    def hook(diagnosis: Any, plan: Any) -> Any:
        good = [step for step in healer.snapshots() if step <= diagnosis.bad_step]
        if not diagnosis.cause.about.is_nonfinite or diagnosis.streak % patience or not good:
            return None
        target = max(good)
        first = target if config.after_rollback == "skip_data" else max(diagnosis.bad_step, target)
        return (
            Rollback(target),
            SkipBatches(first, diagnosis.step + 1),
            ScaleLr(config.lr_factor, LR_FLOOR, config.lr_ramp_steps),
        )


def strike(setup, faults, steps, healer=None, **options):
    """Train with faults; return the healer."""
    healer = healer or setup.healer(**options)
    chaos = Chaos(healer, faults)
    healer.run(chaos.wrap(setup.train_step), chaos.wrap_loader(setup.loader), steps, progress=False)
    return healer


def halted(setup, faults, steps=400, **options):
    """Train with faults until healing gives up; return what it raised."""
    with pytest.raises(HealingError) as caught:
        strike(setup, faults, steps, **options)
    return caught.value
