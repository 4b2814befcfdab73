"""Reads a whole run once and returns what every form of the report is made from.

Curves are thinned out without losing a spike: of every stretch the extremes are kept. Rows are
those that were written, never averages; they come one at a time and the number kept is bounded, so
that the length of the run does not matter.
"""

import os
import statistics
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from math import isfinite
from pathlib import Path
from typing import Any

from heal.json_lines import number
from heal.report import read
from heal.report.read import Damage, NotARun, run_id, seconds_of, whole
from heal.report.story import Event, Story

PER_STEP = ("loss", "norm", "lr", "lr_scale", "micro_batches", "seconds")
PER_LINE = ("threshold", "mean", "std")
COLUMNS = ("step", "time", *PER_STEP, *PER_LINE)
"""The columns of a row. A value is None where it is not known, NaN where NaN was measured."""

Row = tuple[float | None, ...]
STEP, TIME, LOSS, NORM, *_ = range(len(COLUMNS))
SECONDS, MICRO_BATCHES = COLUMNS.index("seconds"), COLUMNS.index("micro_batches")
EXTREMES = tuple(COLUMNS.index(name) for name in ("loss", "norm", "lr", "lr_scale", "seconds"))
MAX_TURNS = 4  # rollbacks kept in one stretch
MAX_KEPT = 12  # about as many as keep() leaves of a long stretch
MAX_DURATIONS = 4096  # newest steps whose durations give the median
MAX_ROWS = 24_000  # of all curves of all ranks: about two megabytes of the page
MIN_ROWS = 48  # of one rank
NOTHING_YET = "empty; the run has not written anything yet"
MAX_RANKS = 256  # with curves; the others are in the story and the counts


class Sampler:
    """Keeps about ``max_rows`` rows of however many come; no stretch is thinned out before that.

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
                pairs = zip(self._full[::2], self._full[1::2], strict=True)
                self._full = [keep([*first, *second]) for first, second in pairs]
                self._width *= 2

    def rows(self) -> list[Row]:
        """Return what was kept, in order."""
        return [row for bucket in (*self._full, keep(self._open)) for row in bucket]


def keep(rows: Sequence[Row]) -> list[Row]:
    """Return ends, extremes, first NaN and turning points of a stretch; all of a short one."""
    if len(rows) <= MAX_KEPT:
        return list(rows)
    chosen = {0, len(rows) - 1}
    for column in EXTREMES:
        known = [(row[column], i) for i, row in enumerate(rows) if row[column] is not None]
        finite = [(value, i) for value, i in known if value is not None and isfinite(value)]
        if finite:
            chosen |= {min(finite)[1], max(finite)[1]}
        if len(finite) < len(known):
            chosen.add(next(i for value, i in known if _is_bad(value)))
    pairs = list(enumerate(pairwise(rows), 1))
    rollbacks = (i for i, (a, b) in pairs if (b[STEP] or 0) <= (a[STEP] or 0))
    splits = (i for i, (a, b) in pairs if a[MICRO_BATCHES] != b[MICRO_BATCHES])
    for turns in (rollbacks, splits):
        chosen |= {place for i in islice(turns, MAX_TURNS) for place in (i - 1, i)}
    return [rows[i] for i in sorted(chosen)]


class RankCurves(Sampler):
    """The curves of one rank, thinned out to ``max_rows``, and exact first, last and extremes.

    Attributes:
        losses: first, last, least and largest finite loss; None before the first.
        first_time: seconds since 1970 of the first line, and ``last_time``, of the last.
        newest: the last row.
        nonfinite: records with NaN or Inf.
    """

    def __init__(self, max_rows: int) -> None:
        super().__init__(max_rows)
        self.first_time: float | None = None
        self.last_time: float | None = None
        self.last_step = -1
        self.newest: Row = (None,) * len(COLUMNS)
        self.nonfinite = 0
        self.losses: list[float] | None = None
        self._durations: deque[float] = deque(maxlen=MAX_DURATIONS)

    def median_seconds(self) -> float:
        """Return the median duration of a step; 0 if none is known."""
        return statistics.median(self._durations) if self._durations else 0.0

    def add_line(self, line: Mapping[str, Any]) -> None:
        """Take in a line of metrics: its series if it has one, else its own numbers."""
        if whole(line.get("step")) is None:
            return
        time = seconds_of(line.get("time"))
        if time is not None:
            self.first_time = min(time, self.first_time or time)
            self.last_time = max(time, self.last_time or time)
        series = line.get("series")
        if not isinstance(series, Mapping) or not isinstance(series.get("step"), list):
            seen = line["step"] if whole(line.get("seen_at")) is None else line["seen_at"]
            names = {"loss": "loss", "norm": "zclip/raw_grad_norm", "lr_scale": "lr_scale"}
            names["threshold"] = "zclip/threshold"
            series = {"step": [seen], **{name: line.get(key) for name, key in names.items()}}
        steps = [whole(step) for step in series["step"]]
        columns = {name: _column(series.get(name), len(steps)) for name in PER_STEP}
        same = [_value(series.get(name)) for name in PER_LINE]
        times = _times(time, columns["seconds"])
        rows = zip(steps, times, *columns.values(), strict=True)
        self._add([(*row, *same) for row in rows if row[STEP] is not None])

    def _add(self, rows: list[Row]) -> None:
        if not rows:
            return
        self.last_step = int(max(self.last_step, *(row[STEP] or 0 for row in rows)))
        finite = _finite(row[LOSS] for row in rows)
        if finite:
            first, _, least, most = self.losses or [finite[0]] * 4
            self.losses = [first, finite[-1], min(least, *finite), max(most, *finite)]
        self.nonfinite += sum(_is_bad(row[LOSS]) or _is_bad(row[NORM]) for row in rows)
        self._durations.extend(_finite(row[SECONDS] for row in rows))
        self.newest = rows[-1]
        self.extend(rows)


def highest(rows: Iterable[Row], cells: int) -> list[float | None]:
    """Return the highest loss of each of so many stretches of steps; None where there is none."""
    known = [(row[STEP] or 0.0, loss) for row in rows for loss in _finite([row[LOSS]])]
    first, last = min((s for s, _ in known), default=0), max((s for s, _ in known), default=0)
    heights: list[float | None] = [None] * (cells if last > first else 0)
    for step, loss in known if heights else ():
        cell = min(cells - 1, int((step - first) / (last - first) * cells))
        before = heights[cell]
        heights[cell] = loss if before is None else max(before, loss)
    return heights


def _finite(values: Iterable[float | None]) -> list[float]:
    return [v for v in values if v is not None and isfinite(v)]


def _is_bad(value: float | None) -> bool:
    return value is not None and not isfinite(value)


def _value(entry: Any) -> float | None:
    """Return a number of a line, which may be a word such as "NaN"; None if it is none."""
    if type(entry) is float:
        return entry
    is_word = isinstance(entry, str) and entry not in ("NaN", "Infinity", "-Infinity")
    return None if entry is None or isinstance(entry, bool) or is_word else number(entry)


def _column(values: Any, length: int) -> list[float | None]:
    """Return a column of a series: one value for all, in full, or too short to be one."""
    if not isinstance(values, list):
        return [_value(values)] * length
    found = [_value(v) for v in values[:length]]
    return found + [None] * (length - len(found))


def _times(end: float | None, durations: list[float | None]) -> list[float | None]:
    """Return when each step was, counted back from when the line was written."""
    times: list[float | None] = []
    for seconds in reversed(durations):
        times.append(end)
        if end is not None and seconds is not None and isfinite(seconds):
            end -= max(0.0, seconds)
    return times[::-1]


@dataclass
class RunReport:
    """What is known of a run."""

    folder: Path
    ranks: list[int]
    curves: dict[int, RankCurves]
    story: Story
    postmortems: dict[int, dict[str, Any]]
    damage: Damage
    number: int = 1  # which of the runs in the folder this is, from 1
    runs: int = 1

    def __post_init__(self) -> None:
        # That of the lowest rank that has one.
        self.postmortem = next((page for _, page in sorted(self.postmortems.items())), None)
        self.step_seconds = next((c.median_seconds() for c in self.curves.values()), 0.0)
        # The first and the last sign of life, in seconds since 1970.
        times = [time for c in self.curves.values() for time in (c.first_time, c.last_time)]
        known = [t for t in (*times, self.story.first_time, self.story.last_time) if t is not None]
        self.began, self.ended = min(known, default=None), max(known, default=None)
        steps = [curves.last_step for curves in self.curves.values()]
        ends = [number(page.get("last_step")) for page in self.postmortems.values()]
        steps += [int(step) for step in ends if abs(step) < 2**53]
        self.last_step = max(steps, default=self.story.last_step)
        self.incidents = [
            i.to_json(self.step_seconds, self.last_step, self.postmortem is not None)
            for i in self.story.incidents
        ]

    @property
    def live_for(self) -> float:
        """Seconds from the first to the last sign of life."""
        return max(0.0, (self.ended or 0.0) - (self.began or 0.0))


def read_run(run_dir: str | os.PathLike[str], run: int | None = None) -> RunReport:
    """Read a run.

    Args:
        run_dir: what was given to ``Healer``.
        run: which run of the folder, counted from 1; the last if None.

    Raises:
        NotARun: the folder holds no such run, or not one line of it can be read.
    """
    files = read.find_files(run_dir)
    runs = read.find_runs(files) or [read.Start(set(), 0.0)]
    number = len(runs) if run is None else run
    if not 1 <= number <= len(runs):
        raise NotARun(f"expected a run from 1 to {len(runs)}, got {number}, in {files.folder}")
    others: set[str] = set().union(*(other.ids for other in runs)) - runs[number - 1].ids
    damage, story = Damage(), Story()
    for rank, line in read.read_events(files, damage):
        if run_id(line) not in others:
            story.add(Event(rank, line))
    story.finish()
    shown = sorted(files.metrics)[:MAX_RANKS]
    curves = {rank: RankCurves(max(MIN_ROWS, MAX_ROWS // len(shown))) for rank in shown}
    for rank, curve in curves.items():
        for path in files.metrics[rank]:
            for line in read.read_lines(path, damage):
                if run_id(line) not in others:
                    curve.add_line(line)
    curves = {rank: curve for rank, curve in curves.items() if curve.count or not others}
    postmortems = {}
    for rank, path in sorted(files.postmortems.items()):
        page = read.read_postmortem(path, damage)
        if page is not None and _run_of(page, runs) == number:
            postmortems[rank] = page
    if not story.events and not postmortems and not any(c.count for c in curves.values()):
        why = " ".join(damage.sentences()[:3])
        found = f"damaged and not one line can be read. {why}" if why else NOTHING_YET
        raise NotARun(f"{files.folder}: the journal is {found}")
    ranks = files.ranks if len(runs) == 1 else sorted({*story.ranks, *curves, *postmortems})
    return RunReport(files.folder, ranks, curves, story, postmortems, damage, number, len(runs))


def _run_of(page: Mapping[str, Any], runs: Sequence[read.Start]) -> int:
    """Return which run a postmortem ended: the last that began before it was written."""
    written = seconds_of(page.get("timestamp"))
    if written is None:
        return len(runs)
    return max(1, sum(run.began <= written for run in runs))
