"""Finds and reads the files of a run: several ranks, rotated, torn, live or damaged.

Lines are yielded one at a time: metrics of a million steps are never in memory together. No
content of a line raises.
"""

import errno
import heapq
import math
import os
import re
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, BinaryIO

from heal.checkpoint.files import write_file
from heal.json_lines import parse_line

READ_FLAGS = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)
NOT_REGULAR = "expected a regular file, got a pipe, a device or a folder"
LINES = re.compile(r"(events|metrics)(?:\.rank(\d+))?\.jsonl(\.1)?")
POSTMORTEM = re.compile(r"postmortem(?:\.rank(\d+))?\.json")
MAX_LINE = 4 * 2**20  # bytes; a longer one is no line of ours
EXPECTED = "expected the run_dir that was given to Healer"


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading, or a link to one; a pipe would hang.

    Raises:
        OSError: it cannot be opened, or is no regular file.
    """
    descriptor = os.open(path, READ_FLAGS)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, NOT_REGULAR, str(path))
    return os.fdopen(descriptor, "rb")


def write_report(path: Path, text: str) -> None:
    """Write a report whole or not at all.

    Raises:
        OSError: it cannot be written, or something other than a regular file is in its place.
    """
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, f"{NOT_REGULAR}; give - for standard output", str(path))
    write_file(path, [text.encode()], mode=0o666)


class NotARun(ValueError):
    """The folder holds no journal; the message says what was found."""


@dataclass(slots=True)
class RunFiles:
    """Which file of which rank is where, oldest first."""

    folder: Path
    events: dict[int, list[Path]] = field(default_factory=dict)
    metrics: dict[int, list[Path]] = field(default_factory=dict)
    postmortems: dict[int, Path] = field(default_factory=dict)

    @property
    def ranks(self) -> list[int]:
        return sorted({*self.events, *self.metrics, *self.postmortems})


@dataclass(slots=True)
class Damage:
    """What could not be read."""

    bad_lines: dict[str, int] = field(default_factory=dict)
    unreadable: dict[str, str] = field(default_factory=dict)

    def sentences(self) -> list[str]:
        """Return it for people, a sentence per file."""
        lines = {n: f"{c} line{'s' * (c > 1)} could not be read" for n, c in self.bad_lines.items()}
        return [f"{name}: {why}." for name, why in (*lines.items(), *self.unreadable.items())]


def find_files(run_dir: str | os.PathLike[str]) -> RunFiles:
    """Return the files of a run.

    Raises:
        NotARun: there is no such folder, or nothing of a run in it.
    """
    folder = Path(run_dir)
    if not folder.exists():
        raise NotARun(f"{EXPECTED}, got {folder}, which does not exist")
    if not folder.is_dir():
        raise NotARun(f"{EXPECTED}, got {folder}, which is a file")
    found = RunFiles(folder)
    for path in sorted(folder.iterdir(), key=lambda path: (path.suffix != ".1", path.name)):
        if match := LINES.fullmatch(path.name):
            of_kind = found.events if match[1] == "events" else found.metrics
            of_kind.setdefault(int(match[2] or 0), []).append(path)
        elif match := POSTMORTEM.fullmatch(path.name):
            found.postmortems[int(match[1] or 0)] = path
    if not found.ranks:
        raise NotARun(
            f"{EXPECTED}, got {folder}, which has no events.jsonl, metrics.jsonl or postmortem.json"
        )
    return found


def read_lines(path: Path, damage: Damage) -> Iterator[dict[str, Any]]:
    """Yield the lines of a file that can be read; count the others."""
    try:
        with open_regular(path) as file:
            for raw in iter(lambda: file.readline(MAX_LINE), b""):
                line = parse_line(raw)
                if line is not None:
                    yield line
                elif raw.strip():
                    damage.bad_lines[path.name] = damage.bad_lines.get(path.name, 0) + 1
    except OSError as error:
        damage.unreadable[path.name] = error.strerror or str(error)


def read_events(files: RunFiles, damage: Damage) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield rank and event of all ranks together, in the order of their times."""

    def of_rank(rank: int) -> Iterator[tuple[float, int, int, dict[str, Any]]]:
        last, count = -math.inf, 0
        for path in files.events[rank]:
            for line in read_lines(path, damage):
                time = seconds_of(line.get("time"))
                last = last if time is None else max(last, time)
                count += 1  # so that two lines are never compared themselves
                yield last, rank, count, line

    for _, rank, _, line in heapq.merge(*(of_rank(rank) for rank in sorted(files.events))):
        yield rank, line


@dataclass(slots=True)
class Start:
    """One run of a folder, or a later start of it: the ids of its lines, and when it began."""

    ids: set[str]
    began: float
    rank: int = 0  # the lowest that wrote such a line
    resumes: bool = False


def run_id(line: Mapping[str, Any]) -> str:
    """Return which run wrote a line; lines of older versions have no id and are one run."""
    return str(line.get("run", ""))


def find_runs(files: RunFiles) -> list[Start]:
    """Return the runs of a folder, the oldest first.

    A start that goes on from a checkpoint belongs to the run before it. Ranks have ids of their
    own: a start of another rank belongs to the run of the lowest rank that began nearest to it.
    """
    starts: dict[str, Start] = {}
    for rank, line in read_events(files, Damage()):
        name, time = run_id(line), seconds_of(line.get("time")) or 0.0
        start = starts.setdefault(name, Start({name}, time, rank))
        start.rank = min(start.rank, rank)
        start.resumes |= line.get("event") == "resumed"
    lowest = min((start.rank for start in starts.values()), default=0)
    own = [start for start in starts.values() if start.rank == lowest]
    runs: list[Start] = []
    for start in own:
        if runs and start.resumes:
            runs[-1].ids |= start.ids
        else:
            runs.append(Start(set(start.ids), start.began))
    for start in starts.values():
        if start.rank != lowest:
            gaps = [(abs(start.began - mine.began), place) for place, mine in enumerate(own)]
            nearest = own[min(gaps)[1]]
            next(run for run in runs if nearest.ids <= run.ids).ids |= start.ids
    return runs


def read_postmortem(path: Path, damage: Damage) -> dict[str, Any] | None:
    """Return a postmortem, None if it cannot be read."""
    try:
        with open_regular(path) as file:
            page, why = parse_line(file.read()), "it is not a JSON object"
    except OSError as error:
        page, why = None, error.strerror or str(error)
    if page is None:
        damage.unreadable[path.name] = why
    return page


def seconds_of(time: Any) -> float | None:
    """Return the seconds since 1970 of an ISO time; None if it is none."""
    try:
        moment = datetime.fromisoformat(str(time).replace("Z", "+00:00"))
        if moment.tzinfo is None:
            moment = moment.replace(tzinfo=timezone.utc)
        return moment.timestamp()
    except (ValueError, OverflowError, OSError):
        return None


def whole(value: Any) -> int | None:
    """Return a step or a count; None if it is none."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return int(value) if abs(value) < 2**53 else None
