"""The curves of one rank, from its lines of metrics."""

import math
import statistics
from collections.abc import Iterable, Mapping
from math import isfinite
from typing import Any

from heal.journal.json_lines import number
from heal.report.read import seconds_of, whole
from heal.report.sample import COLUMNS, Row, Sampler

SECONDS = COLUMNS.index("seconds")

QUICK = COLUMNS[2:8]
"""Columns with a value per step; ``seconds`` is the last."""

SLOW = COLUMNS[8:]
"""Columns with a value per line."""

MAX_DURATIONS = 4096  # step durations kept for their median


class RankCurves:
    """Thinned out rows, and exact first, last, least and largest values.

    Args:
        max_rows: how many rows to keep.

    Attributes:
        count: records in all, also those that were thinned out.
        losses: first, last, least and largest finite loss; None before the first.
        first_time: seconds since 1970 of the first line.
    """

    def __init__(self, max_rows: int) -> None:
        self._sampler = Sampler(max_rows)
        self.first_time: float | None = None
        self.last_time: float | None = None
        self.first_step: int | None = None
        self.last_step = -1
        self.nonfinite = 0
        self.losses: list[float] | None = None
        self.newest: Mapping[str, Any] = {}
        self._durations: list[float] = []
        self._stride = 1
        self._norm_max = -math.inf

    @property
    def count(self) -> int:
        return self._sampler.count

    def add_line(self, line: Mapping[str, Any]) -> None:
        """Take in a line of metrics: its series if it has one, else its own numbers."""
        step = whole(line.get("step"))
        if step is None:
            return
        time = seconds_of(line.get("time"))
        if time is not None:
            self.first_time = time if self.first_time is None else min(self.first_time, time)
            self.last_time = time if self.last_time is None else max(self.last_time, time)
        self.newest = line
        series = line.get("series")
        told = series if isinstance(series, Mapping) else {"threshold": line.get("zclip/threshold")}
        slow = [_value(told.get(name)) for name in SLOW]
        steps = series.get("step") if isinstance(series, Mapping) else None
        if not isinstance(series, Mapping) or not isinstance(steps, list):
            seen = whole(line.get("seen_at"))
            loss, norm = _value(line.get("loss")), _value(line.get("zclip/raw_grad_norm"))
            scale = _value(line.get("lr_scale"))
            row = (step if seen is None else seen, time, loss, norm, None, scale, None, None)
            self._add([(*row, *slow)])
            return
        columns = [_column(series, name, len(steps)) for name in QUICK]
        times = _times(time, columns[-1])
        rows = zip(map(whole, steps), times, *columns, strict=True)
        self._add([(*row, *slow) for row in rows if row[0] is not None])

    def rows(self) -> list[Row]:
        """Return what was kept."""
        return list(self._sampler.rows())

    def usual_seconds(self) -> float:
        """Return the median duration of a step; 0 if none is known."""
        return statistics.median(self._durations) if self._durations else 0.0

    @property
    def norm_max(self) -> float | None:
        """The largest finite norm."""
        return self._norm_max if math.isfinite(self._norm_max) else None

    def _add(self, rows: list[Row]) -> None:
        if not rows:
            return
        steps, _, losses, norms, *others = zip(*rows, strict=True)
        known = [step for step in steps if step is not None]
        first_step = min(known)
        self.first_step = int(
            min(first_step, first_step if self.first_step is None else self.first_step)
        )
        self.last_step = int(max(self.last_step, *known))
        finite = _finite(losses)
        if finite:
            first, _, least, most = self.losses or [finite[0]] * 4
            self.losses = [first, finite[-1], min(least, *finite), max(most, *finite)]
        finite_norms = _finite(norms)
        self._norm_max = max(self._norm_max, *finite_norms, -math.inf)
        if len(finite) < len(rows) or len(finite_norms) < len(rows):
            self.nonfinite += sum(_is_bad(row[2]) or _is_bad(row[3]) for row in rows)
        self._durations += _finite(others[SECONDS - 4])[:: self._stride]
        if len(self._durations) > MAX_DURATIONS:
            del self._durations[::2]
            self._stride = min(2 * self._stride, 8)  # of a line; then older ones thin out faster
        self._sampler.extend(rows)


def _finite(values: Iterable[float | None]) -> list[float]:
    return [v for v in values if v is not None and isfinite(v)]


def _is_bad(value: float | None) -> bool:
    return value is not None and not isfinite(value)


def _value(entry: Any) -> float | None:
    if type(entry) is float:
        return entry
    if entry is None or isinstance(entry, bool):
        return None
    if isinstance(entry, str) and entry not in ("NaN", "Infinity", "-Infinity"):
        return None
    return number(entry)


def _column(series: Mapping[str, Any], name: str, length: int) -> list[float | None]:
    """Return a column of a series: told once for all, in full, or too short to be one."""
    values = series.get(name)
    if not isinstance(values, list):
        return [_value(values)] * length
    found = [_value(v) for v in values[:length]]
    return found + [None] * (length - len(found))


def _times(end: float | None, durations: list[float | None]) -> list[float | None]:
    """Return when each step was, counted back from when the line was written."""
    if end is None:
        return [None] * len(durations)
    times: list[float | None] = []
    for seconds in reversed(durations):
        times.append(end)
        if seconds is not None and math.isfinite(seconds):
            end -= max(0.0, seconds)
    return times[::-1]
