"""The limits of the clippers: tightened for some steps, then put back as they were."""

import math
import statistics
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from zclip import ClippedOptimizer

RECENT_NORMS = 101  # gradient norms whose median is taken for the usual one
WATCHED = 200  # steps over which clipped ones are counted
NEARLY_ALL = 0.95  # share of them from which a limit is too low
FAR_BELOW = 2.0  # times the norm after clipping that the norm before it is
NAMES = ("max_grad_norm", "max_norm")  # what clippers call their limit


class ClipLimits:
    """What was done to the limits of all clippers, and for how long.

    Args:
        optimizers: whose clippers are tightened.
        steps: how long a tighter limit holds.
        note: told of clippers without a limit.

    Attributes:
        steps_left: for how many steps they stay tightened.
    """

    def __init__(
        self, optimizers: Sequence[ClippedOptimizer], steps: int, note: Callable[[str], None]
    ) -> None:
        self._optimizers = optimizers
        self._steps = steps
        self._note = note
        self.steps_left = 0
        self._first: dict[int, tuple[Any, str, Any]] = {}  # clipper, attribute, first value
        self._norms: deque[float] = deque(maxlen=RECENT_NORMS)
        self._ratios: list[float] = []
        self._has_warned = False

    def note_norm(self, norm: float, clipped_norm: float = math.nan) -> None:
        """Hear of the norm of a step that was taken, before and after clipping."""
        if not math.isfinite(norm):
            return
        self._norms.append(norm)
        if not self._has_warned and not self.steps_left:
            self._ratios.append(norm / clipped_norm if clipped_norm > 0.0 else 1.0)
            if len(self._ratios) == WATCHED:
                self._warn_of_a_low_limit(clipped_norm)
                self._ratios.clear()

    def _warn_of_a_low_limit(self, clipped_norm: float) -> None:
        """Say once that nearly all steps are clipped, and by much: the limit sets the step size."""
        num_cut = sum(ratio > FAR_BELOW for ratio in self._ratios)
        if num_cut >= NEARLY_ALL * WATCHED:
            self._has_warned = True
            self._note(
                f"{num_cut} of the last {WATCHED} steps were clipped to less than half of their "
                f"gradient norm: a limit of about {clipped_norm:.3g} is far below the usual norm "
                f"of {statistics.median(self._norms):.3g} and scales every step; raise "
                "max_grad_norm, or lower the learning rate instead"
            )

    def tighten(self, factor: float) -> None:
        """Multiply the limit of every clipper; one without gets the usual norm for a start."""
        for optimizer in self._optimizers:
            clipper = optimizer.clipper
            name = next((n for n in NAMES if hasattr(clipper, n)), None)
            if name is None:
                self._note(f"{type(clipper).__name__} has no limit that could be tightened")
                continue
            limit = getattr(clipper, name)
            if limit is None or not math.isfinite(limit):
                if not self._norms:
                    continue
                limit = statistics.median(self._norms)
            self._first.setdefault(id(clipper), (clipper, name, getattr(clipper, name)))
            setattr(clipper, name, limit * factor)
        self.steps_left = self._steps

    def count_step(self) -> None:
        """Hear that a step is over; after the last one the limits are what they were."""
        if self.steps_left:
            self.steps_left -= 1
            if not self.steps_left:
                for clipper, name, limit in self._first.values():
                    setattr(clipper, name, limit)
                self._first.clear()

    def state(self) -> dict[str, Any]:
        """Return plain values; see :meth:`resume`."""
        clippers = [optimizer.clipper for optimizer in self._optimizers]
        limits = [
            (o, *self._first[id(c)][1:]) for o, c in enumerate(clippers) if id(c) in self._first
        ]
        return {
            "relax_in": self.steps_left,
            "limits": limits,
            "tightened": [(o, name, getattr(clippers[o], name)) for o, name, _ in limits],
            "norms": list(self._norms),
        }

    def resume(self, saved: dict[str, Any]) -> None:
        """Go on with what :meth:`state` returned in another process."""
        self.steps_left = saved["relax_in"]
        self._norms.extend(saved["norms"])
        for o, name, limit in saved["limits"]:
            clipper = self._optimizers[o].clipper
            self._first[id(clipper)] = (clipper, name, limit)
        for o, name, limit in saved["tightened"]:
            setattr(self._optimizers[o].clipper, name, limit)
