"""Which part of which whole a tensor is, under any of torch's ways to cut one into shards."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Chunk:
    """A box within a larger tensor."""

    whole: tuple[int, ...]
    start: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def box(self) -> tuple[slice, ...]:
        """Return where the part is in the whole."""
        return tuple(slice(b, b + n) for b, n in zip(self.start, self.shape, strict=True))

    def overlap(self, other: "Chunk") -> tuple[tuple[slice, ...], tuple[slice, ...], int] | None:
        """Return where both boxes meet, in coordinates of each, and how many elements that is."""
        mine, theirs, count = [], [], 1
        for begin, size, their_begin, their_size in zip(
            self.start, self.shape, other.start, other.shape, strict=True
        ):
            low, high = max(begin, their_begin), min(begin + size, their_begin + their_size)
            if high <= low:
                return None
            mine.append(slice(low - begin, high - begin))
            theirs.append(slice(low - their_begin, high - their_begin))
            count *= high - low
        return tuple(mine), tuple(theirs), count


def all_of(tensor: Tensor) -> Chunk:
    """Return the box that is the whole tensor."""
    return Chunk(tuple(tensor.shape), (0,) * tensor.dim(), tuple(tensor.shape))


def chunk_of(tensor: Any) -> Chunk | None:
    """Return which part of a DTensor this rank has; None for a tensor that is no part.

    Raises:
        NotImplementedError: it is cut in a way that no box describes.
    """
    if not hasattr(tensor, "_local_tensor") or not hasattr(tensor, "placements"):
        return None
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if all(isinstance(p, Replicate) for p in tensor.placements):
        return all_of(tensor)
    for placement in tensor.placements:
        if not isinstance(placement, (Replicate, Shard)):
            raise NotImplementedError(f"a tensor with placement {placement} is in no single place")
    shape, start = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    local: Tensor = tensor._local_tensor
    if tuple(shape) != tuple(local.shape):
        raise NotImplementedError(
            f"a part of shape {tuple(local.shape)} lies where {tuple(shape)} was expected"
        )
    if local.numel() == 0:
        start = tuple(0 for _ in shape)
    return Chunk(tuple(tensor.shape), tuple(int(s) for s in start), tuple(local.shape))
