"""Four families of models on tasks made from a seed, each trained in about a second on one core."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor, nn

from benchmarks.healed_runs import Stream

STEPS = 500
BATCH = 64
HELD_OUT = 1024
F = nn.functional


class Training(NamedTuple):
    """All that a run is made of.

    The last three are where damage strikes: two layers of the same shape that follow each other,
    and the bias in front of a ReLU.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    loader: Any
    train_step: Callable[[Any], Tensor]
    evaluate: Callable[[], float]
    layer: nn.Module
    twin_layer: nn.Module
    relu_bias: nn.Parameter


Task = tuple[nn.Module, Callable[[int, Generator], Any], Callable[[Any], Tensor]]


def make(family: str, seed: int, order: int = 0, steps: int = STEPS) -> Training:
    """Build a training.

    Args:
        family: a name of ``FAMILIES``.
        seed: of the task, the held-out data and the first weights.
        order: of the training data and of dropout; others give the noise between equal runs.
        steps: batches of one pass over the data.
    """
    build, optimize = FAMILIES[family]
    torch.manual_seed(seed)
    model, draw, loss_of = build(torch.Generator().manual_seed(seed))
    held_out = draw(HELD_OUT, torch.Generator().manual_seed(10_000 + seed))
    optimizer = optimize(model.parameters())
    loader = Stream(steps, lambda step, g: draw(BATCH, g), seed=1000 * (1 + order) + seed)
    torch.manual_seed(1000 * (1 + order) + seed)

    @torch.no_grad()
    def evaluate() -> float:
        model.eval()
        loss = float(loss_of(held_out))
        model.train()
        return loss if math.isfinite(loss) else math.nan

    return Training(
        model,
        optimizer,
        loader,
        loss_of,
        evaluate,
        model.get_submodule("second"),
        model.get_submodule("third"),
        model.get_parameter("relu.bias"),
    )


class Dense(nn.Module):
    """Three hidden layers; the second and the third have the same shape."""

    def __init__(self, inputs: int, width: int, outputs: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(inputs, width), nn.Linear(width, width)
        self.third, self.head = nn.Linear(width, width), nn.Linear(width, outputs)
        self.relu, self.dropout = self.second, nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(F.relu(self.first(x))).relu()
        return self.head(self.third(self.dropout(x)).relu())


def mlp(task: Generator) -> Task:
    """Classes that a linear teacher gives, with noise."""
    model, teacher = Dense(20, 64, 5, dropout=0.1), torch.randn(20, 5, generator=task)

    def draw(count: int, g: Generator) -> Any:
        x = torch.randn(count, 20, generator=g)
        return x, (x @ teacher + torch.randn(count, 5, generator=g)).argmax(1)

    return model, draw, lambda batch: F.cross_entropy(model(batch[0]), batch[1])


def regression(task: Generator) -> Task:
    """A smooth function without noise: the loss comes near zero."""
    model, teacher = Dense(6, 48, 1), torch.randn(6, 4, generator=task) / 2

    def draw(count: int, g: Generator) -> Any:
        x = torch.randn(count, 6, generator=g)
        return x, (x @ teacher).tanh().sum(1, keepdim=True)

    return model, draw, lambda batch: F.mse_loss(model(batch[0]), batch[1])


class Convolutions(nn.Module):
    """Three convolutions with BatchNorm; the second and the third have the same shape."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 12, 3, padding=1), nn.Conv2d(12, 12, 3, padding=1)
        self.third, self.head = nn.Conv2d(12, 12, 3, padding=1), nn.Linear(12 * 4, 4)
        self.norms = nn.ModuleList(nn.BatchNorm2d(12) for _ in range(3))
        self.relu = self.norms[1]

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(self.norms[0](self.first(x)).relu(), 2)
        x = self.norms[1](self.second(x)).relu()
        x = F.max_pool2d(self.norms[2](self.third(x)).relu(), 2)
        return self.head(x.flatten(1))


def cnn(task: Generator) -> Task:
    """Noisy pictures of 8 x 8 pixels, drawn around one pattern for each of four classes."""
    model, patterns = Convolutions(), torch.randn(4, 1, 8, 8, generator=task)

    def draw(count: int, g: Generator) -> Any:
        labels = torch.randint(4, (count,), generator=g)
        noise = torch.randn(count, 1, 8, 8, generator=g)
        return patterns[labels] + 3.5 * noise, labels

    return model, draw, lambda batch: F.cross_entropy(model(batch[0]), batch[1])


class TinyGpt(nn.Module):
    """A causal attention block with a wide ReLU network behind it."""

    def __init__(self, alphabet: int = 24, width: int = 24, length: int = 12) -> None:
        super().__init__()
        self.embed = nn.Embedding(alphabet, width)
        self.place = nn.Parameter(0.02 * torch.randn(length, width))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.queries, self.values = nn.Linear(width, 2 * width), nn.Linear(width, width)
        self.second, self.third = nn.Linear(width, width), nn.Linear(width, width)
        self.relu, self.head = self.second, nn.Linear(width, alphabet)
        self.dropout = nn.Dropout(0.1)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.place
        y = self.norms[0](x)
        query, key = self.queries(y).chunk(2, dim=-1)
        x = x + F.scaled_dot_product_attention(query, key, self.values(y), is_causal=True)
        x = x + self.dropout(self.third(self.second(self.norms[1](x)).relu()))
        return self.head(self.norms[2](x))


def gpt(task: Generator) -> Task:
    """Text of a chain in which each letter follows from the two before it, most of the time.

    Samples come with weights, all 1, because tokens cannot hold the NaN of bad data.
    """
    model, alphabet = TinyGpt(), 24
    follows = torch.randint(alphabet, (alphabet, 3), generator=task)

    def draw(count: int, g: Generator) -> Any:
        text = torch.randint(alphabet, (max(count // 4, 1), 13), generator=g)
        strays = torch.rand(text.shape, generator=g)
        for place in range(1, 13):
            choice = (text[:, place - 1] % 3 + place) % 3
            usual = follows[text[:, place - 1], choice]
            text[:, place] = torch.where(strays[:, place] < 0.8, usual, text[:, place])
        return text, torch.ones(len(text))

    def loss_of(batch: Any) -> Tensor:
        text, weights = batch
        losses = F.cross_entropy(
            model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten(), reduction="none"
        )
        return (losses.view(len(text), -1).mean(1) * weights).mean()

    return model, draw, loss_of


FAMILIES: dict[str, tuple[Callable[[Generator], Task], Callable[[Any], Any]]] = {
    "MLP": (mlp, lambda params: torch.optim.AdamW(params, lr=2e-3, fused=True)),
    "CNN": (cnn, lambda params: torch.optim.SGD(params, lr=0.02, momentum=0.9, fused=True)),
    "GPT": (gpt, lambda params: torch.optim.AdamW(params, lr=3e-3, fused=True)),
    "regression": (regression, lambda params: torch.optim.Adam(params, lr=2e-3, fused=True)),
    "short CNN": (cnn, lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, fused=True)),
}
"""By name, with their optimizers. None has a schedule: every learning rate is judged as it comes.

The last is for runs of 50 steps."""
