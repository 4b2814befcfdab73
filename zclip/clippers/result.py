"""What a clipper found out in one step, and how the verdicts of several groups become one."""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from zclip.layout import (
    BLOCKED,
    CLIP_COUNT,
    CLIPPED,
    CLIPPED_NORM,
    CLIPS,
    DESYNC,
    FLAGS,
    MEAN,
    NAN,
    NORM,
    NUM_FLAGS,
    SKIP_COUNT,
    SKIPS,
    STD,
    STEP,
    STEPS,
    THRESHOLD,
    WORST,
    Z,
)
from zclip.parallel import Record
from zclip.reference.report import norms_of, worst_of


@dataclass(frozen=True, slots=True)
class ClipResult:
    """One step, as tensors on the device: nothing here waits until you read a value.

    Attributes:
        total_norm: 0-dim, the norm of all gradients before clipping.
        stats: float64 [N, 3], one row per gradient; columns as in :mod:`zclip.layout`.
        coefs: float64 [N], the factor of each gradient; 1 left it untouched, -1 zeroed it.
        verdict: float32 [14]; elements as in :mod:`zclip.layout`.
        extra: float64 [E], the extra lanes given to the step, added up over all ranks; None if none
            were given.
    """

    total_norm: Tensor
    stats: Tensor
    coefs: Tensor
    verdict: Tensor
    extra: Tensor | None = None

    @property
    def clipped_norm(self) -> Tensor:
        """0-dim float32: the norm after clipping; 0 if the step was skipped."""
        return self.verdict[CLIPPED_NORM]

    @property
    def blocked(self) -> Tensor:
        """0-dim float32: exactly 1 if the step must not be taken, else exactly 0."""
        return self.verdict[BLOCKED]

    @property
    def norms(self) -> Tensor:
        """[N]: the norm of each gradient before clipping; NaN or Inf where an element was."""
        return norms_of(self.stats)


def merge_verdicts(verdicts: list[Tensor], stats: Tensor, counters: Tensor | None = None) -> Tensor:
    """Return one verdict for groups, or optimizers, that were judged apart; count the step.

    The step is skipped if any of them skips it. Norms add up as vectors do; z, threshold, mean
    and deviation are those of the one that stands out most.

    Args:
        verdicts: float32 [14], one each.
        stats: float64 [N, 3] of all gradients.
        counters: float64 [3], updated in place: steps, clips and skips of the whole. Where nothing
            keeps them, clips and skips are the sums of those of the parts.
    """
    table = torch.stack(verdicts)
    merged = table.amax(dim=0)  # BLOCKED: any group; LOSS and the ratio: the same in all
    every_bit = 2 ** torch.arange(NUM_FLAGS, device=table.device)
    flags = (table[:, FLAGS, None].long() & every_bit).amax(dim=0).sum()  # any of them: bitwise or
    merged[FLAGS] = flags
    merged[NORM] = table[:, NORM].double().square().sum().sqrt()
    blocked = merged[BLOCKED] > 0
    clipped_norm = table[:, CLIPPED_NORM].double().square().sum().sqrt()
    merged[CLIPPED_NORM] = torch.where(blocked, 0.0, clipped_norm)
    stands_out = table.index_select(0, table[:, Z].nan_to_num(nan=-math.inf).argmax().view(1))[0]
    for column in (Z, THRESHOLD, MEAN, STD):
        merged[column] = stands_out[column]
    merged[WORST] = worst_of(stats)
    if counters is None:
        for column in (CLIPS, SKIPS):
            merged[column] = table[:, column].sum()
        return merged
    clipped = ~blocked & (flags & CLIPPED > 0)
    counters += torch.stack([torch.ones_like(blocked), clipped, blocked])
    for column, counter in ((STEP, STEPS), (CLIPS, CLIP_COUNT), (SKIPS, SKIP_COUNT)):
        merged[column] = counters[counter]
    return merged


def share_alarm(parts: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Let every group know of a bad element in any: the step is skipped as a whole.

    Args:
        parts: stats, group by group; those that are returned have the bad ones of all.
    """
    if len(parts) == 1:
        return parts
    own = [part[:, NAN:].sum(dim=0) for part in parts]
    bad = torch.stack(own).sum(dim=0)
    shared = []
    for part, known in zip(parts, own, strict=True):
        rows = part.clone()
        rows[:1, NAN:] += bad - known
        shared.append(rows)
    return tuple(shared)


def noted(result: ClipResult, record: Record | None, extra: Tensor | None) -> ClipResult:
    """Return the result with what the ranks exchanged besides."""
    if record is None:
        return result if extra is None else replace(result, extra=extra)
    result.verdict[FLAGS] += DESYNC * record.desynced
    return result if extra is None else replace(result, extra=record.extra)
