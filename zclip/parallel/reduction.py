"""How the statistics of a fixed list of parameters become those of the whole model.

Ranks hold pieces. A row of the table is one tensor of the whole; every rank adds what it holds of
it. Sums of squares come from the first replica only, counts of NaN and Inf from all, because a bad
element may live on one replica alone. The rank that leads a copy says so in one more column: where
a tensor is spread over a mesh smaller than the group (a norm sharded by data beside weights sharded
by data and tensor), each of its copies is counted and the sum divided by their number. So one
all-reduce is right for any mix of meshes, and no rank has to know those of the others.

With a pipeline, ranks hold different tensors. Their lists are laid end to end, once, when the
parameters are first seen; from then on every rank knows the row of every tensor.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from zclip.layout import COPIES, NAN, NUM_STATS, SUMSQ
from zclip.parallel.groups import spanning_group
from zclip.parallel.placement import (
    PLAIN,
    Share,
    check_not_partial,
    has_dtensor,
    is_dtensor,
    local_part,
    share_of,
)
from zclip.parallel.record import Record, mask_from, num_extra, pack, rows_of, unpack
from zclip.schemas import wide_dtype

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_KEPT = 4  # reductions remembered for callers that have nowhere to keep one


class Reduced(NamedTuple):
    """Statistics of the whole model, the same bits on every rank."""

    stats: Tensor  # float64 [len(names), 3]
    record: Record
    copies: Tensor  # float64 [len(names)]: how often each tensor was counted before dividing


class Reduction:
    """Knows which piece of which parameter this rank holds, and with whom to add up.

    Making one may take messages among ranks (once, for a pipeline or a new group); using it takes
    one all-reduce, two in a pipeline: one over the ranks of the stage, one along the pipeline.

    Args:
        tensors: parameters, or the tensors themselves for :meth:`local_parts`.
        names: what users call them.
        process_group: over which the squares of plain tensors add up, because each rank holds
            other elements of them. Without it plain tensors are replicas, and counted once.
        pipeline_group: ranks that hold other tensors, one rank of every stage.

    Attributes:
        names: of all rows, those of other pipeline stages included.
        own: which of the rows are ours.
        groups: over which the vector is added up, in this order.
        is_parted: whether plain tensors are parts of larger ones, not replicas.
        counted: for each of our tensors, whether the squares that we hold are added.
    """

    def __init__(
        self,
        tensors: Sequence[Tensor],
        names: Sequence[str],
        process_group: "ProcessGroup | None" = None,
        pipeline_group: "ProcessGroup | None" = None,
    ) -> None:
        self._tensors = [weakref.ref(t) for t in tensors]
        self._own_names = list(names)
        self._wanted = (process_group, pipeline_group)
        self.is_parted = process_group is not None
        self._world = dist.group.WORLD
        shares: dict[Any, Share] = {}
        self._shares: list[Share | None] = []
        self._placements: list[Any] = []
        for tensor, name in zip(tensors, names, strict=True):
            self._shares.append(_share(tensor, name, shares))
            self._placements.append(tensor.placements if is_dtensor(tensor) else None)
        rank_sets = {share.ranks for share in shares.values()}
        group = spanning_group(rank_sets, process_group, pipeline_group is not None)
        first = group is None or dist.get_rank(group) == 0
        # Plain tensors: every rank holds a part if a group was given, else they are replicas.
        plain = Share(first or process_group is not None, first, ())
        filled = [share or plain for share in self._shares]
        self.groups = [g for g in (group, pipeline_group) if g is not None]
        self.names, self.own = _table(self._own_names, pipeline_group)
        self.device = _device_of(tensors, self.groups)
        self.counted = [share.counts for share in filled]
        self._counts = mask_from(self.counted, self.device)
        self._leads = mask_from([share.leads for share in filled], self.device)
        self._nothing = torch.empty(0, device=self.device)

    def fits(
        self,
        tensors: Sequence[Tensor],
        names: Sequence[str] | Callable[[], Sequence[str]],
        process_group: "ProcessGroup | None",
        pipeline_group: "ProcessGroup | None",
    ) -> bool:
        """Return whether this was made for these very tensors, names and groups."""
        return (
            len(tensors) == len(self._tensors)
            and (process_group, pipeline_group) == self._wanted
            and self._world is dist.group.WORLD  # else the groups are gone with their world
            and (callable(names) or self._own_names == names)
            and all(kept() is t for kept, t in zip(self._tensors, tensors, strict=True))
        )

    def local_parts(self, tensors: Sequence[Tensor | None]) -> list[Tensor]:
        """Return what this rank holds of each, the same memory; an empty tensor for None.

        Raises:
            TypeError: one is ``Partial``, or not placed as the parameter is.
        """
        if len(set(map(id, tensors))) < len(tensors):  # tied: counted once
            first = {id(t): i for i, t in reversed(list(enumerate(tensors)))}
            tensors = [t if first[id(t)] == i else None for i, t in enumerate(tensors)]
        parts: list[Any] = []
        for i, (tensor, planned) in enumerate(zip(tensors, self._placements, strict=True)):
            if tensor is None:
                parts.append(self._nothing)
            elif planned is None and type(tensor) in PLAIN:
                parts.append(tensor)
            elif getattr(tensor, "placements", None) == planned:
                parts.append(tensor if planned is None else local_part(tensor))
            else:
                self._refuse(i, tensor)
        return parts

    def reduce(
        self,
        stats: Tensor,
        loss: Tensor | None = None,
        extra: Tensor | None = None,
        tag: Tensor | None = None,
        *,
        is_max: bool = False,
    ) -> Reduced:
        """Add up over all ranks, which all have to come here; nothing waits.

        Args:
            stats: float64 [N, 3] of the local parts, columns as in :mod:`zclip.layout`.
            loss: as for :func:`zclip.parallel.reduce_record`.
            extra: as for :func:`zclip.parallel.reduce_record`.
            tag: as for :func:`zclip.parallel.reduce_record`.
            is_max: the first column holds maxima, and the result is their largest, not a sum. The
                rest of the record means nothing then.
        """
        extra_lanes = num_extra(extra)
        vector = pack(self.device, len(self.names), loss, extra, tag)
        rows = rows_of(vector, extra_lanes)
        ours = rows[self.own]
        # Not a product: the sum of a replica may be Inf, and Inf * 0 is NaN.
        ours[:, SUMSQ] = torch.where(self._counts, stats[:, SUMSQ], 0.0)
        ours[:, NAN:COPIES] = stats[:, NAN:]
        ours[:, COPIES] = self._leads
        for group in self.groups:
            if dist.get_world_size(group) > 1:
                op = dist.ReduceOp.MAX if is_max else dist.ReduceOp.SUM
                dist.all_reduce(vector, op=op, group=group)
        whole = rows[:, :NUM_STATS].to(wide_dtype(self.device), copy=True)
        copies = rows[:, COPIES].clamp(min=1.0)
        if not is_max:
            whole[:, SUMSQ] /= copies
        return Reduced(whole, unpack(vector, loss, extra_lanes), copies)

    def along_pipeline(self, ours: list[Any]) -> list[Any]:
        """Return what every stage put in, end to end; without a pipeline, what we did.

        All stages have to come here together, and wait: not in every step.
        """
        pipeline_group = self._wanted[1]
        if pipeline_group is None:
            return ours
        return [entry for stage in _gathered(ours, pipeline_group) for entry in stage]

    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        """Give every rank the values that the first has, in place."""
        for group in self.groups:
            for tensor in tensors:
                dist.broadcast(tensor, group=group, group_src=0)

    def _refuse(self, i: int, tensor: Any) -> None:
        name = f"the gradient of {self._own_names[i]}"
        if is_dtensor(tensor):
            check_not_partial(tensor, name)
        placed = tensor.placements if is_dtensor(tensor) else "a plain Tensor"
        wanted = self._placements[i] or "a plain Tensor"
        raise TypeError(
            f"{name}: expected the placement of its parameter, {wanted}, got {placed}; use "
            "param.grad.redistribute(placements=param.placements)"
        )


_recent: list[Reduction] = []


def find_reduction(
    tensors: Sequence[Tensor],
    names: Sequence[str] | Callable[[], Sequence[str]],
    process_group: "ProcessGroup | None" = None,
    pipeline_group: "ProcessGroup | None" = None,
) -> Reduction | None:
    """Return the reduction for these tensors; None if there is nothing to add up.

    That is: no DTensor among them and no group given. The last few are remembered. Names matter in
    errors and states; who needs them in errors only gives a function, called if there is a need.
    """
    if process_group is None and pipeline_group is None and not has_dtensor(tensors):
        return None
    for kept in _recent:
        if kept.fits(tensors, names, process_group, pipeline_group):
            return kept
    named = names() if callable(names) else names
    made = Reduction(tensors, named, process_group, pipeline_group)
    _recent.insert(0, made)
    del _recent[_KEPT:]
    return made


def _share(tensor: Any, name: str, known: dict[Any, Share]) -> Share | None:
    if not is_dtensor(tensor):
        return None
    key = (tensor.device_mesh, tensor.placements)
    if key not in known:
        known[key] = share_of(tensor, name)
    return known[key]


def _table(names: list[str], pipeline_group: "ProcessGroup | None") -> tuple[list[str], slice]:
    if pipeline_group is None:
        return names, slice(0, len(names))
    stages = _gathered(names, pipeline_group)
    me = dist.get_rank(pipeline_group)
    start = sum(map(len, stages[:me]))
    flat = [name for stage in stages for name in stage]
    if len(set(flat)) < len(flat):  # each stage numbers its own
        flat = [f"stages[{s}].{name}" for s, stage in enumerate(stages) for name in stage]
    return flat, slice(start, start + len(names))


def _gathered(ours: Any, group: "ProcessGroup") -> list[Any]:
    everyones: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyones, ours, group=group)
    return everyones


def _device_of(tensors: Sequence[Tensor], groups: "Sequence[ProcessGroup]") -> torch.device:
    if tensors:
        return tensors[0].device
    return torch.device("cuda" if dist.get_backend(groups[0]) == "nccl" else "cpu")
