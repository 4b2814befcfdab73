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
    copies: Mapping[Key, Tensor],
    tensors: Mapping[Key, Tensor],
    without_nan: Mapping[Key, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Copy, hash and measure; return the latter two. What is a run of bytes is read once.

    Args:
        copies: written, by key.
        tensors: read.
        without_nan: see :func:`count_bad`.
    """
    may_hold_inf = without_nan or {}
    runs = [key for key, tensor in tensors.items() if is_run_of_bytes(copies[key], tensor)]
    at_once = set(runs)
    others = [key for key in tensors if key not in at_once]
    rows = copy_and_hash([copies[k] for k in runs], [tensors[k] for k in runs]).tolist()
    hashes = {key: row[0] for key, row in zip(runs, rows, strict=True)}
    counted = zip(runs, rows, strict=True)
    bad = [key for key, row in counted if row[1]]
    num_bad = sum(must_be_finite(key, tensors[key]) for key in bad)
    num_bad += int(count_bad(((k, tensors[k]) for k in bad if k in may_hold_inf), may_hold_inf))
    if others:
        copy_by_kind([copies[k] for k in others], [tensors[k] for k in others], non_blocking=False)
        hashes |= zip(others, fingerprints(tensors[k] for k in others).tolist(), strict=True)
        num_bad += int(count_bad(((k, tensors[k]) for k in others), without_nan))
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


def count_bad(
    tensors: Iterable[tuple[Key, Tensor]], without_nan: Mapping[Key, Tensor] | None = None
) -> Tensor:
    """Count parameters, moments and buffers with NaN or Inf where it must not be; nothing waits.

    A sum is finite only if all it adds up is. It reads memory at full speed whatever the numbers;
    sums of squares do not where they underflow, as those of second moments may.

    Args:
        tensors: by key; those of other kinds are left out.
        without_nan: keys of buffers that may hold Inf but not NaN, and whether they held it from
            the beginning: then they may.
    """
    found = []
    for key, tensor in tensors:
        if must_be_finite(key, tensor):
            total = tensor.sum(dtype=torch.float32 if tensor.dtype in HALF else None)
            found.append(total.isfinite().logical_not())
        elif without_nan is not None and key in without_nan:
            held_before = without_nan[key].to(tensor.device, non_blocking=True)
            found.append(tensor.isnan().any() & ~held_before)
    if not found:
        return torch.zeros((), dtype=torch.int64)
    device = found[0].device
    return torch.stack([one.to(device, non_blocking=True) for one in found]).sum()
