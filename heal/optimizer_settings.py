"""Settings of optimizers that make no sense: noted at once, and when they change into such.

torch checks some of them where an optimizer is made, and none in a parameter group or afterwards.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Adadelta, Adagrad, Adamax, Optimizer, RMSprop

from heal.lr_schedules import number_of
from zclip import ClippedOptimizer

MOST_DECAY = 0.02
"""Share of a weight that decay may take in one step: with more, a run remembers less than its last
fifty steps. Usual shares are 1e-6 to 1e-3."""

DIVIDED = (Adadelta, Adagrad, Adamax, RMSprop)
"""Optimizers that divide decay by the size of gradients, so that its share is unknown."""

FRACTIONS = {
    "momentum": "old gradients grow instead of fading",
    "betas": "old gradients grow instead of fading, or change their sign",
}
"""Settings of 0 or more and below 1, and what happens otherwise."""

JUDGED = ("weight_decay", "eps", *FRACTIONS)


class SettingsCheck:
    """Notes settings that make no sense. Reads host values only; one on a device is unknown.

    A group is judged when it is first seen and when a setting of it has changed, but for the
    learning rate: what that does later is for the detectors to say.

    Args:
        optimizers: whose parameter groups are read.
        note: called with each setting that makes no sense.
    """

    def __init__(self, optimizers: Sequence[ClippedOptimizer], note: Callable[[str], None]) -> None:
        self._optimizers = optimizers
        self._note = note
        self._seen: dict[tuple[int, int], str] = {}
        self.look()

    def look(self) -> None:
        """Judge the groups that have changed."""
        for o, optimizer in enumerate(self._optimizers):
            groups = optimizer.inner.param_groups
            for g, group in enumerate(groups):
                settings = str([group.get(name) for name in JUDGED])
                if self._seen.get((o, g)) == settings:
                    continue
                self._seen[o, g] = settings
                where = f" in group {g}" if len(groups) > 1 else ""
                for name, problem in _problems(optimizer.inner, group):
                    self._note(f"{name} of {type(optimizer.inner).__name__}{where}: {problem}")


def _problems(optimizer: Optimizer, group: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the name of each setting that makes no sense, and what is wrong with it."""
    decay = _number(group.get("weight_decay"))
    if decay < 0.0:
        yield "weight_decay", f"expected 0 or more, got {decay:g}; every step makes weights larger"
    is_direct = group.get("decoupled_weight_decay", True) and not isinstance(optimizer, DIVIDED)
    lr = _number(group.get("initial_lr", group.get("lr")))  # a schedule may begin far below
    share = lr * decay
    if is_direct and share >= MOST_DECAY:
        yield (
            "weight_decay",
            f"expected to take less than {MOST_DECAY:.0%} of each weight in a step, got {decay:g} "
            f"at a learning rate of {lr:g}, which takes {share:.3g} times the weight; lower one of "
            "the two",
        )
    for name, effect in FRACTIONS.items():
        value = group.get(name)
        parts = value if isinstance(value, tuple | list) else (value,)
        if any(part < 0.0 or part >= 1.0 for part in map(_number, parts)):
            yield name, f"expected 0 or more and less than 1, got {value}; {effect}"
    if _number(group.get("eps")) < 0.0:
        yield "eps", f"expected 0 or more, got {group['eps']:g}; updates may divide by zero"


def _number(value: Any) -> float:
    """Return a setting as a number; NaN, which no comparison finds, if it is not known."""
    return number_of(value if isinstance(value, int | float | Tensor) else None)
