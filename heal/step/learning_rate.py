"""The learning rates that are used, beside those that the schedules want. Host numbers only."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from heal.step.schedules import inner_of
from zclip import ClippedOptimizer

UNKNOWN = float("nan")


class LearningRates:
    """Compares every parameter group's rate with what its scheduler last set it to.

    Args:
        optimizers: whose groups are looked at.
        schedulers: torch schedulers, in the order in which they are stepped.
        note: told once if a rate is a tensor on a device, which is not read: that would wait.
    """

    def __init__(
        self,
        optimizers: Sequence[ClippedOptimizer],
        schedulers: Sequence[Any],
        note: Callable[[str], None],
    ) -> None:
        self._optimizers = optimizers
        # Of several that change one optimizer the last has the last word.
        self._schedulers = {id(inner_of(s)): s for s in schedulers if hasattr(s, "optimizer")}
        self._note = note

    def now(self) -> tuple[float, float]:
        """Return the rate and the scheduled rate of the group that is furthest above its schedule.

        NaN stands for a rate that is not known; without a schedule it is the first group's.
        """
        found = UNKNOWN, UNKNOWN
        highest = 0.0
        for optimizer in self._optimizers:
            scheduler = self._schedulers.get(id(optimizer.inner))
            wanted = getattr(scheduler, "_last_lr", ())
            for i, group in enumerate(optimizer.inner.param_groups):
                lr = group.get("lr")
                if type(lr) is not float:
                    lr = self._number(lr)
                scheduled = self._number(wanted[i]) if i < len(wanted) else UNKNOWN
                ratio = lr / scheduled if scheduled > 0.0 else 0.0
                if ratio > highest or found[0] != found[0]:
                    highest, found = ratio, (lr, scheduled)
        return found

    def _number(self, lr: Any) -> float:
        if lr is None:
            return UNKNOWN
        if not isinstance(lr, Tensor):
            return float(lr)
        if lr.device.type == "cpu" and lr.numel() == 1:
            return float(lr)
        self._note("the learning rate is a tensor on a device, and so not watched")
        return UNKNOWN
