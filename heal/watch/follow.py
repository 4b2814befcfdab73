"""Shows a live run until it ends: a screen if there is a terminal and rich, else lines."""

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from heal.report.words import count, duration
from heal.watch.live import LiveRun

QUIET_SECONDS = 60.0
"""Without a line of metrics for so long, the reader is told that nothing comes."""


def follow(
    folder: Path,
    *,
    interval: float = 1.0,
    plain: bool = False,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Show a run until it ends or Ctrl-C is pressed.

    Args:
        folder: of the run; waited for if it does not exist yet.
        interval: seconds between looks.
        plain: lines only, no screen.
        sleep: waits; tests give one that does something meanwhile.
    """
    run = LiveRun(folder)
    screen = None if plain else _screen(run)
    try:
        _wait(run, interval, sleep)
        if screen is None or run.ended:
            _print_lines(run, interval, sleep)
        else:
            screen(interval, sleep)
            print(closing_line(run))
    except KeyboardInterrupt:
        print("\nstopped watching; the run goes on without us")


def _wait(run: LiveRun, interval: float, sleep: Callable[[float], None]) -> None:
    run.poll()
    if run.exists:
        return
    what = "has no journal yet" if run.folder.is_dir() else "does not exist yet"
    print(f"{run.folder} {what}: waiting (Ctrl-C ends)", flush=True)
    while not run.exists:
        sleep(interval)
        run.poll()


def _print_lines(run: LiveRun, interval: float, sleep: Callable[[float], None]) -> None:
    """Print events as they come, and a line of numbers when they have changed."""
    fresh, last = list(run.news), ""
    while True:
        for sentence in fresh:
            print(sentence)
        line = numbers_line(run)
        if line != last and run.ranks:
            print(line, flush=True)
        if run.ended:
            print(closing_line(run))
            return
        last = line
        sleep(interval)
        fresh = run.poll()


def numbers_line(run: LiveRun) -> str:
    """Return where the run is: step, loss, norm, factor on the learning rate."""
    if not run.ranks:
        return "no numbers yet"
    lowest = run.ranks[min(run.ranks)]
    done = 0 if run.step is None else run.step + 1
    parts = [
        f"{done} of {run.goal} steps" if run.goal else f"{done} steps",
        f"loss {lowest.loss}",
        f"norm {lowest.norm}",
        f"lr x {lowest.lr_scale}",
    ]
    if lowest.steps_per_second:
        parts.append(f"{lowest.steps_per_second:.3g} steps/s")
    if len(run.ranks) > 1:
        parts.append(f"{len(run.ranks)} ranks")
    if run.acted:
        parts.append(f"treated {count(run.acted, 'time')}")
    return "  ".join(parts)


def quiet_words(run: LiveRun, now: float) -> str:
    """Return how long nothing came, if that is long."""
    if run.last_time is None or now - run.last_time < QUIET_SECONDS:
        return ""
    return f"no news for {duration(now - run.last_time)}: busy, stuck or killed"


def closing_line(run: LiveRun) -> str:
    """Return how the run ended."""
    at = "" if run.step is None else f" after {count(run.step + 1, 'step')}"
    healed = f" and was treated {count(run.acted, 'time')}" if run.acted else ""
    page = f"heal report {run.folder}"
    return f"the run {run.ending or 'goes on'}{at}{healed}. For the whole story: {page}"


def _screen(run: LiveRun) -> Any:
    if not sys.stdout.isatty():
        return None
    try:
        from heal.watch.screen import Screen
    except ImportError:  # no rich
        return None
    return Screen(run)
