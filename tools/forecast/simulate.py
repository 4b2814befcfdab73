"""Trains many tiny networks at once, and keeps what a healer would have heard of each.

For speed it has optimizers, a z-score clip and faults of its own, for all runs of a group together;
tests hold them to those of torch, of :mod:`zclip` and of :mod:`heal.testing.faults`.
"""

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tools.forecast.architectures import ARCHITECTURES
from tools.forecast.networks import Architecture, Params
from tools.forecast.scenarios import Scenario, plan

OPTIMIZERS = ("sgd", "momentum", "adam", "rmsprop")
BETA1, BETA2, EPS = 0.9, 0.999, 1e-8
# The defaults of zclip.ZClip.
ZCLIP_DECAY, ZCLIP_THRESHOLD, ZCLIP_WARMUP, ZCLIP_LARGEST, ZCLIP_EPS = 0.97, 2.5, 25, 1.0, 1e-6
SWEEP_STEPS, SWEEP_RUNS = 150, 36
LR_CEILING = {"sgd": 2.0, "momentum": 0.5, "adam": 0.1, "rmsprop": 0.05}
"""No one trains with more, though small networks may bear it for a while."""
CORRUPTION = 3.0  # spreads of a tensor that corruption adds to it

COLUMNS = ("loss", "norm", "clipped_norm", "lr", "clipped", "blocked", "weight_norm")
"""What is kept of each step; the rest of a record is not known to these runs."""


@dataclass
class Streams:
    """The records of some runs: float32 [runs, steps, COLUMNS], and what was done to each."""

    records: NDArray[np.float32]
    architecture: list[str]
    optimizer: list[str]
    kind: list[str]
    onset: NDArray[np.int64]
    seed: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.kind)

    def without(self, column: str, every: int = 1) -> "Streams":
        """Return every so-many-th run, as if nobody had told this column."""
        records = self.records[::every].copy()
        records[:, :, COLUMNS.index(column)] = np.nan
        return Streams(
            records,
            self.architecture[::every],
            self.optimizer[::every],
            self.kind[::every],
            self.onset[::every],
            self.seed[::every],
        )


class Trainer:
    """One architecture, one optimizer, many runs.

    Args:
        architecture: what is trained.
        optimizer: one of :data:`OPTIMIZERS`.
        lr: float32 [runs], the base learning rate of each.
        clips: bool [runs], which of them clip by z-score.
        batch_size: samples per step.
        seed: of weights, tasks, data and noise.
    """

    def __init__(
        self,
        architecture: Architecture,
        optimizer: str,
        lr: Tensor,
        clips: Tensor,
        batch_size: int,
        seed: int,
    ) -> None:
        self.architecture = architecture
        self.optimizer = optimizer
        self.lr = lr
        self.clips = clips
        self.batch_size = batch_size
        self.generator = torch.Generator().manual_seed(seed)
        runs = len(lr)
        self.params: Params = architecture.init(runs, self.generator)
        self.tasks = architecture.tasks(runs, self.generator)
        self.first = {k: torch.zeros_like(v) for k, v in self.params.items()}
        self.second = {k: torch.zeros_like(v) for k, v in self.params.items()}
        self.steps_taken = torch.zeros(runs)
        self.mean = torch.zeros(runs)
        self.variance = torch.zeros(runs)
        self.seen = torch.zeros(runs, ZCLIP_WARMUP)  # norms of the warm-up
        self.num_seen = torch.zeros(runs, dtype=torch.int64)

    def step(self, lr_factor: Tensor, noise: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        """Take one step of every run; return float32 [runs, COLUMNS]."""
        batch = self.architecture.batch(self.tasks, shift, self.batch_size, self.generator)
        leaves = {k: v.detach().requires_grad_() for k, v in self.params.items()}
        loss = self.architecture.loss(leaves, batch)
        grads = torch.autograd.grad(loss.sum(), list(leaves.values()))
        grads = tuple(g * _wide(scale, g) for g in grads)
        grads = self._noisy(grads, noise)
        norm = _norm(grads)
        weight_norm = _norm(tuple(self.params.values()))
        blocked = ~(norm.isfinite() & loss.isfinite())
        coef = self._clip(norm, blocked)
        lr = self.lr * lr_factor
        self._update(grads, coef, lr, blocked)
        flags = ((coef < 1).float(), blocked.float())
        return torch.stack((loss.detach(), norm, norm * coef, lr, *flags, weight_norm), 1)

    def _noisy(self, grads: tuple[Tensor, ...], noise: Tensor) -> tuple[Tensor, ...]:
        if not bool((noise > 0).any()):
            return grads
        size = noise * _norm(grads)
        random = tuple(torch.randn(g.shape, generator=self.generator) for g in grads)
        factor = size / _norm(random)
        return tuple(g + r * _wide(factor, g) for g, r in zip(grads, random, strict=True))

    def _clip(self, norm: Tensor, blocked: Tensor) -> Tensor:
        """The z-score rule, for those runs that have it: float32 [runs], 1 where none is due."""
        warming = self.num_seen < ZCLIP_WARMUP
        std = self.variance.sqrt()
        z = (norm - self.mean) / (std + ZCLIP_EPS)
        target = self.mean + ZCLIP_THRESHOLD**2 * std / z.clamp(min=ZCLIP_EPS)
        learned = torch.where(z > ZCLIP_THRESHOLD, target, norm)
        limit = torch.where(warming, norm, learned).clamp(max=ZCLIP_LARGEST)
        coef = torch.where(norm > limit, limit / (norm + ZCLIP_EPS), 1.0)
        learns = ~warming & ~blocked
        mean = torch.where(learns, self.mean + (1 - ZCLIP_DECAY) * (learned - self.mean), self.mean)
        off = (learned - mean).square() - self.variance
        self.variance = torch.where(learns, self.variance + (1 - ZCLIP_DECAY) * off, self.variance)
        self.mean = mean
        if bool(warming.any()):
            self._warm_up(norm, warming & ~blocked)
        return torch.where(self.clips & ~blocked, coef, 1.0)

    def _warm_up(self, norm: Tensor, fills: Tensor) -> None:
        """Keep the norm of these runs; the last that is wanted sets mean and variance."""
        place = fills.unsqueeze(1) & (torch.arange(ZCLIP_WARMUP) == self.num_seen.unsqueeze(1))
        self.seen = torch.where(place, norm.unsqueeze(1), self.seen)
        self.num_seen = self.num_seen + fills
        is_last = fills & (self.num_seen == ZCLIP_WARMUP)
        self.mean = torch.where(is_last, self.seen.mean(1), self.mean)
        self.variance = torch.where(is_last, self.seen.var(1, unbiased=False), self.variance)

    def _update(self, grads: tuple[Tensor, ...], coef: Tensor, lr: Tensor, blocked: Tensor) -> None:
        self.steps_taken = self.steps_taken + (~blocked)
        taken = self.steps_taken.clamp(min=1.0)
        keep = 1.0 - blocked.float()
        for (name, param), raw in zip(self.params.items(), grads, strict=True):
            refused = _wide(blocked, raw)
            grad = torch.where(refused, 0.0, raw * _wide(coef, raw))
            first, second = self.first[name], self.second[name]
            if self.optimizer == "momentum":
                first = torch.where(refused, first, BETA1 * first + grad)
                change = first
            elif self.optimizer == "sgd":
                change = grad
            else:
                decay = BETA2 if self.optimizer == "adam" else 0.99
                second = torch.where(refused, second, decay * second + (1 - decay) * grad**2)
                change, size = grad, second
                if self.optimizer == "adam":
                    first = torch.where(refused, first, BETA1 * first + (1 - BETA1) * grad)
                    change = first / _wide(1 - BETA1**taken, first)
                    size = second / _wide(1 - decay**taken, second)
                change = change / (size.sqrt() + EPS)
            self.first[name], self.second[name] = first, second
            self.params[name] = param - _wide(lr * keep, param) * change

    def drift(self, factor: Tensor) -> None:
        """Multiply all weights, as :mod:`heal.testing.faults` does, run by run."""
        for name, param in self.params.items():
            self.params[name] = param * _wide(factor, param)

    def corrupt(self, which: Tensor) -> None:
        """Add noise of some spreads to the first tensor of these runs."""
        name, param = next(iter(self.params.items()))
        noise = torch.randn(param.shape, generator=self.generator) * CORRUPTION * param.std()
        self.params[name] = param + noise * _wide(which.float(), param)


def simulate(
    architecture: str,
    optimizer: str,
    kinds: list[str],
    *,
    steps: int,
    batch_size: int,
    critical_lr: float,
    seed: int,
) -> Streams:
    """Train one group of runs and return their records; the same seed gives the same bits."""
    random = np.random.default_rng(seed)
    scenario = plan(kinds, steps, random)
    runs = len(kinds)
    lr = critical_lr * 10.0 ** random.uniform(-1.7, -0.6, runs)
    clips = torch.from_numpy(random.random(runs) < 0.5)
    made = ARCHITECTURES[architecture]
    base = torch.from_numpy(lr).float()
    trainer = Trainer(made, optimizer, base, clips, batch_size, seed)
    records = _follow(trainer, scenario, steps)
    return Streams(
        records, [architecture] * runs, [optimizer] * runs, kinds, scenario.onset, [seed] * runs
    )


def _follow(trainer: Trainer, scenario: Scenario, steps: int) -> NDArray[np.float32]:
    names = ("lr", "noise", "scale", "shift", "drift")
    told = {n: torch.from_numpy(getattr(scenario, n)).float() for n in names}
    nan_at, corrupt_at = torch.from_numpy(scenario.nan_at), torch.from_numpy(scenario.corrupt_at)
    rows = []
    for step in range(steps):
        if bool((corrupt_at == step).any()):
            trainer.corrupt(corrupt_at == step)
        scale = torch.where(nan_at == step, torch.nan, told["scale"][:, step])
        now = (told["lr"][:, step], told["noise"][:, step], scale, told["shift"][:, step])
        rows.append(trainer.step(*now))
        if bool((told["drift"][:, step] != 1).any()):
            trainer.drift(told["drift"][:, step])
    return torch.stack(rows, 1).numpy()


def critical_lr(architecture: str, optimizer: str, batch_size: int, seed: int = 0) -> float:
    """Return the learning rate from which training fails: the first, above the best of a sweep,
    that undoes half of what the best one learned. What lies well below it trains.
    """
    name = "mlp" if architecture == "policy" else architecture  # whose own loss says nothing
    lrs = torch.logspace(-4, 1.5, SWEEP_RUNS)
    clips = torch.zeros(SWEEP_RUNS, dtype=torch.bool)
    trainer = Trainer(ARCHITECTURES[name], optimizer, lrs, clips, batch_size, seed)
    one, zero = torch.ones(SWEEP_RUNS), torch.zeros(SWEEP_RUNS)
    losses = torch.stack([trainer.step(one, zero, one, zero)[:, 0] for _ in range(SWEEP_STEPS)])
    first = losses[:3].mean()
    last = losses[-30:].mean(0).nan_to_num(torch.inf, torch.inf, torch.inf)
    smooth = last.unfold(0, 3, 1).median(1).values  # of neighbours: each run has its own task
    best = int(smooth.argmin())
    limit = smooth[best] + 0.5 * (first - smooth[best])
    beyond = torch.nonzero(smooth[best:] > limit).flatten()
    found = float(lrs[best + 1 + int(beyond[0])] if len(beyond) else lrs[-1])
    return min(found, LR_CEILING[optimizer])


def _wide(values: Tensor, like: Tensor) -> Tensor:
    return values.view(-1, *[1] * (like.dim() - 1))


def _norm(tensors: tuple[Tensor, ...]) -> Tensor:
    squares = torch.stack([t.flatten(1).square().sum(1) for t in tensors])
    return squares.sum(0).sqrt()
