"""Finds copies of one parameter that silently differ: a flipped bit trains on as if it were right.

Every rank hashes what it holds. One all-reduce per group of replicas shows, on the device, whether
all hashes are the same. Only if they differ do the ranks gather them, to find the odd one.
"""

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

import zclip
from heal.buffers import local_part
from heal.cluster.launch import has_peers
from zclip.parallel.placement import is_dtensor


@dataclass(frozen=True, slots=True)
class Mismatch:
    """One tensor whose copies differ.

    Attributes:
        step: at which it was hashed.
        name: of the tensor.
        hashes: rank by rank; equal numbers, equal bits.
        odd_ranks: those whose copy is not that of the majority; empty if there is no majority, as
            between two ranks.
    """

    step: int
    name: str
    hashes: tuple[tuple[int, int], ...]
    odd_ranks: tuple[int, ...]

    def __str__(self) -> str:
        ranks = ", ".join(str(rank) for rank, _ in self.hashes)
        what = f"ranks {ranks} differ, and there is no majority"
        if self.odd_ranks:
            odd = ", ".join(map(str, self.odd_ranks))
            what = f"rank {odd} differs from the majority of ranks {ranks}"
        return f"{self.name} at step {self.step}: {what}"


class _Replicas(NamedTuple):
    """Tensors that the ranks of one group hold the same copies of."""

    group: Any
    ranks: list[int]
    names: list[str]
    tensors: list[Tensor]


class _Sent(NamedTuple):
    step: int
    read_at: int
    replicas: _Replicas
    hashes: Tensor  # int64 [N], ours
    mailbox: zclip.Mailbox


class ReplicaCheck:
    """Compares the bits of parameters across the ranks that should hold the same.

    Plain tensors are compared over ``group``; DTensors along every dimension of their mesh in which
    they are replicated, so that under HSDP each shard is compared with its copies. All ranks call
    :meth:`post` and :meth:`read` alike.

    Args:
        named_tensors: what to compare; parameters, or whatever else is replicated.
        group: the ranks that hold copies of plain tensors (under DDP); all of them if None.
        lag: calls of :meth:`read` after which an answer is looked at; 0 waits for it.

    Attributes:
        agreed_at: step of the newest check that found no difference; None if there is none.

    Raises:
        ValueError: the lag is negative.

    Example:
        >>> check = ReplicaCheck(model.named_parameters())
        >>> if step % 100 == 0:
        ...     check.post(step)
        >>> for mismatch in check.read():
        ...     print(mismatch)
    """

    def __init__(
        self,
        named_tensors: Iterable[tuple[str, Tensor]],
        *,
        group: "dist.ProcessGroup | None" = None,
        lag: int = 2,
    ) -> None:
        if lag < 0:
            raise ValueError(f"lag: expected 0 or more, got {lag}")
        self.agreed_at: int | None = None
        self._named = list(named_tensors)
        self._group = group
        self._lag = lag
        self._calls = 0
        self._sent: deque[_Sent] = deque()

    @torch.no_grad()
    def post(self, step: int) -> None:
        """Hash and compare what is there now; nothing waits."""
        for replicas in self._replicas():
            hashes = torch.ops.zclip.fingerprint(replicas.tensors)
            # The complement turns the order round: one maximum gives the largest and the smallest.
            extremes = torch.cat([hashes, ~hashes])
            dist.all_reduce(extremes, dist.ReduceOp.MAX, group=replicas.group)
            largest, smallest = extremes[: len(hashes)], ~extremes[len(hashes) :]
            mailbox = zclip.Mailbox(lag=0, width=len(hashes))
            mailbox.post(step, largest != smallest)
            self._sent.append(_Sent(step, self._calls + self._lag, replicas, hashes, mailbox))

    def read(self) -> list[Mismatch]:
        """Return what differed in the checks that are ``lag`` calls old."""
        found: list[Mismatch] = []
        read = set()
        while self._sent and self._sent[0].read_at <= self._calls:
            sent = self._sent.popleft()
            read.add(sent.step)
            for step, differs in sent.mailbox.poll():
                bad = [i for i, value in enumerate(differs) if value]
                if bad:  # on all ranks of the group, because all have read the same
                    found += _mismatches(step, sent, bad)
        self.agreed_at = max(read - {m.step for m in found}, default=self.agreed_at)
        self._calls += 1
        return found

    def clear(self) -> None:
        """Forget what is under way: after a rollback it is of another state."""
        self._sent.clear()

    def _replicas(self) -> list[_Replicas]:
        """Sort tensors by the group that replicates them; the same order on every rank."""
        if not has_peers():
            return []
        by_group: dict[Any, _Replicas] = {}
        for name, tensor in self._named:
            for group in _groups_of(tensor, self._group):
                if dist.get_world_size(group) < 2:
                    continue
                if group not in by_group:
                    ranks = dist.get_process_group_ranks(group)
                    by_group[group] = _Replicas(group, ranks, [], [])
                by_group[group].names.append(name)
                by_group[group].tensors.append(local_part(tensor))
        return list(by_group.values())


def _groups_of(tensor: Tensor, group: "dist.ProcessGroup | None") -> list[Any]:
    if not is_dtensor(tensor):
        return [group or dist.group.WORLD]
    mesh = tensor.device_mesh
    if mesh.get_coordinate() is None:
        return []
    return [mesh.get_group(i) for i, p in enumerate(tensor.placements) if p.is_replicate()]


def _mismatches(step: int, sent: _Sent, bad: Sequence[int]) -> list[Mismatch]:
    """Gather the hashes of all ranks, and find those that differ."""
    ranks = sent.replicas.ranks
    gathered = [torch.empty_like(sent.hashes) for _ in ranks]
    dist.all_gather(gathered, sent.hashes, group=sent.replicas.group)
    table = [each.tolist() for each in gathered]
    found = []
    for i in bad:
        hashes = tuple((rank, row[i]) for rank, row in zip(ranks, table, strict=True))
        found.append(Mismatch(step, sent.replicas.names[i], hashes, odd_ranks(hashes)))
    return found


def odd_ranks(hashes: Sequence[tuple[int, int]]) -> tuple[int, ...]:
    """Return the ranks that differ from more than half of all; none if no hash has so many."""
    value, votes = Counter(value for _, value in hashes).most_common(1)[0]
    if 2 * votes <= len(hashes):
        return ()
    return tuple(rank for rank, own in hashes if own != value)
