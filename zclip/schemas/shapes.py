"""What the results look like: dtypes and shapes that the fakes share and backends must match."""

import torch
from torch import Tensor

from zclip.checks import check_one_device, check_tensors
from zclip.layout import NUM_STATS, NUM_VERDICT


def wide_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype of stats, coefs and state: float64 wherever the device has it."""
    return torch.float32 if device.type == "mps" else torch.float64


def norm_dtype(grads: list[Tensor]) -> torch.dtype:
    """Return the dtype of a total norm: float64 if a gradient is, else float32."""
    return torch.float64 if any(g.dtype == torch.float64 for g in grads) else torch.float32


def check_list(tensors: list[Tensor]) -> None:
    """Raise, as a kernel would, if the list cannot be served in one call."""
    check_tensors(tensors)
    check_one_device(tensors)


def empty_stats(grads: list[Tensor]) -> Tensor:
    """Return stats of unknown content for ``grads``."""
    check_list(grads)
    return grads[0].new_empty((len(grads), NUM_STATS), dtype=wide_dtype(grads[0].device))


def empty_judgement(like: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return coefs and verdict of unknown content for ``count`` gradients."""
    coefs = like.new_empty(count, dtype=wide_dtype(like.device))
    return coefs, like.new_empty(NUM_VERDICT, dtype=torch.float32)


def empty_fused(grads: list[Tensor], state: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return norm, stats, coefs and verdict of unknown content."""
    stats = empty_stats(grads)
    norm = state.new_empty((), dtype=norm_dtype(grads))
    return norm, stats, *empty_judgement(state, len(grads))
