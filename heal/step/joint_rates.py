"""The learning rates of an optimizer that several schedules drive. Host numbers only."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from heal.state.training_state import copied

UNKNOWN = float("nan")


class JointRates:
    """Follows the rates from turn to turn, for none of several schedules knows them.

    What a schedule remembers to have set is of its own last turn: a ReduceLROnPlateau beside a
    warm-up still has the rate of the first step long after. So the groups are looked at whenever a
    schedule has turned, and what they hold in between is somebody else's doing.

    Args:
        optimizer: the bare one.
        stepped: schedules that drive it and that the healer steps.
        own: those that somebody else steps.

    Attributes:
        is_mixed: whether there are both kinds, so that a rollback returns some and leaves others.
        wanted: what the schedules have set each group to; empty where that is not known.
        shares: per group, the product of all that own schedules made of its rate.
    """

    def __init__(self, optimizer: Optimizer, stepped: Sequence[Any], own: Sequence[Any]) -> None:
        self._optimizer = optimizer
        self._drivers = [*stepped, *own]
        self._is_stepped = bool(stepped)
        self._can_tell = all(hasattr(s, "last_epoch") for s in own)
        self.is_mixed = bool(stepped and own)
        self.shares = [1.0] * len(optimizer.param_groups)
        self.adopt()

    def adopt(self) -> None:
        """Take the rates that the groups have now for those that the schedules want."""
        self._counts = self._count()
        held = [copied(group.get("lr")) for group in self._optimizer.param_groups]
        self.wanted: list[Any] = held if self._can_tell else []

    def after_turns(self) -> None:
        """Hear that the healer has stepped those that it steps."""
        if self._is_stepped or not self.wanted or self._count() != self._counts:
            self.adopt()

    def before_step(self) -> None:
        """Look whether own schedules were stepped. Of one alone the word is as new as its turn."""
        counts = self._count()
        if counts == self._counts:
            return
        pairs = zip(self._drivers, counts, self._counts, strict=True)
        turned = [s for s, now, before in pairs if now != before]
        before, told = self.wanted, list(getattr(turned[0], "_last_lr", ()))
        self.adopt()
        now = told if len(turned) == 1 and told else self.wanted
        for i, (lr, old) in enumerate(zip(now, before, strict=False)):
            if i < len(self.shares):
                self.shares[i] *= _ratio(lr, old)
        self.wanted = copied(told) if len(turned) == 1 and self._can_tell else []

    def take_shares(self, shares: Sequence[float]) -> None:
        """Have own schedules' share of each rate be another one; the rest stays as it is."""
        groups = self._optimizer.param_groups
        for group, now, share in zip(groups, self.shares, shares, strict=False):
            if now > 0.0 and now != share and group.get("lr") is not None:
                if isinstance(group["lr"], Tensor):
                    group["lr"].mul_(share / now)
                else:
                    group["lr"] *= share / now
        self.shares = list(shares)
        self.adopt()

    def _count(self) -> list[Any]:
        return [getattr(s, "last_epoch", None) for s in self._drivers]


def number_of(lr: Any) -> float:
    """Return a rate as a number; NaN if there is none, or if to read it would wait for a device."""
    if isinstance(lr, Tensor) and (lr.device.type != "cpu" or lr.numel() != 1):
        return UNKNOWN
    return UNKNOWN if lr is None else float(lr)


def _ratio(now: Any, before: Any) -> float:
    """How many times the rate has become; 1 where that cannot be known."""
    old, new = number_of(before), number_of(now)
    return new / old if old > 0.0 and new > 0.0 else 1.0
