"""A batch of a trainer in pieces, each weighted so that the gradient stays that of the whole."""

from typing import Any

import torch
from torch import Tensor

from heal.data.split import CannotSplit, num_samples, split

PAIRED = "DataCollatorForPreference"
"""Collators of this name stack all chosen samples on all rejected ones."""

SUMMED = ("dapo", "cispo", "vespo")
"""Losses of GRPO that are sums over tokens, divided by the tokens of all pieces together."""


def is_paired(trainer: Any) -> bool:
    """Tell whether the first half of a batch belongs to the second, row by row."""
    kinds = type(getattr(trainer, "data_collator", None)).__mro__
    return any(kind.__name__ == PAIRED for kind in kinds)


def adds_up(trainer: Any, num_items_in_batch: Any) -> bool:
    """Tell whether the losses of pieces are to be added; else they are means, to be weighted.

    A loss divided by the items of the whole step adds up. Where trainers say nothing, the rule is
    that of ``Trainer.training_step``.
    """
    scaled = getattr(trainer, "loss_is_scaled_for_ga", None)
    if hasattr(trainer, "loss_type") and scaled:
        return trainer.loss_type in SUMMED
    if scaled is not None:
        return bool(scaled)
    by_model = trainer.model_accepts_loss_kwargs and num_items_in_batch is not None
    return bool(by_model or trainer.compute_loss_func is not None)


def in_pieces(inputs: Any, parts: int, paired: bool) -> list[tuple[Any, float]]:
    """Cut prepared inputs; return each piece with its share of the samples.

    Args:
        inputs: what the model or the loss is given.
        parts: how many pieces, at most.
        paired: keep row ``i`` together with row ``i + half``.
    """
    if paired:
        return _paired_pieces(inputs, parts)
    try:
        pieces = split(inputs, parts)
    except CannotSplit:
        return [(inputs, 1.0)]  # whole: what cannot be cut may fit, and a wrong cut is worse
    total = sum(count for _, count in pieces)
    return [(piece, count / total) for piece, count in pieces]


def count_samples(inputs: Any, paired: bool) -> int:
    """Return how many pieces a batch could be cut into."""
    return _num_pairs(inputs) if paired else num_samples(inputs)


def _paired_pieces(inputs: dict[str, Any], parts: int) -> list[tuple[Any, float]]:
    half = _num_pairs(inputs)
    rows = split(torch.arange(half), parts)
    return [
        ({name: _rows(value, index, half) for name, value in inputs.items()}, count / half)
        for index, count in rows
    ]


def _num_pairs(inputs: dict[str, Any]) -> int:
    """Count by the first tensor, that of tokens: log-probabilities are half as long."""
    tokens = (v for v in inputs.values() if isinstance(v, Tensor) and v.dim() > 0)
    return next((len(v) // 2 for v in tokens), 1)


def _rows(value: Any, index: Tensor, half: int) -> Any:
    if not isinstance(value, Tensor) or value.dim() == 0:
        return value
    index = index.to(value.device, non_blocking=True)
    if len(value) == 2 * half:
        return torch.cat([value[index], value[index + half]])
    return value[index] if len(value) == half else value
