"""The packed vector: what ranks exchange in a step, in one float64 tensor that is summed."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from zclip.layout import (
    LOSS_COUNT,
    LOSS_SUM,
    NUM_RECORD,
    NUM_ROW,
    RANKS,
    TAG,
    TAG_MODULUS,
    TAG_SQUARED,
)
from zclip.parallel.placement import is_dtensor, local_part

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True, slots=True)
class Record:
    """What all ranks exchanged, the same on each; tensors on the device.

    Attributes:
        loss: 0-dim float64, the mean over the ranks that gave one; None if this rank gave None.
        extra: float64 [E], the sums of the extra lanes.
        desynced: 0-dim bool, whether ranks gave different step tags.
    """

    loss: Tensor | None
    extra: Tensor
    desynced: Tensor


def reduce_record(
    loss: Tensor | None = None,
    extra: Tensor | None = None,
    tag: Tensor | None = None,
    *,
    group: "ProcessGroup | None" = None,
    device: torch.device | None = None,
) -> Record:
    """Add up what is known to single ranks only, in one small all-reduce; nothing waits.

    For plain data parallelism, where gradients need no message: their norm is the same on every
    rank already, but losses, signals and memory are not. Where the norm is reduced anyway, the same
    lanes travel with it: see ``extra`` of :meth:`zclip.Clipper.step`. Every rank of the group has
    to call this, with as many lanes.

    Args:
        loss: 0-dim; one with no elements stands for a rank that has none while others do.
        extra: float64 [E], one lane per fact: 1 where it holds and 0 where not, so that the sum
            says how many ranks it holds for; or any number that makes sense when added up.
        tag: 0-dim, the step that this rank believes to be at.
        group: the ranks to add up over; all if None.
        device: where to do it; that of the first tensor given if None.
    """
    given = [t for t in (loss, extra, tag) if t is not None]
    device = device or (given[0].device if given else torch.device("cpu"))
    vector = pack(device, 0, loss, extra, tag)
    dist.all_reduce(vector, group=group)
    return unpack(vector, loss, num_extra(extra))


def pack(
    device: torch.device,
    num_rows: int,
    loss: Tensor | None,
    extra: Tensor | None,
    tag: Tensor | None,
) -> Tensor:
    """Return a vector with its first lanes filled and all rows zero."""
    lanes = NUM_RECORD + num_extra(extra)
    vector = torch.zeros(lanes + NUM_ROW * num_rows, dtype=torch.float64, device=device)
    vector[RANKS].fill_(1.0)
    if tag is not None:
        torch.remainder(tag.to(device, non_blocking=True), TAG_MODULUS, out=vector[TAG])
        torch.square(vector[TAG], out=vector[TAG_SQUARED])
    if loss is not None and loss.numel():
        value = (local_part(loss) if is_dtensor(loss) else loss).detach()
        vector[LOSS_SUM].copy_(value.reshape(()), non_blocking=True)
        vector[LOSS_COUNT].fill_(1.0)
    if extra is not None:
        vector[NUM_RECORD:lanes].copy_(extra.detach(), non_blocking=True)
    return vector


def unpack(vector: Tensor, loss: Tensor | None, extra_lanes: int) -> Record:
    """Return the record that a summed vector begins with."""
    mean = None if loss is None else vector[LOSS_SUM] / vector[LOSS_COUNT]
    # By Cauchy and Schwarz the two are equal only if all tags are; both are exact.
    desynced = vector[TAG_SQUARED] * vector[RANKS] != vector[TAG].square()
    return Record(mean, vector[NUM_RECORD : NUM_RECORD + extra_lanes], desynced)


def rows_of(vector: Tensor, extra_lanes: int) -> Tensor:
    """Return the rows of a vector, float64 [N, 4], as a view."""
    return vector[NUM_RECORD + extra_lanes :].view(-1, NUM_ROW)


def num_extra(extra: Tensor | None) -> int:
    """Return how many extra lanes there are.

    Raises:
        ValueError: they are not a vector.
    """
    if extra is None:
        return 0
    if extra.dim() != 1:
        raise ValueError(f"extra: expected one dimension, got shape {tuple(extra.shape)}")
    return len(extra)


def mask_from(rows: Sequence[bool], device: torch.device) -> Tensor:
    """Return a bool tensor, made by fills alone: uploading it would make the host wait."""
    mask = torch.zeros(len(rows), dtype=torch.bool, device=device)
    start = 0
    for stop in range(1, len(rows) + 1):
        if stop == len(rows) or rows[stop] != rows[start]:
            if rows[start]:
                mask[start:stop].fill_(True)
            start = stop
    return mask
