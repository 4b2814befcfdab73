"""Shows a live run until it ends: a screen if there is a terminal and rich, else lines."""

import os
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from heal.json_lines import parse_line
from heal.report import read, words
from heal.report.collect import COLUMNS, STEP, RankCurves, highest
from heal.report.data import ending_words
from heal.report.read import Damage, NotARun, open_regular, run_id, seconds_of, whole
from heal.report.story import KINDS, Event
from heal.report.words import count, duration

START_BYTES = 2**20  # read of a file that is long already; the end is what counts
MAX_EVENTS = 200  # events kept
MAX_ROWS = 2048  # of the curve of a rank
CURVE_CELLS = 32
QUIET_SECONDS = 60.0  # without a line of metrics, after which the screen warns
SHOWN_RANKS = 16  # rows of the screen; of more, those furthest behind
SHOWN_EVENTS = 8
BLOCKS = " \u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"

Sleep = Callable[[float], None]


class Tail:
    """The new lines of a file that another process writes, rotates or replaces.

    The file may not exist yet, its last line may be half written, it may be put aside and begun
    again. None of that raises.

    Attributes:
        bad_lines: lines that could not be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.bad_lines = 0
        self._read_to = 0
        self._identity: tuple[int, int] | None = None

    def lines(self) -> list[dict[str, Any]]:
        """Return the lines that were completed since the last call."""
        try:
            with open_regular(self.path) as file:
                identity, size = _identity_of(file)
                if identity == self._identity and size >= self._read_to:
                    return self._read(file)
                found = self._read_rotated()
                self._identity, self._read_to = identity, 0
                if size > START_BYTES:
                    file.seek(size - START_BYTES)
                    file.readline()  # half a line
                    self._read_to = file.tell()
                return found + self._read(file)
        except OSError:  # not there yet, or no longer
            return self._read_rotated()

    def _read_rotated(self) -> list[dict[str, Any]]:
        """Return what was written to the file before it was put aside."""
        try:
            with open_regular(self.path.with_name(f"{self.path.name}.1")) as file:
                if _identity_of(file)[0] == self._identity:
                    return self._read(file)
        except OSError:
            pass
        self._identity = None
        return []

    def _read(self, file: BinaryIO) -> list[dict[str, Any]]:
        file.seek(self._read_to)
        *complete, rest = file.read().split(b"\n")
        self._read_to += sum(len(raw) + 1 for raw in complete)
        if len(rest) > read.MAX_LINE:
            self._read_to += len(rest)
            self.bad_lines += 1
        lines = [parse_line(raw) for raw in complete if raw.strip()]
        found = [line for line in lines if line is not None]
        self.bad_lines += len(lines) - len(found)
        return found


def _identity_of(file: BinaryIO) -> tuple[tuple[int, int], int]:
    about = os.fstat(file.fileno())
    return (about.st_ino, about.st_dev), about.st_size


@dataclass(slots=True)
class LiveRun:
    """Polls the files of a run; of several in the folder the newest."""

    folder: Path
    ranks: dict[int, RankCurves] = field(default_factory=dict)
    runs: dict[int, str] = field(default_factory=dict)  # the id of the run, by rank
    goal: int | None = None
    began: float | None = None
    acted: int = 0
    noted: int = 0
    events: deque[str] = field(default_factory=lambda: deque(maxlen=MAX_EVENTS))
    ending: str = ""  # why the run ended
    ended: bool = False
    _tails: dict[str, Tail] = field(default_factory=dict)

    def poll(self) -> list[str]:
        """Read what is new; return the sentences about new events."""
        try:
            files = read.find_files(self.folder)
        except (NotARun, OSError):
            return []
        fresh: list[str] = []
        for rank in sorted(files.events):
            for line in self._tail("events", rank).lines():
                sentence = self._add_event(Event(rank, line))
                fresh += [f"rank {rank}, {sentence}" if rank else sentence] if sentence else []
        for rank in sorted(files.metrics):
            for line in self._tail("metrics", rank).lines():
                if run_id(line) == self.runs.get(rank, run_id(line)):
                    self.ranks.setdefault(rank, RankCurves(MAX_ROWS)).add_line(line)
        self._look_for_ending(files.postmortems)
        self.events.extend(fresh)
        return fresh

    @property
    def exists(self) -> bool:
        """Whether there is anything of a run."""
        return bool(self.ranks) or bool(self._tails) or self.ended

    @property
    def bad_lines(self) -> int:
        return sum(tail.bad_lines for tail in self._tails.values())

    @property
    def done(self) -> int:
        """Steps that every rank has taken; after a rollback fewer."""
        steps = (whole(curves.newest[STEP]) for curves in self.ranks.values())
        return min((step + 1 for step in steps if step is not None), default=0)

    @property
    def last_time(self) -> float | None:
        times = [c.last_time for c in self.ranks.values() if c.last_time is not None]
        return max(times, default=self.began)

    def _tail(self, kind: str, rank: int) -> Tail:
        name = f"{kind}.rank{rank}.jsonl" if rank else f"{kind}.jsonl"
        return self._tails.setdefault(name, Tail(self.folder / name))

    def _add_event(self, event: Event) -> str:
        """Return a sentence about an event; empty if it says nothing to people."""
        rank, line = event.rank, event.line
        if event.name == "goal":
            self.goal = whole(line.get("steps"))
            return ""
        if event.name == "started":
            self.began, self.ending, self.ended = event.time, "", False
            if self.runs.get(rank, run_id(line)) != run_id(line):  # not that of the run before
                self.ranks.pop(rank, None)
                self.goal, self.acted, self.noted = None, 0, 0
            self.runs[rank] = run_id(line)
            return f"started on {words.show(line.get('host'))}"
        if not event.is_trouble:
            return f"step {event.step}: {words.event_words(line)}"
        self.noted += event.kind == "alert"
        self.acted += event.kind not in ("alert", "refused")
        done = "; ".join(words.action_words(a, event.resumed_at) for a in event.plan)
        return f"step {event.step}: {words.title(event.failure)}. {done or KINDS[event.kind]}"

    def _look_for_ending(self, postmortems: dict[int, Path]) -> None:
        """Believe a postmortem unless the run has started again since."""
        if not postmortems or self.ended:
            return
        page = read.read_postmortem(postmortems[min(postmortems)], Damage())
        if page is None or (self.began or 0.0) > (seconds_of(page.get("timestamp")) or 0.0):
            return
        self.ended, self.ending = True, ending_words(page)
        if page.get("exit_reason") != "completed":
            message = words.show(page.get("exception_message"))
            self.ending += f" (exit code {words.show(page.get('exit_code'))}: {message})"


def follow(
    folder: Path, *, interval: float = 1.0, plain: bool = False, sleep: Sleep = time.sleep
) -> None:
    """Show a run until it ends or Ctrl-C is pressed.

    A folder that does not exist yet is waited for. ``interval`` is in seconds; ``plain`` means
    lines, and no screen.
    """
    run = LiveRun(folder)
    try:
        run.poll()
        if not run.exists:
            what = "has no journal yet" if folder.is_dir() else "does not exist yet"
            print(f"{folder} {what}: waiting (Ctrl-C ends)", flush=True)
        while not run.exists:
            sleep(interval)
            run.poll()
        if plain or run.ended or not _draw(run, interval, sleep):
            _print_lines(run, interval, sleep)
        print(closing_line(run))
    except KeyboardInterrupt:
        print("\nstopped watching; the run continues")


def _print_lines(run: LiveRun, interval: float, sleep: Sleep) -> None:
    """Print events as they come, and a line of numbers when they have changed."""
    fresh, last = list(run.events), ""
    while True:
        for sentence in fresh:
            print(sentence)
        line = numbers_line(run)
        if line != last and run.ranks:
            print(line, flush=True)
        if run.ended:
            return
        last = line
        sleep(interval)
        fresh = run.poll()


def _draw(run: LiveRun, interval: float, sleep: Sleep) -> bool:
    """Draw the run again and again until it ends; False without a terminal or without rich."""
    if not sys.stdout.isatty():
        return False
    try:
        from rich.live import Live
    except ImportError:
        return False
    with Live(screen_of(run), auto_refresh=False) as live:
        while not run.ended:
            sleep(interval)
            run.poll()
            live.update(screen_of(run), refresh=True)
    return True


def screen_of(run: LiveRun) -> Any:
    """Return what the screen shows of a run now, for rich to draw."""
    from rich.console import Group
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    head: list[Any] = [Text(run.folder.name, style="bold")]
    if run.goal:
        head += [ProgressBar(total=run.goal, completed=run.done, width=24)]
        head += [Text(f"{run.done} of {run.goal} steps, {run.done / run.goal:.0%}")]
        seconds = next(filter(None, (c.median_seconds() for c in run.ranks.values())), 0.0)
        if seconds and run.done < run.goal:
            head += [Text(f"{duration((run.goal - run.done) * seconds)} to go", style="dim")]
    else:
        head += [Text(f"{run.done} steps")]
    head += [Text(f"acted {run.acted}, logged {run.noted}", style="cyan")]
    if run.bad_lines:
        head += [Text(f"{run.bad_lines} unreadable lines", style="yellow")]
    grid = Table.grid(padding=(0, 1))
    grid.add_row(*head)

    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("rank", "step", "loss", "norm", "lr x", "split", "steps/s", "NaN"):
        table.add_column(name, justify="right", no_wrap=True)
    order = sorted(run.ranks, key=lambda rank: (whole(run.ranks[rank].newest[STEP]) or 0, rank))
    for rank in sorted(order[:SHOWN_RANKS]):
        curves = run.ranks[rank]
        names = ("step", "loss", "norm", "lr_scale", "micro_batches")
        cells = [str(rank), *(shown(curves, name) for name in names)]
        table.add_row(*map(Text, [*cells, rate_of(curves) or "-", str(curves.nonfinite)]))
    if len(order) > SHOWN_RANKS:
        table.caption = f"{len(order) - SHOWN_RANKS} more ranks are further ahead"

    parts: list[Any] = [grid, table]
    if run.ranks and (curve := curve_of(run.ranks[min(run.ranks)], BLOCKS)):
        parts.append(Text(f"loss {curve}", style="green"))
    for sentence in list(run.events)[-SHOWN_EVENTS:]:
        parts.append(Text(sentence, style="dim", overflow="ellipsis", no_wrap=True))
    quiet = quiet_words(run, time.time())
    if quiet and not run.ended:
        parts.append(Text(quiet, style="yellow"))
    return Group(*parts)


def numbers_line(run: LiveRun) -> str:
    """Return where the run is: step, loss, norm, factor on the learning rate."""
    if not run.ranks:
        return "no numbers yet"
    lowest = run.ranks[min(run.ranks)]
    rate = rate_of(lowest)
    parts = [
        f"{run.done} of {run.goal} steps" if run.goal else f"{run.done} steps",
        f"loss {shown(lowest, 'loss')}",
        f"norm {shown(lowest, 'norm')}",
        f"lr x {shown(lowest, 'lr_scale')}",
        curve_of(lowest),
        f"{rate} steps/s" if rate else "",
        f"{len(run.ranks)} ranks" if len(run.ranks) > 1 else "",
        f"acted {count(run.acted, 'time')}" if run.acted else "",
    ]
    return "  ".join(filter(None, parts))


def shown(curves: RankCurves, column: str) -> str:
    """Return the newest number of a column."""
    return words.show(curves.newest[COLUMNS.index(column)])


def rate_of(curves: RankCurves) -> str:
    """Return the steps per second, by the median step; empty if they are not known."""
    seconds = curves.median_seconds()
    return f"{1.0 / seconds:.3g}" if seconds else ""


def curve_of(curves: RankCurves, bars: str = words.BARS) -> str:
    """Return the losses of a rank as a sparkline, the highest of every stretch."""
    return words.sparkline(highest(curves.rows(), CURVE_CELLS), bars)


def quiet_words(run: LiveRun, now: float) -> str:
    """Return how long nothing came, if that is long."""
    if run.last_time is None or now - run.last_time < QUIET_SECONDS:
        return ""
    return f"nothing new for {duration(now - run.last_time)}: busy, stuck or killed"


def closing_line(run: LiveRun) -> str:
    """Return how the run ended."""
    at = f" after {count(run.done, 'step')}" if run.ranks else ""
    acted = f"; heal acted {count(run.acted, 'time')}" if run.acted else ""
    page = f"heal report {run.folder}"
    return f"the run {run.ending or 'goes on'}{at}{acted}. For the full report: {page}"
