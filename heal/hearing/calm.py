"""Lets the records of calm steps wait for each other, so that several are heard at once."""

import math
from collections.abc import Sequence

from heal.config import HealingConfig
from heal.detect import Usual
from heal.step.guarded_step import TOGETHER
from heal.step.ranks import HostFacts
from heal.verdict import NO_FLAG
from zclip.layout import BLOCKED, CLIPPED, FLAGS, LOSS, LOSS_RATIO, NORM, SPIKE

FOLLOWED = 1.05  # times per hearing: a leap by a thousand takes 140 steps to become the usual

ORDINARY = (0.0, CLIPPED, SPIKE, CLIPPED | SPIKE)
"""Flags that no detector acts upon: a clip rule that finds a norm out of the ordinary has dealt
with it, and noise as real data has it brings one such step in twenty."""


class Calm:
    """Tells when to hear of steps, by the numbers as they are posted, before they are judged.

    Whatever could be trouble is heard as soon as it may be read: a refused step, any flag but those
    of clipping, a norm, a loss or a learning rate that leaps, news of the host. So a detector that
    needs none of these, such as that of a slow climb, hears of a step ``TOGETHER - 1`` steps later
    at most; and whoever makes a plan or takes a snapshot has all heard that there is.

    After a rollback a new one is made, for what was usual may have been the trouble: until the
    first record is heard, no step is calm.

    Args:
        config: a leap is no more than what a detector may find fault with.
        step: with which it begins.
    """

    NORM_LEAP = 4.0  # times the usual ones
    LR_LEAP = 2.0  # times that which was heard of last
    LOSS_LEAP, LOSS_FALL = 1.5, -1.0  # between these its ratio to its mean may be, see watch_loss_

    def __init__(self, config: HealingConfig, step: int = 0) -> None:
        self._norm_leap = min(self.NORM_LEAP, config.grad_norm_limit)
        self._lr_leap = min(self.LR_LEAP, config.lr_spike_factor)
        self._loss_leap = min(self.LOSS_LEAP, config.loss_spike_factor)
        self._norm = self._lr = 0.0  # posted last
        self._known_norm = self._known_lr = 0.0  # when somebody heard last
        self._highest_norm = 0.0  # that is calm
        self._usual_loss = self._loss_margin = math.nan
        self._heard_at = step
        self._heard_of = self._troubled = step - 1

    def note(self, step: int, row: Sequence[float] | None, facts: HostFacts) -> None:
        """Hear of what was posted; of a row that is not in host memory nothing is known."""
        if row is None:
            self._troubled = step
            return
        self._norm, self._lr = norm, lr = row[NORM], facts.lr
        # By comparisons that are false for NaN, so that it is not calm.
        is_calm = (
            facts.flags is NO_FLAG
            and row[BLOCKED] == 0.0
            and row[FLAGS] in ORDINARY
            and norm <= self._highest_norm
            and self.LOSS_FALL <= row[LOSS_RATIO] <= self._loss_leap
            and not row[LOSS] - self._usual_loss > self._loss_margin
            and (lr <= self._lr_leap * self._known_lr or lr != lr)
        )
        if not is_calm:
            self._troubled = step

    def is_time(self, step: int) -> bool:
        """Return whether to hear now, after ``step`` steps, what has arrived."""
        return self._troubled > self._heard_of or step - self._heard_at >= TOGETHER

    def heard(self, step: int, newest: int, usual: Usual) -> None:
        """Note that all was heard that there was after ``step`` steps, up to that of ``newest``.

        What leapt and stays is followed slowly, so that it is heard of for as long as it may take a
        detector to make up its mind.

        Args:
            step: steps done.
            newest: whose record was the last.
            usual: what to measure the next ones against.
        """
        self._heard_at, self._heard_of = step, max(newest, self._heard_of)
        self._known_norm = _followed(self._known_norm, self._norm, self._norm_leap)
        self._known_lr = _followed(self._known_lr, self._lr, self._lr_leap)
        self._usual_loss, self._loss_margin = usual.loss, usual.loss_margin
        self._highest_norm = self._norm_leap * (usual.norm or self._known_norm)


def _followed(known: float, now: float, leap: float) -> float:
    """Return what to measure the next ones against; what is no number changes nothing."""
    if known > 0.0 and now > leap * known:
        return known * FOLLOWED
    return now if 0.0 <= now < math.inf else known
