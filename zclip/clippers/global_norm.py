"""Plain clipping by the global norm, with counters, skipping and limits per group."""

from collections.abc import Mapping
from typing import Any, ClassVar

from zclip.checks import check_limit
from zclip.clippers.clipper import Clipper
from zclip.layout import PROPAGATE, SKIP

_CODES = {"skip": SKIP, "official": PROPAGATE}


class GlobalNorm(Clipper):
    """Scale all gradients by ``min(1, max_norm / (norm + 1e-6))``, as torch does.

    Args:
        max_norm: the norm to clip to; ``inf`` only measures, and skips what is not finite.
        per_group: clip every parameter group by its own norm; a group may have its own limit
            under the key ``max_norm``.
        on_nonfinite: "skip" skips the step; "official" scales by the non-finite norm, as torch.
    """

    rule: ClassVar[str] = "global_norm"
    limit_key: ClassVar[str | None] = "max_norm"

    def __init__(
        self, max_norm: float, *, per_group: bool = False, on_nonfinite: str = "skip"
    ) -> None:
        super().__init__(per_group=per_group, on_nonfinite=on_nonfinite)
        self.max_norm = check_limit("max_norm", max_norm)

    def settings(self, group: Mapping[str, Any]) -> tuple[float, ...]:
        limit = group.get("max_norm", self.max_norm) if self.per_group else self.max_norm
        return float(limit), _CODES[self.on_nonfinite]
