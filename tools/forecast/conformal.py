"""Limits that healthy runs exceed as seldom as promised: split conformal prediction over runs.

The score of a run is the highest evidence of a stretch of its steps. If calibration runs and the
run at hand are exchangeable, the run exceeds the limit for ``share`` with a probability of at most
``share``, and at least ``share - 1 / (n + 1)``, whatever the scores look like (Vovk et al. 2005).
It is a promise about runs like those of the calibration, not about all runs there are.
"""

import math
from collections.abc import Sequence

SHARES = (0.2, 0.1, 0.05, 0.02, 0.01)
"""False-alarm shares for which a model has limits: coverage of 80, 90, 95, 98 and 99 %."""


def limit(highest: Sequence[float], share: float) -> float:
    """Return the level that at most ``share`` of unseen healthy runs exceed.

    Args:
        highest: the highest evidence of each healthy calibration run.
        share: between 0 and 1.

    Raises:
        ValueError: ``share`` is out of range, or there are too few runs to promise it.
    """
    if not 0.0 < share < 1.0:
        raise ValueError(f"share: expected a number between 0 and 1, got {share!r}")
    rank = math.ceil((len(highest) + 1) * (1.0 - share))
    if rank > len(highest):
        fewest = math.ceil(1.0 / share) - 1
        raise ValueError(
            f"healthy runs: expected at least {fewest} to promise a share of {share:g}, got "
            f"{len(highest)}"
        )
    return sorted(highest)[rank - 1]


def affordable(runs: int) -> tuple[float, ...]:
    """Return the shares of :data:`SHARES` that so many calibration runs can promise."""
    return tuple(share for share in SHARES if math.ceil((runs + 1) * (1.0 - share)) <= runs)


def exceeding(highest: Sequence[float], level: float) -> float:
    """Return the share of runs above a level: one minus the coverage; 0 if there are no runs."""
    return sum(value > level for value in highest) / len(highest) if highest else 0.0
