"""Four families of models on data that ships with packages: digits, and Python's help text."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

STEPS = 120
WARMUP_STEPS = 10
BATCH = 16
CONTEXT = 12
TEXT_LENGTH = 20_000
CLASSES = 10


class Training(NamedTuple):
    """All that a run is made of, from one seed."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: Any
    loader: Any
    train_step: Callable[[Any], Tensor]
    evaluate: Callable[[], float]


def schedule(step: int) -> float:
    """Warm up, then fall in a line: a run that ends at full speed ends anywhere."""
    return min(1.0, (step + 1) / WARMUP_STEPS) * max(0.02, 1.0 - step / STEPS)


def make(family: str, seed: int) -> Training:
    """Build a training; everything random about it follows from the seed."""
    torch.manual_seed(seed)
    build, load = FAMILIES[family]
    train, held_out = load()
    model = build()
    loader = DataLoader(TensorDataset(*train), batch_size=BATCH, shuffle=True, drop_last=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)

    def train_step(batch: Any) -> Tensor:
        logits, target = model(batch[0]), batch[1]
        return nn.functional.cross_entropy(logits.flatten(0, -2), target.flatten())

    @torch.no_grad()
    def evaluate() -> float:
        model.eval()
        loss = float(train_step(held_out))
        model.train()
        return loss

    return Training(model, optimizer, scheduler, loader, train_step, evaluate)


@functools.cache
def digits() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """The handwritten digits of scikit-learn, 8 x 8 pixels: training and held-out part."""
    from sklearn.datasets import load_digits

    found = load_digits()
    images = torch.tensor(found.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(found.target)
    return (images[:1400], labels[:1400]), (images[1400:], labels[1400:])


@functools.cache
def text() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """The help topics of Python, cut into windows of characters: training and held-out part."""
    from pydoc_data import topics

    joined = "".join(topics.topics[name] for name in sorted(topics.topics))[:TEXT_LENGTH]
    number = {character: i for i, character in enumerate(sorted(set(joined)))}
    codes = torch.tensor([number[c] for c in joined])
    windows = codes.unfold(0, CONTEXT + 1, CONTEXT // 2)
    inputs, targets = windows[:, :-1].contiguous(), windows[:, 1:].contiguous()
    cut = len(inputs) * 4 // 5
    return (inputs[:cut], targets[:cut]), (inputs[cut:], targets[cut:])


def mlp() -> nn.Module:
    """Two hidden layers over pixels, with dropout."""
    hidden = [nn.Flatten(), nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 32)]
    return nn.Sequential(*hidden, nn.GELU(), nn.Linear(32, CLASSES))


def cnn() -> nn.Module:
    """Two convolutions with BatchNorm."""
    first = [nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)]
    second = [nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten()]
    return nn.Sequential(*first, *second, nn.Linear(16 * 16, CLASSES))


class Transformer(nn.Module):
    """One pre-norm block; over characters with a mask, or over patches with a mean at the end."""

    def __init__(self, embed: nn.Module, length: int, width: int, classes: int, causal: bool):
        super().__init__()
        self.embed = embed
        self.place = nn.Parameter(torch.randn(length, width) * 0.02)
        self.block = nn.TransformerEncoderLayer(
            width, 2, 2 * width, dropout=0.1, batch_first=True, norm_first=True
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)
        mask = nn.Transformer.generate_square_subsequent_mask(length) if causal else None
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return logits for every place, or for the image."""
        x = self.embed(inputs) + self.place
        x = self.norm(self.block(x, src_mask=self.mask, is_causal=self.mask is not None))
        return self.head(x if self.mask is not None else x.mean(dim=1))


def gpt() -> nn.Module:
    """A language model over characters."""
    alphabet = 1 + int(max(part.max() for pair in text() for part in pair))
    return Transformer(nn.Embedding(alphabet, 32), CONTEXT, 32, alphabet, causal=True)


class Patches(nn.Module):
    """Cuts images of 8 x 8 into 16 patches and embeds them."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(4, 32)

    def forward(self, images: Tensor) -> Tensor:
        """Return one vector per patch."""
        return self.project(nn.functional.unfold(images, 2, stride=2).transpose(1, 2))


def vit() -> nn.Module:
    """A transformer over patches of images."""
    return Transformer(Patches(), 16, 32, CLASSES, causal=False)


FAMILIES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any]]] = {
    "MLP": (mlp, digits),
    "CNN": (cnn, digits),
    "GPT": (gpt, text),
    "ViT": (vit, digits),
}
