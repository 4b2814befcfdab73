"""What ranks exchange: facts in the record of every step, and rare votes.

The facts are lanes of the one vector that is added up in a step (:mod:`zclip.parallel`), so that
every rank reads the same and makes the same plan. Votes wait for all ranks; they are taken only
where a plan is carried out, which all ranks do in the same step.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple, overload

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

from heal.cluster.launch import RankGroup
from heal.data.split import CannotSplit, num_samples, split
from heal.record import FAILED, HOST_FLAGS, NO_FLAG, Flag
from zclip.layout import FOREIGN_WRITE, LOSS_MEAN_COLUMN
from zclip.parallel import reduce_record
from zclip.parallel.placement import is_dtensor

RANKS, LOSS, HAS_LOSS, SECONDS, LR, SCHEDULED_LR, HAS_FAILED = range(7)
FIRST_FLAG = 7
MEASURED_FLAGS = (Flag.STATE_NONFINITE, Flag.FOREIGN_WRITE)
SHARED_FLAGS = MEASURED_FLAGS + HOST_FLAGS
NUM_LANES = FIRST_FLAG + len(SHARED_FLAGS)
"""Lanes of this package: sums over the ranks, then one lane per flag: those that fused optimizers
measured in their last update, and those of the host."""


class HostFacts(NamedTuple):
    """What the host of one rank knows of a step before it is taken."""

    seconds: float = math.nan
    lr: float = math.nan
    scheduled_lr: float = math.nan
    flags: Flag = NO_FLAG
    micro_batches: int = 1


NO_FACTS = HostFacts()


class Ranks:
    """The ranks that act alike: those of ``group``, or all.

    Attributes:
        device: of the parameters.
        size: how many there are; 1 without a process group.
        has_others: whether there are several.
        is_alone: whether this is the only process, in any group.
    """

    def __init__(self, device: torch.device, group: "dist.ProcessGroup | None" = None) -> None:
        is_up = dist.is_available() and dist.is_initialized()
        self.group = group
        self.device = device
        self.size = dist.get_world_size(group) if is_up else 1
        self.has_others = self.size > 1
        self.is_alone = not is_up or dist.get_world_size() == 1
        self._lanes = torch.zeros(NUM_LANES, dtype=torch.float64, device=device)
        self._written = [0.0] * NUM_LANES

    @property
    def record_group(self) -> "dist.ProcessGroup | None":
        """The group over which records are added up; None for a single rank."""
        return (self.group or dist.group.WORLD) if self.has_others else None

    def lanes(self, facts: HostFacts, loss: Tensor | None, health: Sequence[Tensor] = ()) -> Tensor:
        """Return what this rank sends in a step; valid until the next call.

        ``health`` are bits that fused optimizers measured in the update of the step before.
        """
        values = [0.0] * NUM_LANES
        values[RANKS] = 1.0
        values[SECONDS], values[LR] = facts.seconds, facts.lr
        values[SCHEDULED_LR] = facts.scheduled_lr
        values[HAS_LOSS] = float(loss is not None)
        values[HAS_FAILED] = float(bool(facts.flags & FAILED))
        for lane, flag in enumerate(SHARED_FLAGS, FIRST_FLAG):
            values[lane] = float(bool(facts.flags & flag))
        for bits in health:
            if bits.is_cpu:
                values[FIRST_FLAG] += float(int(bits) % FOREIGN_WRITE > 0)
                values[FIRST_FLAG + 1] += float(int(bits) >= FOREIGN_WRITE)
        for lane, value in enumerate(values):
            if value != self._written[lane]:  # a fill is a launch; most lanes never change
                self._lanes[lane].fill_(value)
        self._written = values
        if loss is not None:
            self._lanes[LOSS].copy_(loss.detach().reshape(()), non_blocking=True)
            self._written[LOSS] = math.nan
        for bits in health:
            if not bits.is_cpu:
                self._lanes[FIRST_FLAG].add_(bits.remainder(FOREIGN_WRITE) > 0)
                self._lanes[FIRST_FLAG + 1].add_(bits >= FOREIGN_WRITE)
                self._written[FIRST_FLAG] = self._written[FIRST_FLAG + 1] = math.nan
        return self._lanes

    def reduce(self, lanes: Tensor) -> Tensor:
        """Add the lanes up over all ranks, if no clipper did."""
        return reduce_record(extra=lanes, group=self.record_group, device=lanes.device).extra

    def mean(self, value: Tensor) -> Tensor:
        """Return the mean over all ranks, on the device; nothing waits."""
        if self.has_others:
            dist.all_reduce(value, group=self.record_group)
            value /= self.size
        return value

    def mean_loss(self, summed: Tensor, watched: Tensor) -> Tensor:
        """Return the mean of the losses that were sent; if there is none, the running mean."""
        count = summed[HAS_LOSS]
        running = watched[LOSS_MEAN_COLUMN].to(summed.dtype)
        return torch.where(count > 0, summed[LOSS] / count, running)

    def facts(self, sums: Sequence[float]) -> dict[str, Any]:
        """Return the fields of a record that are in summed lanes, the same on every rank."""
        ranks = max(sums[RANKS], 1.0)
        fields: dict[str, Any] = {
            "seconds": sums[SECONDS] / ranks,
            "lr": sums[LR] / ranks,
            "scheduled_lr": sums[SCHEDULED_LR] / ranks,
        }
        if not sums[HAS_LOSS] > 0:
            fields["loss"] = math.nan
        counts = zip(SHARED_FLAGS, sums[FIRST_FLAG:], strict=True)
        flags = sum(int(flag) for flag, count in counts if count > 0)
        if flags:
            fields["flags"] = Flag(flags)
        return fields

    # Votes. Each waits for all ranks, so every rank must take part.

    def all_agree(self, is_ok: bool) -> bool:
        """Return whether it is true on every rank."""
        return self._least(float(is_ok)) > 0

    def any_has(self, is_so: bool) -> bool:
        """Return whether it is true on some rank."""
        return not self.all_agree(not is_so)

    def least(self, number: int) -> int:
        """Return the least number of all ranks."""
        return int(self._least(float(number)))

    def common(self, steps: Sequence[int]) -> Sequence[int]:
        """Return the steps that every rank has, in the order of ours.

        The ranks vote when the steps are first read; most plans never read them, and nothing waits.
        """
        return CommonSteps(self, list(steps)) if self.has_others else list(steps)

    def abort(self) -> None:
        """Break the process group, so that ranks that wait for us fail now and not in minutes.

        Works with NCCL. With Gloo the others fail when this process ends.
        """
        try:
            dist.distributed_c10d._abort_process_group(self.group)
        except Exception:
            return

    def gather(self, value: Any) -> list[Any]:
        """Return the plain value of every rank, by rank."""
        return RankGroup(self.group).gather(value)

    def _least(self, number: float) -> float:
        if not self.has_others:
            return number
        least = torch.full((), number, dtype=torch.float64, device=self._lanes.device)
        dist.all_reduce(least, op=dist.ReduceOp.MIN, group=self.group)
        return float(least)


class CommonSteps(Sequence[int]):
    """Steps that all ranks have; gathered when first read, in the same step on each rank."""

    def __init__(self, ranks: Ranks, own: list[int]) -> None:
        self._ranks = ranks
        self._own = own
        self._common: list[int] | None = None

    def _known(self) -> list[int]:
        if self._common is None:
            others = [set(steps) for steps in self._ranks.gather(self._own)]
            self._common = [step for step in self._own if all(step in o for o in others)]
        return self._common

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        return self._known()[index]

    def __len__(self) -> int:
        return len(self._known())


STAND_IN_SAMPLES = 2  # one is too few for BatchNorm


class GradientMessages:
    """Holds gradients back until the last piece of a step, and knows what was sent.

    A rank that fails must not leave the others waiting for its gradients. DDP sends them during the
    last backward of a step and only buffers before it, so up to there a stand-in helps: a small
    forward and backward, only for its messages. FSDP sends weights in every forward, and after the
    first of these no stand-in can match. Tensor parallelism sends activations, so there the
    stand-in must have the shapes of the batch that failed.

    Attributes:
        are_under_way: whether a backward has begun whose messages others wait for.
        are_in_every_forward: whether all ranks must call the model equally often in a step.
    """

    def __init__(self, model: Module) -> None:
        self.are_under_way = False
        self._model = model
        self._is_ddp = isinstance(model, DistributedDataParallel)
        self._is_sharded = not self._is_ddp and any(is_dtensor(p) for p in model.parameters())
        self._has_activations = self._is_sharded and _sends_activations(model)
        self.are_in_every_forward = self._is_sharded
        self._was_called = False
        self._good: Any = None
        self._tried: Any = None
        self._keeps = self._is_ddp or self._is_sharded
        if self._keeps:
            model.register_forward_pre_hook(self._note_call, prepend=True)

    def begin(self) -> None:
        """Begin a step: nothing was sent for it."""
        self.are_under_way = self._was_called = False
        self._tried = None

    def note_sent(self) -> None:
        """Note that a backward begins whose messages others wait for."""
        self.are_under_way = True

    def held_back(self, until: bool) -> AbstractContextManager[None]:
        """Send no gradients inside, unless ``until`` says that it is the last piece."""
        if until or not self._is_ddp:
            return nullcontext()
        held: AbstractContextManager[None] = self._model.no_sync()  # type: ignore[operator]
        return held

    def note_tried(self, batch: Any) -> None:
        """Note the batch of a forward."""
        if self._has_activations:
            self._tried = batch

    def note_good(self, batch: Any) -> None:
        """Keep a batch that worked, for a stand-in."""
        if self._keeps:
            self._good = batch

    def can_be_matched(self, calls: int = 1) -> bool:
        """Return whether a stand-in can send all that other ranks still wait for.

        ``calls`` is how often every rank calls the model in this step.
        """
        if self._good is None or self.are_under_way:
            return False
        if self._has_activations and _shapes(self._tried) != _shapes(self._good):
            return False
        return not (self._is_sharded and (self._was_called or calls > 1))

    def sample(self) -> Any:
        """Return a few samples of the last batch that worked; all if shapes must match."""
        if self._has_activations:
            return self._good
        parts = max(1, num_samples(self._good) // STAND_IN_SAMPLES)
        try:
            return split(self._good, parts)[0][0]
        except CannotSplit:
            return self._good  # it worked once

    @contextmanager
    def repeated(self) -> Iterator[None]:
        """Call the model again in a step without sending its buffers again."""
        model: Any = self._model
        if not (self._is_ddp and self._was_called):
            yield
            return
        model.require_forward_param_sync = False  # DDP sets it again after the forward
        yield

    def _note_call(self, *ignored: Any) -> None:
        self._was_called = True


def _sends_activations(model: Module) -> bool:
    """Return whether weights are sharded by more than FSDP, as in tensor parallelism."""
    from torch.distributed.fsdp import FSDPModule

    sharded: list[Any] = [p for p in model.parameters() if is_dtensor(p)]
    splits = [sum(not place.is_replicate() for place in p.placements) for p in sharded]
    has_fsdp = any(isinstance(module, FSDPModule) for module in model.modules())
    return not has_fsdp or max(splits, default=0) > 1


def _shapes(batch: Any) -> list[Any]:
    leaves = tree_leaves(batch)
    return [tuple(leaf.shape) if isinstance(leaf, Tensor) else type(leaf) for leaf in leaves]
