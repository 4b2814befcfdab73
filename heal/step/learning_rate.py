"""The learning rates that are used, beside those that the schedules want. Host numbers only."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from heal.step.joint_rates import UNKNOWN, number_of
from zclip import ClippedOptimizer


class LearningRates:
    """Compares every parameter group's rate with what the schedules last set it to.

    Args:
        optimizers: whose groups are looked at.
        wanted: returns what schedules have set the groups of a bare optimizer to; empty if that is
            not known.
        note: told once if a rate is a tensor on a device, which is not read: that would wait.
    """

    def __init__(
        self,
        optimizers: Sequence[ClippedOptimizer],
        wanted: Callable[[Optimizer], Sequence[Any]],
        note: Callable[[str], None],
    ) -> None:
        self._optimizers = optimizers
        self._wanted = wanted
        self._note = note

    def now(self) -> tuple[float, float]:
        """Return the rate and the scheduled rate of the group that is furthest above its schedule.

        NaN stands for a rate that is not known; without a schedule it is the first group's.
        """
        found = UNKNOWN, UNKNOWN
        highest = 0.0
        for optimizer in self._optimizers:
            wanted = self._wanted(optimizer.inner)
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
        if isinstance(lr, Tensor) and lr.device.type != "cpu":
            self._note("the learning rate is a tensor on a device, and so not watched")
        return number_of(lr)
