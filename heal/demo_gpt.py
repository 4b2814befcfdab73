"""A small GPT and the text that it learns: the language reference that ships with Python."""

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

CONTEXT = 64
WIDTH = 64
HEADS = 4
BLOCKS = 2
BATCH = 16
TEXT_LENGTH = 200_000  # characters; more are not needed for a few hundred steps


class Gpt(nn.Module):
    """A transformer over characters: pre-norm blocks, tied embeddings."""

    def __init__(self, alphabet: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(alphabet, WIDTH)
        self.place = nn.Parameter(torch.zeros(CONTEXT, WIDTH))
        nn.init.normal_(self.embed.weight, std=0.02)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True
            )
            for _ in range(BLOCKS)
        )
        self.norm = nn.LayerNorm(WIDTH)
        mask = nn.Transformer.generate_square_subsequent_mask(CONTEXT)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits for the character after each one."""
        x = self.embed(tokens) + self.place
        for block in self.blocks:
            x = block(x, src_mask=self.mask, is_causal=True)
        logits: Tensor = self.norm(x) @ self.embed.weight.t()
        return logits

    def loss(self, batch: Tensor) -> Tensor:
        """Return the mean cross-entropy of the next character, in nats."""
        logits = self(batch[:, :-1])
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


@functools.cache
def text() -> tuple[Tensor, int]:
    """Return the text as numbers, int64, and the size of its alphabet."""
    from pydoc_data import topics

    pages: dict[str, str] = topics.topics
    joined = "".join(pages[name] for name in sorted(pages))[:TEXT_LENGTH]
    alphabet = sorted(set(joined))
    number = {character: i for i, character in enumerate(alphabet)}
    return torch.tensor([number[c] for c in joined]), len(alphabet)


class Snippets(Dataset[Tensor]):
    """Pieces of the text, one after the other."""

    def __init__(self) -> None:
        self._tokens, self.alphabet = text()

    def __len__(self) -> int:
        return (len(self._tokens) - 1) // CONTEXT

    def __getitem__(self, index: int) -> Tensor:
        begin = index * CONTEXT
        return self._tokens[begin : begin + CONTEXT + 1]


def build(seed: int, steps: int) -> tuple[Gpt, torch.optim.Optimizer, Any, Any]:
    """Return model, optimizer, scheduler and loader, all from one seed."""
    torch.manual_seed(seed)
    snippets = Snippets()
    model = Gpt(snippets.alphabet)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, fused=True)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 2 * steps)
    loader = DataLoader(snippets, batch_size=BATCH, shuffle=True, drop_last=True)
    return model, optimizer, scheduler, loader


@torch.no_grad()
def evaluate(model: Gpt, loader: Any, batches: int = 20) -> float:
    """Return the mean loss over some batches that are the same in every call."""
    tokens = torch.stack([loader.dataset[i] for i in range(batches * BATCH)])
    return sum(float(model.loss(part)) for part in tokens.split(BATCH)) / batches
