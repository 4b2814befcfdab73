"""Every record between two lines of metrics, so that no spike falls between them.

One line of ``metrics.jsonl`` has all of them as short columns: a write per step would cost more
than it tells.
"""

import math
from collections import deque
from typing import Any

from heal.verdict import Record

MAX_RECORDS = 128  # kept if nobody takes them; more than may come between two lines
DIGITS = 6  # significant ones, enough for any plot

COLUMNS = {
    "step": "step",
    "loss": "loss",
    "norm": "norm",
    "lr": "lr",
    "lr_scale": "lr_scale",
    "micro_batches": "micro_batches",
    "seconds": "own_seconds",
}
"""What may change from step to step, and where a record has it. The rest is told once a line, as it
was at the last record."""


SLOW = ("threshold", "mean", "std")
"""What is told once a line."""


class Series:
    """Collects records until they are taken."""

    def __init__(self) -> None:
        self._records: deque[Record] = deque(maxlen=MAX_RECORDS)

    def __len__(self) -> int:
        return len(self._records)

    def note(self, record: Record) -> None:
        """Keep a record."""
        self._records.append(record)

    def take(self) -> dict[str, Any]:
        """Return what came since the last call, as entries of a line; nothing if nothing came."""
        records = list(self._records)
        self._records.clear()
        if not records:
            return {}
        newest = records[-1]
        series = {name: _column(records, field) for name, field in COLUMNS.items()}
        slow: dict[str, Any] = {name: _short(getattr(newest, name)) for name in SLOW}
        if slow["threshold"] == math.inf:
            slow["threshold"] = None  # no limit yet: nothing to draw
        return {"series": {**series, **slow}}


def _column(records: list[Record], field: str) -> Any:
    """Return the values of a column; one that is the same throughout is told once."""
    values = [_short(getattr(record, field)) for record in records]
    is_same = field != "step" and all(value == values[0] for value in values)
    return values[0] if is_same else values


def _short(value: float) -> float:
    if isinstance(value, int) or not math.isfinite(value):
        return value
    return float(f"{value:.{DIGITS}g}")
