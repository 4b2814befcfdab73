"""Strict JSON, one object a line: every parser can read it, and no bad line stops the reading.

NaN and Inf, which JSON does not have, are strings.
"""

import json
import math
import os
from collections.abc import Iterable, Mapping
from datetime import datetime, timezone
from typing import Any


def now() -> str:
    """Return the time in UTC, as ISO 8601 with a Z."""
    return datetime.now(timezone.utc).isoformat(timespec="microseconds").replace("+00:00", "Z")


def dumps(value: Any) -> str:
    """Return strict JSON on one line; what JSON does not have becomes a string."""
    return json.dumps(encodable(value), allow_nan=False, separators=(",", ":"))


def encodable(value: Any) -> Any:
    """Return a value with every NaN, Inf and unknown object in it made a string."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        return {str(key): encodable(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [encodable(entry) for entry in value]
    return str(value)


def number(value: Any) -> float:
    """Return a number that :func:`encodable` may have made a word; NaN for anything else."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return math.nan
    except OverflowError:  # an integer that no float can hold
        return math.inf


def parse_line(raw: bytes) -> dict[str, Any] | None:
    """Return a line as a dict, None if it is none."""
    try:
        line = json.loads(raw)
    except (ValueError, RecursionError):  # not JSON, not UTF-8, or brackets without end
        return None
    return line if isinstance(line, dict) else None


def read_events(path: str | os.PathLike[str]) -> tuple[list[dict[str, Any]], int]:
    """Return the lines of a journal and how many could not be read; a torn last line is one."""
    with open(path, "rb") as file:
        lines = [parse_line(raw) for raw in file if raw.strip()]
    read = [line for line in lines if line is not None]
    return read, len(lines) - len(read)


def read_all(paths: Iterable[str | os.PathLike[str]]) -> list[dict[str, Any]]:
    """Return the events of several ranks in the order of their times, then of their ranks."""
    events = [event for path in paths for event in read_events(path)[0]]
    return sorted(events, key=lambda event: (str(event.get("time", "")), str(event.get("rank"))))


def plain(value: Any) -> Any:
    """Return a number of numpy, torch or an enum as one of Python's; all else as it is.

    Hooks and detectors may compute with any of them. A checkpoint that held such a number could
    not be read without running foreign code.
    """
    if isinstance(value, dict):
        return {str(name): plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, bool):
        return value
    for kind in (int, float, str):
        if isinstance(value, kind):
            return kind(value)
    return value
