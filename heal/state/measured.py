"""What vouches for tensors: a hash of their bits, and whether any of them is NaN or Inf."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from heal.state.buffer_copies import STATISTICS
from heal.state.distinct import Key
from heal.state.host_copy import copy_and_hash, is_run_of_bytes
from heal.state.training_state import copy_by_kind
from zclip.ops import by_device

MEASURED = (torch.float32, torch.bfloat16, torch.float16, torch.float64)  # by grad_stats
HALF = (torch.bfloat16, torch.float16)  # whose own range a sum may leave


def copy_on_host(
    copies: Mapping[Key, Tensor], tensors: Mapping[Key, Tensor]
) -> tuple[Tensor, Tensor]:
    """Copy, hash and measure; return the latter two. What is a run of bytes is read once."""
    runs = [key for key, tensor in tensors.items() if is_run_of_bytes(copies[key], tensor)]
    at_once = set(runs)
    others = [key for key in tensors if key not in at_once]
    rows = copy_and_hash([copies[k] for k in runs], [tensors[k] for k in runs]).tolist()
    hashes = {key: row[0] for key, row in zip(runs, rows, strict=True)}
    counted = zip(runs, rows, strict=True)
    num_bad = sum(row[1] for key, row in counted if must_be_finite(key, tensors[key]))
    if others:
        copy_by_kind([copies[k] for k in others], [tensors[k] for k in others], non_blocking=False)
        hashes |= zip(others, fingerprints(tensors[k] for k in others).tolist(), strict=True)
        num_bad += int(count_bad((k, tensors[k]) for k in others))
    return torch.tensor([hashes[key] for key in tensors], dtype=torch.int64), torch.tensor(num_bad)


def must_be_finite(key: Key, tensor: Tensor) -> bool:
    """Tell whether NaN or Inf in it is a fault. Masks may hold Inf; running statistics may not."""
    if tensor.dtype not in MEASURED:
        return False
    return key[0] in ("parameter", "state") or (
        key[0] == "buffer" and str(key[1]).rpartition(".")[2] in STATISTICS
    )


def fingerprints(tensors: Iterable[Tensor]) -> Tensor:
    """Hash each tensor: int64 [N], on the device of the first; nothing waits."""
    listed = list(tensors)
    if not listed:
        return torch.empty(0, dtype=torch.int64)
    members = by_device(listed)
    parts = {
        device: torch.ops.zclip.fingerprint([listed[i] for i in indices])
        for device, indices in members.items()
    }
    if len(parts) == 1:
        only: Tensor = next(iter(parts.values()))
        return only
    rows: list[Tensor] = [listed[0]] * len(listed)
    for device, indices in members.items():
        moved = parts[device].to(listed[0].device, non_blocking=True)
        for i, row in zip(indices, moved.unbind(), strict=True):
            rows[i] = row
    return torch.stack(rows)


def count_bad(tensors: Iterable[tuple[Key, Tensor]]) -> Tensor:
    """How many parameters, moments and running statistics have NaN or Inf in them.

    A sum is finite only if all it adds up is. It reads memory at full speed whatever the numbers;
    sums of squares do not where they underflow, as those of second moments may.
    """
    sums = [
        t.sum(dtype=torch.float32 if t.dtype in HALF else None)
        for key, t in tensors
        if must_be_finite(key, t)
    ]
    if not sums:
        return torch.zeros((), dtype=torch.int64)
    device = sums[0].device
    together = torch.stack([total.to(device, torch.float64, non_blocking=True) for total in sums])
    return together.isfinite().logical_not().sum()
