"""Lets the records of calm steps wait for each other, so that several are heard at once."""

from collections.abc import Sequence

from heal.ranks import HostFacts
from heal.verdict import NO_FLAG
from zclip.layout import BLOCKED, CLIPPED, FLAGS, LOSS_RATIO, NORM

TOGETHER = 10
"""Calm records that are heard at once. After a forward and a backward pass the detectors have left
the caches, and what it takes to bring them back is several times what they do for a record."""


class Calm:
    """Tells when to hear of steps, by the numbers as they are posted, before they are judged.

    Whatever could be trouble is heard ``lag`` steps later, as ever: a refused step, any flag but
    that of clipping, a norm, a loss or a learning rate that leaps, news of the host. So a detector
    that needs none of these, such as that of a slow climb, hears of a step ``TOGETHER - 1`` steps
    later at most.

    Args:
        lag: steps after which the record of a step is read.
    """

    NORM_LEAP, LR_LEAP = 4.0, 2.0  # times that of the step before
    LOSS_LEAP, LOSS_FALL = 1.5, -1.0  # between these its ratio to its mean may be, see watch_loss_

    def __init__(self, lag: int) -> None:
        self._lag = lag
        self._hurried_until = 0
        self._norm = self._lr = 0.0

    def note(self, step: int, row: Sequence[float] | None, facts: HostFacts) -> None:
        """Hear of what was posted; of a row that is not in host memory nothing is known."""
        if row is None:
            self._hurried_until = step + self._lag + 1
            return
        norm, norm_before, lr, lr_before = row[NORM], self._norm, facts.lr, self._lr
        self._norm, self._lr = norm, lr
        # By comparisons that are false for NaN, so that it is not calm.
        is_calm = (
            facts.flags is NO_FLAG
            and row[BLOCKED] == 0.0
            and row[FLAGS] in (0.0, CLIPPED)
            and norm <= self.NORM_LEAP * norm_before
            and self.LOSS_FALL <= row[LOSS_RATIO] <= self.LOSS_LEAP
            and (lr <= self.LR_LEAP * lr_before or lr != lr)
        )
        if not is_calm:
            self._hurried_until = step + self._lag + 1

    def is_time(self, step: int) -> bool:
        """Return whether to hear now, after ``step`` steps, what has arrived."""
        return step <= self._hurried_until or step % TOGETHER == 0
