"""What the device reported about one step, decoded on the host.

The columns and the first nine flags are those of ``zclip/layout.py``; they are stated again here,
and compared by a test, because importing zclip would import torch.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntFlag
from typing import NamedTuple

COLUMNS = (
    "blocked",
    "flags",
    "norm",
    "clipped_norm",
    "z",
    "threshold",
    "mean",
    "std",
    "loss",
    "loss_ratio",
    "worst",
    "clips",
    "skips",
    "step",
)
"""The elements of a verdict, in order."""


class Flag(IntFlag):
    """What is unusual about a step. All together fit a float32 exactly."""

    HAS_NAN = 1
    HAS_INF = 2
    OVERFLOW = 4  # every element finite, the float32 norm not
    CLIPPED = 8
    SPIKE = 16  # the clip rule found the norm out of the ordinary
    LOSS_NAN = 32  # NaN or Inf
    LOSS_SPIKE = 64
    LOSS_RISING = 128
    DESYNC = 256  # ranks that should be at the same step are not
    STATE_NONFINITE = 1 << 9  # the update left NaN or Inf in weights or moments
    FOREIGN_WRITE = 1 << 10  # weights or moments are not what the last update stored
    STATISTICS_BAD = 1 << 11  # forward left NaN or Inf in a buffer, as in running statistics
    # Flags of the host, sent with the record of the next step, so that all ranks get them alike.
    PREEMPTED = 1 << 12
    MEMORY_PRESSURE = 1 << 13
    WEIGHTS_BAD = 1 << 14
    OPTIMIZER_STATE_BAD = 1 << 15
    DATA_ERROR = 1 << 16
    DEVICE_ERROR = 1 << 17
    OUT_OF_MEMORY = 1 << 18
    NETWORK_ERROR = 1 << 19
    UNKNOWN_ERROR = 1 << 20
    STEP_FAILED = 1 << 21  # the optimizer stopped half-way, in the step before
    SNAPSHOT_REQUESTED = 1 << 22
    STATISTICS_WRITTEN = 1 << 23  # something other than forward wrote running statistics
    SNAPSHOT_WANTED = SNAPSHOT_REQUESTED  # the name of version 0.1, until 0.3


NO_FLAG = Flag(0)
HOST_FLAGS = tuple(flag for flag in Flag if flag >= Flag.PREEMPTED)
FAILED = Flag.DATA_ERROR | Flag.OUT_OF_MEMORY | Flag.NETWORK_ERROR | Flag.UNKNOWN_ERROR
"""A rank could not compute its part of this step, which all ranks therefore skip."""

_CLIPPED = (Flag.CLIPPED, Flag.SPIKE, Flag.CLIPPED | Flag.SPIKE)
_ORDINARY_FLAGS = {int(flag): flag for flag in (NO_FLAG, *_CLIPPED)}  # making one takes longer

NONFINITE_GRADIENT = Flag.HAS_NAN | Flag.HAS_INF | Flag.OVERFLOW | Flag.STATISTICS_BAD
"""What was computed is not all finite: the gradients, or what forward left in buffers."""


class Record(NamedTuple):
    """One optimizer step as the host polls it, some steps late.

    ``worst`` is the index of the tensor to blame, -1 if none; ``step`` is the number that the
    healing loop gave the step, not the device's own count. ``lr`` is the rate that was used, and
    ``scheduled_lr`` the one that the schedule set, where that is known. ``loss_scale`` is that
    of a gradient scaler, None without one; ``lr_scale`` the factor of healing on the rate.
    ``seconds`` is the mean over ranks, ``own_seconds`` what this one took.
    NaN stands for what is not known. A tuple, because one is made in every step and a frozen
    dataclass of so many fields takes three times as long.
    """

    step: int
    flags: Flag = NO_FLAG
    blocked: bool = False
    norm: float = math.nan
    clipped_norm: float = math.nan
    z: float = 0.0
    threshold: float = math.nan
    mean: float = math.nan
    std: float = math.nan
    loss: float = math.nan
    loss_ratio: float = 1.0
    worst: int = -1
    worst_name: str = ""
    lr: float = math.nan
    scheduled_lr: float = math.nan
    clips: int = 0
    skips: int = 0
    seconds: float = math.nan
    micro_batches: int = 1
    loss_scale: float | None = None
    lr_scale: float = 1.0
    own_seconds: float = math.nan

    @classmethod
    def decode(
        cls,
        step: int,
        row: Sequence[float],
        *,
        flags: int = 0,
        loss: float | None = None,
        worst_name: str = "",
        lr: float = math.nan,
        scheduled_lr: float = math.nan,
        seconds: float = math.nan,
        micro_batches: int = 1,
        loss_scale: float | None = None,
        lr_scale: float = 1.0,
        own_seconds: float = math.nan,
    ) -> "Record":
        """Read a row of the mailbox; what the device does not know the host fills in.

        Its flags join those of the row, and its loss, if it has one, takes the place of the row's.

        Raises:
            ValueError: the row is too short to be a verdict.
        """
        if len(row) < len(COLUMNS):
            raise ValueError(f"a verdict has {len(COLUMNS)} numbers, the row has {len(row)}")
        blocked, flagged, norm, clipped, z, threshold, mean, std, own_loss, ratio = row[:10]
        try:
            worst, clips, skips, found = int(row[10]), int(row[11]), int(row[12]), int(flagged)
        except (ValueError, OverflowError):  # a broken row must not break the reader
            worst, clips = _whole(row[10], otherwise=-1), _whole(row[11], otherwise=0)
            skips, found = _whole(row[12], otherwise=0), _whole(flagged, otherwise=0)
        found |= int(flags)
        flag = _ORDINARY_FLAGS.get(found)
        if flag is None:
            flag = Flag(found)
        if loss is None:
            loss = own_loss
        # All fields in their order: by name it would take twice as long, every step.
        measured = flag, blocked != 0.0, norm, clipped, z, threshold, mean, std, loss, ratio
        known = worst, worst_name, lr, scheduled_lr, clips, skips, seconds
        return cls._make(
            (step, *measured, *known, micro_batches, loss_scale, lr_scale, own_seconds)
        )

    @property
    def has_nonfinite_gradient(self) -> bool:
        return self.has(NONFINITE_GRADIENT)

    @property
    def has_finite_loss(self) -> bool:
        is_number = self.flags is NO_FLAG or not int.__and__(self.flags, Flag.LOSS_NAN)
        return is_number and -math.inf < self.loss < math.inf

    def has(self, flags: Flag) -> bool:
        """Return whether any of these flags is set.

        As plain integers: the operators of IntFlag cost microseconds, every step, several times.
        """
        return int.__and__(self.flags, flags) != 0


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthRow:
    """Weights and moments of the optimizer, measured every ``check_interval`` steps.

    One entry per trainable tensor, in a fixed order. ``moment_norms`` has the norms of everything
    that the optimizer keeps of that tensor, together; -1 where it keeps nothing yet.
    ``weight_bad`` and ``moment_bad`` count elements that are NaN or Inf. ``step_counters`` holds
    the optimizer's own step count of each tensor, -1 where it has none. ``buffer_bad`` counts what
    must not be in the buffers that forward writes, in the order of ``buffer_names``, and
    ``buffer_norms`` has their norms. ``gradient_norms`` are those of the last step, -1 where there
    is no gradient; ``sizes`` counts the elements of each weight.
    """

    step: int
    weight_norms: tuple[float, ...]
    weight_bad: tuple[int, ...]
    moment_norms: tuple[float, ...] = ()
    moment_bad: tuple[int, ...] = ()
    step_counters: tuple[float, ...] = ()
    names: tuple[str, ...] = ()
    buffer_bad: tuple[int, ...] = ()
    buffer_names: tuple[str, ...] = ()
    buffer_norms: tuple[float, ...] = ()
    gradient_norms: tuple[float, ...] = ()
    sizes: tuple[int, ...] = ()

    def name(self, index: int) -> str:
        """Return the name of a tensor, or its number if it has none."""
        return self.names[index] if index < len(self.names) else f"tensor {index}"


def _whole(value: float, *, otherwise: int) -> int:
    """Return a count that came as a float, if it is one."""
    return int(value) if -math.inf < value < math.inf else otherwise
