"""Thins out curves without losing a spike: of every stretch the extremes are kept.

Rows are those that were written, never averages. Rows come one at a time and the number kept is
bounded, so that the length of the run does not matter.
"""

from collections.abc import Iterator, Sequence
from itertools import islice
from math import isfinite

COLUMNS = (
    "step",
    "time",
    "loss",
    "norm",
    "lr",
    "lr_scale",
    "micro_batches",
    "seconds",
    "threshold",
    "mean",
    "std",
)
"""The columns of a row. A value is None where nobody told, NaN where NaN was measured."""

Row = tuple[float | None, ...]
STEP = COLUMNS.index("step")
EXTREMES = tuple(COLUMNS.index(name) for name in ("loss", "norm", "lr", "lr_scale", "seconds"))
MICRO_BATCHES = COLUMNS.index("micro_batches")
MAX_TURNS = 4  # rollbacks kept in one stretch
MAX_KEPT = 12  # about as many as keep() leaves of a long stretch


class Sampler:
    """Keeps about ``max_rows`` rows of however many come.

    Args:
        max_rows: how many to keep; no stretch is thinned out before more have come.

    Attributes:
        count: how many came.
    """

    def __init__(self, max_rows: int) -> None:
        self.count = 0
        self._max_buckets = max(2, max_rows // (2 * MAX_KEPT))
        self._width = MAX_KEPT
        self._full: list[list[Row]] = []
        self._open: list[Row] = []

    def extend(self, rows: Sequence[Row]) -> None:
        """Take rows, in the order of time."""
        self.count += len(rows)
        self._open.extend(rows)
        while len(self._open) >= self._width:
            self._full.append(keep(self._open[: self._width]))
            del self._open[: self._width]
            if len(self._full) >= 2 * self._max_buckets:
                self._full = [
                    keep([row for bucket in self._full[i : i + 2] for row in bucket])
                    for i in range(0, len(self._full), 2)
                ]
                self._width *= 2

    def rows(self) -> Iterator[Row]:
        """Yield what was kept, in order."""
        for bucket in self._full:
            yield from bucket
        yield from self._open if len(self._open) <= MAX_KEPT else keep(self._open)


def keep(rows: Sequence[Row]) -> list[Row]:
    """Return ends, extremes, first NaN and turning points of a stretch; all of a short one."""
    if len(rows) <= MAX_KEPT:
        return list(rows)
    chosen = {0, len(rows) - 1}
    for column in EXTREMES:
        values = [row[column] for row in rows]
        finite = [(v, i) for i, v in enumerate(values) if v is not None and isfinite(v)]
        if finite:
            chosen |= {min(finite)[1], max(finite)[1]}
        if len(finite) < len(rows):
            bad = (i for i, v in enumerate(values) if v is not None and not isfinite(v))
            chosen.update(islice(bad, 1))
    for column, turned in ((STEP, _falls), (MICRO_BATCHES, _differs)):
        turns = [i for i in range(1, len(rows)) if turned(rows[i - 1][column], rows[i][column])]
        chosen |= {place for i in turns[:MAX_TURNS] for place in (i - 1, i)}
    return [rows[i] for i in sorted(chosen)]


def _falls(before: float | None, after: float | None) -> bool:
    return before is not None and after is not None and after <= before


def _differs(before: float | None, after: float | None) -> bool:
    return before != after
