"""What a fused step found out: about gradients, and about the weights and state it passed over."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from zclip.clippers import ClipResult
from zclip.layout import (
    FIRST_BAD_TENSOR,
    FIRST_FOREIGN,
    FOREIGN,
    HEALTH_FLAGS,
    TAKEN,
    UPDATE_NORM,
    UPDATE_SUM_SQ,
    WEIGHT_BAD,
    WEIGHT_NORM,
    WEIGHT_SUM_SQ,
)


@dataclass(frozen=True, slots=True)
class StepResult:
    """One step of a fused optimizer, as tensors on the device: nothing waits until you read one.

    ``N`` is the number of parameters in all groups, frozen ones too, in their order. Of DTensors
    all numbers are those of the local shard. A row is all zeros where a parameter had no gradient,
    or if the step was skipped: then nothing was read.

    Attributes:
        rows: float64 [N, 6], columns as in :mod:`zclip.layout`, of values after the update:

            - ``WEIGHT_SUM_SQ``, ``UPDATE_SUM_SQ``: sums of squares of the finite weights, and of
              what was subtracted from them (before rounding to bfloat16 or float16);
            - ``WEIGHT_BAD``, ``FIRST_BAD``, ``SECOND_BAD``: how many elements of the weights, of
              the first moment (or momentum) and of the second moment are NaN or Inf;
            - ``FOREIGN``: bits FOREIGN_WEIGHT, FOREIGN_FIRST, FOREIGN_SECOND where memory did not
              hold, bit for bit, what the last update had stored there. Something other than the
              optimizer wrote: a flipped bit, wrong code, a deliberate swap of weights. Unknown, and
              so 0, in the first update of a parameter and after ``load_state_dict``.

            [0, 6] with ``telemetry=False``.
        summary: float32 [6]: ``TAKEN`` (exactly 1, or 0 if the step was skipped), ``HEALTH_FLAGS``
            (bits BAD_WEIGHT, BAD_STATE, FOREIGN_WRITE), ``FIRST_BAD_TENSOR`` and ``FIRST_FOREIGN``
            (index of a parameter, -1 if none), ``WEIGHT_NORM``, ``UPDATE_NORM`` over all tensors.
        clip: what the clipper found in the gradients; None without a clipper.
        names: of the N parameters.
    """

    rows: Tensor
    summary: Tensor
    clip: ClipResult | None
    names: Sequence[str]

    @property
    def taken(self) -> Tensor:
        """0-dim float32: exactly 1 if the update was applied, 0 if the step was skipped."""
        return self.summary[TAKEN]

    @property
    def health_flags(self) -> Tensor:
        """0-dim float32: bits BAD_WEIGHT, BAD_STATE and FOREIGN_WRITE."""
        return self.summary[HEALTH_FLAGS]

    @property
    def weight_norm(self) -> Tensor:
        """0-dim float32: norm of all weights that were updated."""
        return self.summary[WEIGHT_NORM]

    @property
    def update_norm(self) -> Tensor:
        """0-dim float32: norm of everything that was subtracted from the weights."""
        return self.summary[UPDATE_NORM]

    @property
    def weight_norms(self) -> Tensor:
        """[N]: norm of each parameter."""
        return self.rows[:, WEIGHT_SUM_SQ].sqrt()

    @property
    def update_norms(self) -> Tensor:
        """[N]: norm of what was subtracted from each parameter."""
        return self.rows[:, UPDATE_SUM_SQ].sqrt()

    @property
    def nonfinite(self) -> Tensor:
        """[N, 3]: how many elements of weights, first and second moments are NaN or Inf."""
        return self.rows[:, WEIGHT_BAD : WEIGHT_BAD + 3]

    @property
    def foreign(self) -> Tensor:
        """[N]: bits that say which memory of each parameter was written by something else."""
        return self.rows[:, FOREIGN]

    def first_bad(self) -> str | None:
        """Return the name of the first parameter with NaN or Inf in it or its state. This waits."""
        return self._named(FIRST_BAD_TENSOR)

    def first_foreign(self) -> str | None:
        """Return the name of the first parameter that something else wrote to. This waits."""
        return self._named(FIRST_FOREIGN)

    def _named(self, column: int) -> str | None:
        index = int(self.summary[column])
        return None if index < 0 else self.names[index]
