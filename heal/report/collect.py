"""Reads a whole run once and returns what every form of the report is made from."""

import math
import os
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from math import isfinite
from pathlib import Path
from typing import Any

from heal.json_lines import number
from heal.report.read import (
    Damage,
    NotARun,
    RunFiles,
    Start,
    find_files,
    find_runs,
    read_events,
    read_lines,
    read_postmortem,
    run_id,
    seconds_of,
    whole,
)
from heal.report.story import Story, describe

# Thins out curves without losing a spike: of every stretch the extremes are kept.
#
# Rows are those that were written, never averages. Rows come one at a time and the number kept is
# bounded, so that the length of the run does not matter.


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
"""The columns of a row. A value is None where it is not known, NaN where NaN was measured."""

Row = tuple[float | None, ...]
STEP, LOSS = COLUMNS.index("step"), COLUMNS.index("loss")
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


# The curves of one rank, from its lines of metrics.


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
        newest: the last row.
    """

    def __init__(self, max_rows: int) -> None:
        self._sampler = Sampler(max_rows)
        self.first_time: float | None = None
        self.last_time: float | None = None
        self.last_step = -1
        self.newest: Row = (None,) * len(COLUMNS)
        self.nonfinite = 0
        self.losses: list[float] | None = None
        self._durations: list[float] = []
        self._stride = 1

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

    def _add(self, rows: list[Row]) -> None:
        if not rows:
            return
        steps, _, losses, norms, *others = zip(*rows, strict=True)
        known = [step for step in steps if step is not None]
        self.last_step = int(max(self.last_step, *known))
        finite = _finite(losses)
        if finite:
            first, _, least, most = self.losses or [finite[0]] * 4
            self.losses = [first, finite[-1], min(least, *finite), max(most, *finite)]
        finite_norms = _finite(norms)
        if len(finite) < len(rows) or len(finite_norms) < len(rows):
            self.nonfinite += sum(_is_bad(row[2]) or _is_bad(row[3]) for row in rows)
        self._durations += _finite(others[SECONDS - 4])[:: self._stride]
        if len(self._durations) > MAX_DURATIONS:
            del self._durations[::2]
            self._stride = min(2 * self._stride, 8)  # of a line; then older ones thin out faster
        self.newest = rows[-1]
        self._sampler.extend(rows)


def highest(rows: Iterable[Row], cells: int) -> list[float | None]:
    """Return the highest loss of each of so many stretches of steps; None where there is none."""
    pairs = [(r[STEP], r[LOSS]) for r in rows if r[STEP] is not None and r[LOSS] is not None]
    known = [(step, loss) for step, loss in pairs if step is not None and not _is_bad(loss)]
    first, last = min((s for s, _ in known), default=0), max((s for s, _ in known), default=0)
    heights: list[float | None] = [None] * (cells if last > first else 0)
    for step, loss in known if heights else ():
        cell = min(cells - 1, int((step - first) / (last - first) * cells))
        before = heights[cell]
        heights[cell] = loss if before is None or loss is None else max(before, loss)
    return heights


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


MAX_ROWS = 24_000  # of all curves of all ranks: about two megabytes of the page
MIN_ROWS = 48  # of one rank
MAX_RANKS = 256  # with curves; the others are in the story and the counts


@dataclass(slots=True)
class RunReport:
    """What is known of a run.

    Attributes:
        runs: how many runs the folder holds, and ``number``, which of them this is, from 1.
        incidents: as :func:`heal.report.story.describe` returns them.
        last_step: the furthest step known, -1 if none.
        live_for: seconds from the first to the last sign of life.
    """

    folder: Path
    ranks: list[int]
    curves: dict[int, RankCurves]
    story: Story
    postmortems: dict[int, dict[str, Any]]
    damage: Damage
    number: int = 1
    runs: int = 1
    incidents: list[dict[str, Any]] = field(default_factory=list)
    last_step: int = -1
    began: float | None = None
    ended: float | None = None

    @property
    def postmortem(self) -> dict[str, Any] | None:
        """That of the lowest rank that has one."""
        return next((self.postmortems[rank] for rank in sorted(self.postmortems)), None)

    @property
    def live_for(self) -> float:
        if self.began is None or self.ended is None:
            return 0.0
        return max(0.0, self.ended - self.began)

    @property
    def step_seconds(self) -> float:
        """What a step usually takes."""
        first = next(iter(self.curves.values()), None)
        return first.usual_seconds() if first is not None else 0.0


def read_run(
    run_dir: str | os.PathLike[str], max_rows: int = MAX_ROWS, run: int | None = None
) -> RunReport:
    """Read a run.

    Args:
        run_dir: what was given to ``Healer``.
        max_rows: about how many rows of the curves are kept, over all ranks.
        run: which run of the folder, counted from 1; the last if None.

    Raises:
        NotARun: the folder holds no such run, or not one line of it can be read.
    """
    files = find_files(run_dir)
    runs = find_runs(files) or [Start(set(), 0.0)]
    number = len(runs) if run is None else run
    if not 1 <= number <= len(runs):
        raise NotARun(f"expected a run from 1 to {len(runs)}, got {number}, in {files.folder}")
    others: set[str] = set().union(*(other.ids for other in runs)) - runs[number - 1].ids
    damage = Damage()
    story = Story()
    for rank, line in read_events(files, damage):
        if run_id(line) not in others:
            story.add(rank, line)
    curves = _read_curves(files, damage, max_rows, others)
    postmortems = {
        rank: page
        for rank, path in sorted(files.postmortems.items())
        if (page := read_postmortem(path, damage)) is not None and _run_of(page, runs) == number
    }
    ranks = files.ranks if len(runs) == 1 else sorted({*story.ranks, *curves, *postmortems})
    report = RunReport(
        files.folder, ranks, curves, story.finish(), postmortems, damage, number, len(runs)
    )
    if not story.events and not postmortems and not any(c.count for c in curves.values()):
        raise NotARun(_nothing(files, damage))
    _conclude(report)
    return report


def _run_of(page: Mapping[str, Any], runs: Sequence[Start]) -> int:
    """Return which run a postmortem ended: the last that began before it was written."""
    written = seconds_of(page.get("timestamp"))
    if written is None:
        return len(runs)
    return max(1, sum(run.began <= written for run in runs))


def _read_curves(
    files: RunFiles, damage: Damage, max_rows: int, others: set[str]
) -> dict[int, RankCurves]:
    ranks = sorted(files.metrics)[:MAX_RANKS]
    curves = {}
    for rank in ranks:
        curve = RankCurves(max(MIN_ROWS, max_rows // len(ranks)))
        for path in files.metrics[rank]:
            for line in read_lines(path, damage):
                if run_id(line) not in others:
                    curve.add_line(line)
        if curve.count or not others:
            curves[rank] = curve
    return curves


def _conclude(report: RunReport) -> None:
    times = [t for c in report.curves.values() for t in (c.first_time, c.last_time)]
    known = [t for t in (*times, report.story.first_time, report.story.last_time) if t is not None]
    report.began, report.ended = min(known, default=None), max(known, default=None)
    steps = [c.last_step for c in report.curves.values()]
    ends = [number(page.get("last_step")) for page in report.postmortems.values()]
    steps += [int(step) for step in ends if abs(step) < 2**53]
    report.last_step = max(steps, default=report.story.last_step)
    report.incidents = [
        describe(i, report.step_seconds, report.last_step, report.postmortem is not None)
        for i in report.story.incidents
    ]


def _nothing(files: RunFiles, damage: Damage) -> str:
    bad = sum(damage.bad_lines.values())
    if bad or damage.unreadable:
        why = " ".join(damage.sentences()[:3])
        return f"{files.folder}: the journal is damaged and not one line can be read. {why}"
    return f"{files.folder}: the journal is empty; the run has not written anything yet"
