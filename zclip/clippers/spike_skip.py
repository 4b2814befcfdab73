"""Skips steps whose norm or loss stands out from the last ones; clips nothing."""

from collections.abc import Mapping
from typing import Any, ClassVar

from zclip.checks import check_count, check_limit
from zclip.clippers.clipper import Clipper
from zclip.layout import LOSSES_SEEN_COLUMN, NORMS_SEEN_COLUMN, ON_NONFINITE, WINDOW_COLUMN


class SpikeSkip(Clipper):
    """Skip a step if its norm or its loss is ``sigma`` deviations above those of a window.

    A skipped step enters no window, so that a spike cannot make the next one look normal. Give
    ``step`` the loss if it should be watched as well.

    Args:
        window: how many of the last accepted steps are compared with.
        sigma: how many standard deviations above their mean are too many.
        min_count: steps to see before the first may be skipped; half a window if None.
        per_group: watch the norm of each parameter group apart.
        on_nonfinite: "skip" skips a step with NaN or Inf; "official" does not look.
    """

    rule: ClassVar[str] = "spike_skip"
    watches_loss: ClassVar[bool] = True
    fields: ClassVar[Mapping[str, int | slice]] = {
        "norms_seen": NORMS_SEEN_COLUMN,
        "losses_seen": LOSSES_SEEN_COLUMN,
        "windows": slice(WINDOW_COLUMN, None),
    }

    def __init__(
        self,
        window: int = 128,
        sigma: float = 6.0,
        min_count: int | None = None,
        *,
        per_group: bool = False,
        on_nonfinite: str = "skip",
    ) -> None:
        super().__init__(per_group=per_group, on_nonfinite=on_nonfinite)
        self.window = check_count("window", window)
        self.sigma = check_limit("sigma", sigma)
        self.min_count = self.window // 2 if min_count is None else int(min_count)
        if not 0 <= self.min_count <= self.window:
            raise ValueError(f"min_count: expected 0 to window={window}, got {min_count}")

    def settings(self, group: Mapping[str, Any]) -> tuple[float, ...]:
        return self.window, self.sigma, self.min_count, ON_NONFINITE[self.on_nonfinite]

    def state_size(self, num_tensors: int) -> int:
        return WINDOW_COLUMN + 2 * self.window

    def size_hint(self) -> str:
        return f"window is {self.window}"
