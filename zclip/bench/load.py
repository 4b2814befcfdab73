"""Whether others use this machine: what makes a timing noise, and what is recorded of it."""

import os
import time
from dataclasses import dataclass
from pathlib import Path

BUSY_SHARE = 0.15
"""By how much the cores in demand, ours and others', may exceed those that there are."""


@dataclass(frozen=True)
class Load:
    """What went on while a case was measured."""

    average: float
    """Processes that asked for a core over the last minute; 0 where it is not counted."""
    others: float | None
    """Share of all cores that other processes used; None where it is not counted."""
    threads: int
    """Cores that we want ourselves. Others on a machine with cores to spare do little harm."""

    @property
    def problem(self) -> str | None:
        """Why timings taken meanwhile are not to be believed; None if they are."""
        cores = os.cpu_count() or 1
        if self.others is not None and self.others + self.threads / cores > 1 + BUSY_SHARE:
            return f"other processes used {self.others:.0%} of the machine"
        if self.others is None and self.average > cores + 1:
            return f"load {self.average:.1f} on {cores} cores"
        return None


class LoadMeter:
    """Watches from its construction on, a run that wants so many threads."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self.started = time.monotonic()
        self.all, self.own = _busy_seconds(), _own_seconds()

    def read(self) -> Load:
        """Return the load since the meter was made."""
        average = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
        busy = _busy_seconds()
        if self.all is None or busy is None:
            return Load(average, None, self.threads)
        span = (time.monotonic() - self.started) * (os.cpu_count() or 1)
        theirs = (busy - self.all) - (_own_seconds() - self.own)
        return Load(average, max(0.0, theirs / span) if span > 0 else None, self.threads)


def _busy_seconds() -> float | None:
    """Return the seconds that all cores together were busy, or stolen, since the machine began."""
    try:
        line = Path("/proc/stat").read_text().split("\n", 1)[0]
        fields = [int(word) for word in line.split()[1:]]
        return (sum(fields[:8]) - fields[3] - fields[4]) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return None


def _own_seconds() -> float:
    times = os.times()
    return times.user + times.system
