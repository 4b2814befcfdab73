"""AutoClip: the limit is a percentile of the norms seen so far."""

from collections.abc import Mapping
from typing import Any, ClassVar

from zclip.checks import check_count
from zclip.clippers.clipper import Clipper
from zclip.layout import HISTORY_COLUMN, HISTORY_SEEN_COLUMN, ON_NONFINITE


class AutoClip(Clipper):
    """Clip to the ``percentile`` of the last norms, this one included (arXiv 2007.14469).

    Args:
        percentile: 0 to 100.
        history: how many of the last norms are remembered.
        per_group: keep a history for each parameter group.
        on_nonfinite: "skip" skips a step with NaN or Inf and forgets it; "official" does not.
    """

    rule: ClassVar[str] = "auto_clip"
    fields: ClassVar[Mapping[str, int | slice]] = {
        "norms_seen": HISTORY_SEEN_COLUMN,
        "history": slice(HISTORY_COLUMN, None),
    }

    def __init__(
        self,
        percentile: float = 10.0,
        history: int = 1000,
        *,
        per_group: bool = False,
        on_nonfinite: str = "skip",
    ) -> None:
        super().__init__(per_group=per_group, on_nonfinite=on_nonfinite)
        if not 0.0 <= percentile <= 100.0:
            raise ValueError(f"percentile: expected 0 to 100, got {percentile}")
        self.percentile = float(percentile)
        self.history = check_count("history", history)

    def settings(self, group: Mapping[str, Any]) -> tuple[float, ...]:
        return self.percentile, self.history, ON_NONFINITE[self.on_nonfinite]

    def state_size(self, num_tensors: int) -> int:
        return HISTORY_COLUMN + self.history

    def size_hint(self) -> str:
        return f"history is {self.history}"
