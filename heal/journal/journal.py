"""Writes down what happened: ``events.jsonl``, ``metrics.jsonl`` and ``postmortem.json``.

A journal never raises: a full or read-only disk must not end a run that trains well. It degrades,
and says so once.
"""

import errno
import logging
import os
import stat
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from heal.causes import Severity
from heal.diagnose import Diagnosis
from heal.journal.json_lines import dumps, now
from heal.journal.log_lines import LOG, line_for
from heal.journal.postmortem import (
    DIRECTORY_MODE,
    SCHEMA_VERSION,
    ExitReason,
    exit_reason,
    recovery_action,
    write_postmortem,
)

EVENTS, METRICS = "events", "metrics"
POSTMORTEM = "postmortem"

Subscriber = Callable[[str, Mapping[str, Any]], None]
"""Hears a kind of line ("events", "metrics" or "postmortem") and the line."""

MAX_BYTES = 64 * 2**20
"""Size at which a file is put aside as ``.1``; with the one before it, twice this is on disk."""

MAX_RECOVERIES = 1000
"""Entries of the postmortem; ``events.jsonl`` has them all."""

FILE_MODE = 0o600
OPEN_FLAGS = (
    os.O_WRONLY
    | os.O_APPEND
    | os.O_CREAT
    | getattr(os, "O_NOFOLLOW", 0)
    | getattr(os, "O_NONBLOCK", 0)  # to open a pipe that nobody reads would wait for ever
)


class Journal:
    """The diary of one rank.

    Args:
        run_dir: folder of the files, made if needed. None: nothing is written but a postmortem of
            a failed run, to the working directory.
        rank: rank 0 writes ``events.jsonl``, others ``events.rank3.jsonl`` and so on; that of the
            environment's ``RANK`` if None.
        max_bytes: size at which a file is rotated.
        warn: told once what cannot be written; standard error by default.

    Attributes:
        recoveries: every recovery so far, as the postmortem will tell it.
        failed_writes: how often something could not be written.
    """

    def __init__(
        self,
        run_dir: str | os.PathLike[str] | None,
        rank: int | None = None,
        *,
        max_bytes: int = MAX_BYTES,
        warn: Callable[[str], None] | None = None,
    ) -> None:
        self.run_dir = None if run_dir is None else Path(run_dir)
        self.rank = _environment_rank() if rank is None else rank
        self.recoveries: list[dict[str, Any]] = []
        self.max_bytes = max_bytes
        self.failed_writes = 0
        self._warn = warn or (lambda line: print(f"heal: {line}", file=sys.stderr))
        self._subscribers: list[Subscriber] = []
        self._started = time.monotonic()
        self._files: dict[str, int] = {}
        self._sizes: dict[str, int] = {}
        self._torn: set[str] = set()  # files whose last line is cut short, as by a full disk
        if self.run_dir is not None:
            try:
                self.run_dir.mkdir(mode=DIRECTORY_MODE, parents=True, exist_ok=True)
            except OSError as error:
                self.report_failure(self.run_dir, error)

    @property
    def is_heard(self) -> bool:
        """Whether a line goes anywhere: to a file, or to somebody who subscribed."""
        return self.run_dir is not None or bool(self._subscribers)

    def path(self, name: str) -> Path | None:
        """Return where the lines of a kind go; None without a run_dir."""
        if self.run_dir is None:
            return None
        suffix = f".rank{self.rank}" if self.rank else ""
        return self.run_dir / f"{name}{suffix}.jsonl"

    def subscribe(self, subscriber: Subscriber) -> None:
        """Have every line told to ``subscriber`` too, also where there is no ``run_dir``.

        One that raises is told of once and hears no more: training goes on without it.
        """
        self._subscribers.append(subscriber)

    def note_outcome(self, is_healed: bool, loss: float, loss_before: float) -> None:
        """Say in the postmortem, of the newest rollback, whether the loss came back."""
        undone = [entry for entry in self.recoveries if "rollback" in entry["actions"]]
        if undone:
            undone[-1]["outcome"] = (
                f"healed: loss {loss:.4g}, was {loss_before:.4g} before"
                if is_healed
                else f"not recovered: loss {loss:.4g}, was {loss_before:.4g} before"
            )

    def event(self, kind: str, step: int, **details: Any) -> None:
        """Write an event: one line, one write, so that a crash tears at most the last line."""
        head = {"v": SCHEMA_VERSION, "time": now(), "rank": self.rank, "step": step, "event": kind}
        self._append(EVENTS, {**head, **details})

    def recovery(
        self, diagnosis: Diagnosis, actions: Sequence[Mapping[str, Any]], **details: Any
    ) -> None:
        """Write a diagnosis and what was done about it; the postmortem repeats what acted."""
        entry = recovery_action(diagnosis, actions, **details)
        if actions:
            self.recoveries.append(entry)
            del self.recoveries[:-MAX_RECOVERIES]
        told = {name: value for name, value in entry.items() if name != "step"}
        told["severity"] = diagnosis.severity.name
        self.event("recovery" if actions else "alert", diagnosis.step, **told)
        is_loud = bool(actions) or diagnosis.severity >= Severity.WARN
        if self.rank == 0:  # all ranks act alike
            LOG.log(logging.WARNING if is_loud else logging.INFO, "heal: %s", line_for(entry))

    def metrics(self, step: int, values: Mapping[str, Any]) -> None:
        """Write numbers to plot."""
        self._append(METRICS, {"time": now(), "step": step, **values})

    def postmortem(self, *, exception: BaseException | None = None, **page: Any) -> Path | None:
        """Write the postmortem; see :func:`heal.journal.postmortem.write_postmortem`.

        Why the run ended is worked out unless ``exit_reason`` is one of :class:`ExitReason`.
        """
        told = self._postmortem_page(exception, page)
        path = write_postmortem(self, exception=exception, **told)
        self._publish(POSTMORTEM, {"exception": exception, **told})
        self.close()
        return path

    def draft_postmortem(self, *, exception: BaseException | None = None, **page: Any) -> None:
        """Write a postmortem that another may replace; subscribers hear of the last one only."""
        write_postmortem(self, exception=exception, **self._postmortem_page(exception, page))

    def _postmortem_page(
        self, exception: BaseException | None, page: dict[str, Any]
    ) -> dict[str, Any]:
        last_cause = self.recoveries[-1]["failure"] if self.recoveries else ""
        try:
            reason = ExitReason(page.get("exit_reason"))
        except ValueError:
            reason = exit_reason(exception, last_cause)
        return {"recovery_actions": self.recoveries, **page, "exit_reason": reason.value}

    def running_seconds(self) -> float:
        """Return the age of the journal on the monotonic clock."""
        return time.monotonic() - self._started

    def close(self) -> None:
        """Close the files; a later event opens them again."""
        for descriptor in self._files.values():
            try:
                os.close(descriptor)
            except OSError as error:
                self.report_failure(EVENTS, error)
        self._files.clear()

    def _publish(self, kind: str, line: Mapping[str, Any]) -> None:
        for subscriber in list(self._subscribers):
            try:
                subscriber(kind, line)
            except Exception as error:
                self._subscribers.remove(subscriber)
                self._tell(f"{subscriber!r} failed: {error!r}; it hears no more")

    def _append(self, name: str, line: Mapping[str, Any]) -> None:
        self._write(name, line)
        self._publish(name, line)

    def _write(self, name: str, line: Mapping[str, Any]) -> None:
        path = self.path(name)
        if path is None:
            return
        try:
            data = (dumps(line) + "\n").encode()
            descriptor = self._open(name, path, len(data))
            if name in self._torn:
                data = b"\n" + data  # do not join on to it
            written = os.write(descriptor, data)
            self._sizes[name] += written
            if written < len(data):
                self._torn.add(name)
                raise OSError(errno.ENOSPC, f"{written} of {len(data)} bytes were written")
            self._torn.discard(name)
        except Exception as error:  # not only OSError: details may hold what JSON cannot
            self.report_failure(path, error)

    def _open(self, name: str, path: Path, coming: int) -> int:
        if name in self._files and self._sizes[name] + coming > self.max_bytes:
            os.close(self._files.pop(name))
            os.replace(path, path.with_suffix(path.suffix + ".1"))
        if name not in self._files:
            descriptor = os.open(path, OPEN_FLAGS, FILE_MODE)
            about = os.fstat(descriptor)
            if not stat.S_ISREG(about.st_mode):
                os.close(descriptor)
                raise OSError(errno.EINVAL, "it is no regular file")
            self._files[name] = descriptor
            self._torn.discard(name)
            size = about.st_size
            if size and not _ends_whole(path):
                os.write(descriptor, b"\n")  # a crash tore the last line: do not join on to it
            self._sizes[name] = size
        return self._files[name]

    def report_failure(self, where: object, error: Exception) -> None:
        """Count a write that failed, and tell of the first."""
        self.failed_writes += 1
        if self.failed_writes == 1:
            self._tell(f"cannot write {where}: {error}; training goes on without")

    def _tell(self, text: str) -> None:
        try:
            self._warn(text)
        except Exception:
            return  # nobody listens: there is nobody left to tell


def _environment_rank() -> int:
    rank = os.environ.get("RANK", "")
    return int(rank) if rank.isdecimal() else 0


def _ends_whole(path: Path) -> bool:
    with open(path, "rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"
