"""The other ranks that a clipper adds up with: who they are, and what goes to them when."""

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from zclip.parallel import Record, Reduction, find_reduction, reduce_record
from zclip.targets import Targets

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class RankGroups(NamedTuple):
    """Groups of ranks, as given to :meth:`zclip.Clipper.distribute`; None where not given.

    Attributes:
        process: ranks that hold other elements of the same tensors.
        pipeline: ranks that hold other tensors.
        record: ranks that share losses and extra lanes.
    """

    process: "ProcessGroup | None" = None
    pipeline: "ProcessGroup | None" = None
    record: "ProcessGroup | None" = None


class Peers:
    """Finds out once per list of parameters how to add up, and then does it step by step.

    Attributes:
        groups: the ranks that were named.
        found: the parameters that :meth:`find` was last asked about.
        reduction: how statistics become those of the whole model; None if every rank has them.
    """

    found: Targets | None = None

    def __init__(
        self,
        process_group: "ProcessGroup | None" = None,
        pipeline_group: "ProcessGroup | None" = None,
        record_group: "ProcessGroup | None" = None,
        per_group: bool = False,
    ) -> None:
        self.reduction: Reduction | None = None
        self.groups = RankGroups(process_group, pipeline_group, record_group)
        self._per_group = per_group
        self._order: tuple[Tensor, Tensor] | None = None
        self._whole: Targets | None = None

    @property
    def shares_records(self) -> bool:
        """Whether there are ranks to :meth:`send` to."""
        return self.groups.record is not None

    def find(self, found: Targets) -> Targets:
        """Return the parameters of the whole model, those of other pipeline stages included."""
        if found is not self.found or self._whole is None:
            shards, pipeline = self.groups.process or found.shard_group, self.groups.pipeline
            self.reduction = find_reduction(found.params, found.names, shards, pipeline)
            self.found = self._whole = found
            if self.reduction is not None and self.groups.pipeline is not None:
                self._whole = self._laid_end_to_end(found, self.reduction)
        return self._whole

    def by_group(self, stats: Tensor) -> Tensor:
        """Return statistics of the whole in the order of groups: each is spread over stages."""
        return stats if self._order is None else stats.index_select(0, self._order[0])

    def by_stage(self, coefs: Tensor) -> Tensor:
        """Undo :meth:`by_group`."""
        return coefs if self._order is None else coefs.index_select(0, self._order[1])

    def sizes_of(self, found: Targets, present: list[int] | None) -> list[int]:
        """Return how many rows each group of the whole has."""
        return found.sizes_of(present) if self._whole is found else self._whole.sizes  # type: ignore[union-attr]

    def _laid_end_to_end(self, found: Targets, reduction: Reduction) -> Targets:
        names, own = reduction.names, reduction.own
        self._order = None
        if not self._per_group:
            return found.among(names, own, [len(names)], None)
        stages = reduction.along_pipeline([found.sizes])
        if len(set(map(len, stages))) > 1:
            numbers = [len(sizes) for sizes in stages]
            raise ValueError(
                "per_group=True: expected as many parameter groups on every stage, because group i "
                f"of all stages together has one statistic, got {numbers}; add empty ones"
            )
        members: list[list[int]] = [[] for _ in found.sizes]
        row = 0
        for sizes in stages:
            for group, size in enumerate(sizes):
                members[group] += range(row, row + size)
                row += size
        order = [row for group in members for row in group]
        forth = torch.tensor(order, device=reduction.device)
        self._order = (forth, forth.argsort())
        return found.among(names, own, [len(group) for group in members], order)

    @property
    def own(self) -> slice:
        """Which rows of the whole are those of this rank."""
        return slice(None) if self.reduction is None else self.reduction.own

    def send(
        self,
        loss: Tensor | None,
        extra: Tensor | None,
        tag: Callable[[], Tensor | None],
        found: Targets,
    ) -> Record | None:
        """Add up the record in a message of its own, where it cannot travel with statistics.

        To be called before any rank looks whether it has gradients at all: one without any must not
        leave its peers waiting.
        """
        if self.groups.record is None or self._reaches(self.groups.record):
            return None
        device = found.params[0].device if found.params else torch.device("cpu")
        return reduce_record(loss, extra, tag(), group=self.groups.record, device=device)

    def add_up(
        self,
        stats: Tensor,
        loss: Tensor | None,
        extra: Tensor | None,
        tag: Callable[[], Tensor | None],
        sent: Record | None,
    ) -> tuple[Tensor, Record | None]:
        """Return the statistics of the whole model, and the record.

        Args:
            stats: of this rank.
            loss: of this rank.
            extra: of this rank.
            tag: of this rank; called if there are other ranks.
            sent: the record, if :meth:`send` has added it up already.
        """
        if self.reduction is None:
            return stats, sent
        if sent is None:
            stats, record, _ = self.reduction.reduce(stats, loss, extra, tag())
            return stats, record
        stats, record, _ = self.reduction.reduce(stats, tag=tag())
        return stats, replace(sent, desynced=sent.desynced | record.desynced)

    def _reaches(self, group: "ProcessGroup") -> bool:
        if self.reduction is None:
            return False
        reach = 1
        for crossed in self.reduction.groups:
            reach *= dist.get_world_size(crossed)
        return reach >= dist.get_world_size(group)

    def __getstate__(self) -> dict[str, Any]:
        """Groups and parameters belong to the run, not to a copy or a file."""
        return {**dict.fromkeys(self.__dict__), "groups": RankGroups()}
