"""Copies within host memory, in one read of it: hashed and checked for NaN and Inf on the way."""

from collections.abc import Sequence

import torch
from torch import Tensor

import zclip  # noqa: F401  declares torch.ops.zclip

PLAIN = (Tensor, torch.nn.Parameter)  # whose bytes are all there is to them


def is_run_of_bytes(target: Tensor, source: Tensor) -> bool:
    """Tell whether a copy from one to the other moves bytes and nothing else, in host memory."""
    return (
        type(target) in PLAIN
        and type(source) in PLAIN
        and target.device.type == source.device.type == "cpu"
        and target.dtype == source.dtype
        and target.shape == source.shape
        and target.is_contiguous()
        and source.is_contiguous()
        and not source.is_complex()  # which may be a conjugate that is yet to be taken
        and source.data_ptr() != target.data_ptr()
    )


@torch.no_grad()
def copy_and_hash(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> Tensor:
    """Copy runs of bytes; see :func:`zclip.reference.copy_and_hash_`.

    Returns:
        int64 [N, 2]: the fingerprint of each source, and 1 where an element is not finite.
    """
    if not sources:
        return torch.empty(0, 2, dtype=torch.int64)
    rows: Tensor = torch.ops.zclip.copy_and_hash_(list(targets), list(sources))
    # To autograd an operator of ours is a stranger: a graph that still needs what was here before
    # must hear of it, as it would of copy_().
    torch.autograd.graph.increment_version(list(targets))
    return rows
