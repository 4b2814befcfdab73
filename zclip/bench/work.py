"""A piece of work: the ways of doing it, what it must read and write, and how to check it."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from zclip.bench.gradients import Gradients

OURS = "zclip"
NO_LIMIT = 1e30

Run = Callable[[], Tensor | float | None]
"""One contender: does the work once; returns what it computed, if anything."""

TOLERANCE_OF_OURS = 1e-6
"""What we promise of a norm, for every dtype but float64."""

TOLERANCE_OF_RIVALS = 0.03
"""Beyond this a rival did other work: bfloat16 norms are rounded to 8 bits, several times."""


@dataclass
class Work:
    """Contenders that do the same, each by its own means.

    Attributes:
        gradients: what they work on.
        contenders: by name; :data:`OURS` and those that start with it are ours.
        error: takes what a contender returned on fresh gradients, and returns the relative error
            against float64: of the result, or of the gradients that it left, whichever is larger.
        reads: how often an exact implementation must read all bytes without writing them.
        rewrites: how often it must read and write all bytes.
        freshen: brings the gradients back to where they were; called before every check.
        between: called before every round of timing, with its number; nothing of it is timed.
    """

    gradients: Gradients
    contenders: dict[str, Run]
    error: Callable[[Tensor | float | None], float]
    reads: int = 1
    rewrites: int = 0
    freshen: Callable[[], None] | None = None
    between: Callable[[int], None] | None = None

    def check(self, name: str) -> float:
        """Run a contender once on fresh gradients; return its relative error."""
        if self.freshen:
            self.freshen()
        return self.error(self.contenders[name]())

    def is_wrong(self, name: str, error: float) -> bool:
        """Return whether an error is more than rounding."""
        return not error <= self.tolerance(name)  # not: a NaN is wrong

    def tolerance(self, name: str) -> float:
        """Return the largest error that rounding explains."""
        if not is_ours(name):
            return TOLERANCE_OF_RIVALS
        # Gradients that are rewritten are rounded to their dtype; norms are not.
        rounding = torch.finfo(self.gradients.dtype).eps if self.rewrites else 0.0
        return TOLERANCE_OF_OURS + rounding


def is_ours(name: str) -> bool:
    """Return whether a contender is one of ours: ``zclip``, ``zclip[reference]`` and so on."""
    return name.split("[")[0].split(" ")[0] == OURS


def is_rival(name: str) -> bool:
    """Return whether a contender is another project's way of doing the same.

    One in brackets is neither: a yardstick that does less, such as a step without clipping.
    """
    return not is_ours(name) and not name.startswith("(")


class Limit:
    """The norm to clip to. Either never reached, or below the norm that the last call left."""

    SHRINK = 0.97
    LEAST = 1e-3

    def __init__(self, gradients: Gradients, clips: bool) -> None:
        self.gradients = gradients
        self.clips = clips
        self.value = gradients.exact_norm if clips else NO_LIMIT

    def next(self) -> float:
        """Return the limit of the next call."""
        if self.clips:
            self.value *= self.SHRINK
        return self.value

    def freshen(self) -> None:
        """Start again from the first gradients."""
        if self.clips:
            self.gradients.fill()
            self.value = self.gradients.exact_norm

    def freshen_if_small(self, _: int = 0) -> None:
        """Start again if so many calls have clipped that the gradients are nearly nothing."""
        if self.clips and self.value < self.LEAST * self.gradients.exact_norm:
            self.freshen()

    def error_of_values(self) -> float:
        """Return how far the gradients are from the first ones, clipped to the present limit."""
        if not self.clips:
            return 0.0 if self.gradients.are_untouched() else 1.0
        coef = self.value / (self.gradients.exact_norm + 1e-6)
        return self.gradients.error_of_values(lambda grad: grad * coef)
