"""Reads a whole run once and returns what every form of the report is made from."""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from heal.journal.json_lines import number
from heal.report.curves import RankCurves
from heal.report.read import (
    Damage,
    NotARun,
    RunFiles,
    find_files,
    read_events,
    read_lines,
    read_postmortem,
)
from heal.report.story import Story, tell_incident

MAX_ROWS = 24_000  # of all curves of all ranks: about two megabytes of the page
MIN_ROWS = 48  # of one rank
MAX_RANKS = 256  # with curves; the others are in the story and the counts


@dataclass(slots=True)
class RunReport:
    """What is known of a run.

    Attributes:
        incidents: as :func:`heal.report.story.tell_incident` returns them.
        last_step: the furthest step known, -1 if none.
        live_for: seconds from the first to the last sign of life.
    """

    folder: Path
    ranks: list[int]
    curves: dict[int, RankCurves]
    story: Story
    postmortems: dict[int, dict[str, Any]]
    damage: Damage
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


def read_run(run_dir: str | os.PathLike[str], max_rows: int = MAX_ROWS) -> RunReport:
    """Read a run.

    Args:
        run_dir: what was given to ``Healer``.
        max_rows: about how many rows of the curves are kept, over all ranks.

    Raises:
        NotARun: the folder holds no run, or not one line of it can be read.
    """
    files = find_files(run_dir)
    damage = Damage()
    story = Story()
    for rank, line in read_events(files, damage):
        story.tell(rank, line)
    curves = _read_curves(files, damage, max_rows)
    postmortems = {
        rank: page
        for rank, path in sorted(files.postmortems.items())
        if (page := read_postmortem(path, damage)) is not None
    }
    report = RunReport(files.folder, files.ranks, curves, story.finish(), postmortems, damage)
    if not story.events and not postmortems and not any(c.count for c in curves.values()):
        raise NotARun(_nothing(files, damage))
    _conclude(report)
    return report


def _read_curves(files: RunFiles, damage: Damage, max_rows: int) -> dict[int, RankCurves]:
    ranks = sorted(files.metrics)[:MAX_RANKS]
    curves = {}
    for rank in ranks:
        curves[rank] = RankCurves(max(MIN_ROWS, max_rows // len(ranks)))
        for path in files.metrics[rank]:
            for line in read_lines(path, damage):
                curves[rank].add_line(line)
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
        tell_incident(i, report.step_seconds, report.last_step, report.postmortem is not None)
        for i in report.story.incidents
    ]


def _nothing(files: RunFiles, damage: Damage) -> str:
    bad = sum(damage.bad_lines.values())
    if bad or damage.unreadable:
        why = " ".join(damage.sentences()[:3])
        return f"{files.folder}: the journal is damaged and not one line can be read. {why}"
    return f"{files.folder}: the journal is empty; the run has not written anything yet"
