"""Records what happened: ``events.jsonl``, ``metrics.jsonl`` and ``postmortem.json``.

A journal never raises: a full or read-only disk must not end a run that trains well. It degrades,
and warns once.
"""

import errno
import logging
import os
import secrets
import stat
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from heal.actions import HealingError
from heal.causes import Severity
from heal.diagnose import Diagnosis
from heal.json_lines import dumps, now, read_all, read_events
from heal.postmortem import (
    DIRECTORY_MODE,
    SCHEMA_VERSION,
    ExitReason,
    exit_reason,
    recovery_action,
    write_postmortem,
)

__all__ = [
    "ExitReason",
    "Journal",
    "exit_reason",
    "read_all",
    "read_events",
    "recovery_action",
    "write_postmortem",
]

LOG = logging.getLogger("heal")
"""One line per action, for people. Recoveries are warnings: without any handler Python prints them
to standard error. ``logging.getLogger("heal").setLevel(logging.ERROR)`` silences them."""

MOST_SAMPLES = 8  # indices of samples in a line; the journal has them all
MAX_MESSAGE = 120  # characters of an exception's message


WORDS = {
    "Skip": "step skipped",
    "Rollback": "rolled back to step {before_step}",
    "ScaleLr": "learning rate x {factor:g}",
    "TightenClip": "clip limits x {factor:g}",
    "RelearnClip": "clip statistics reset",
    "SkipBatches": "batches of steps {first_step} to {last_step} dropped",
    "ShrinkBatch": "micro-batch halved",
    "CheckpointActivations": "activations checkpointed",
    "ClearCache": "cache cleared",
    "Backoff": "waited {seconds:g} s",
    "TakeSnapshot": "snapshot taken",
    "WatchClosely": "weights checked more often",
    "PerturbWeights": "weights perturbed",
    "AnchorWeights": "weights anchored",
    "Halt": "halted with exit code {exit_code}: {reason}",
}
"""How a line names each action."""


def line_for(entry: Mapping[str, Any]) -> str:
    """Return what happened and what was done, from an entry of ``recovery_actions``."""
    evidence = entry.get("evidence") or {}
    failure = str(entry.get("failure"))
    place, detail = _place(evidence), _detail(failure, evidence)
    where = f"step {entry.get('step')}" + (f" ({place})" if place else "")
    text = f"{where}: {failure}" + (f" ({detail})" if detail else "")
    done = ", ".join(_done(action) for action in entry.get("plan", ()))
    return f"{text} -> {done}" if done else text


def _place(evidence: Mapping[str, Any]) -> str:
    """Return which batch it was, and the number of the call of ``step``; empty if unknown."""
    parts = []
    if evidence.get("call") is not None:
        parts.append(f"call {evidence['call']}")
    if evidence.get("batch") is not None:
        parts.append(f"epoch {evidence.get('epoch')} batch {evidence['batch']}")
    samples = evidence.get("samples") or ()
    if samples:
        more = ", ..." if len(samples) > MOST_SAMPLES else ""
        parts.append(f"samples {', '.join(map(str, samples[:MOST_SAMPLES]))}{more}")
    return ", ".join(parts)


def _detail(failure: str, evidence: Mapping[str, Any]) -> str:
    if evidence.get("blames"):
        return str(evidence["blames"])
    if evidence.get("type"):
        message = " ".join(str(evidence.get("message", "")).split())
        shown = message if len(message) <= MAX_MESSAGE else message[: MAX_MESSAGE - 3] + "..."
        return f"{evidence['type']}: {shown}" if shown else str(evidence["type"])
    tensor = str(evidence.get("tensor", ""))
    # NaN spreads to the gradients of all layers below: the first tensor may not be its origin.
    return f"first in the gradient of {tensor}" if tensor and "nonfinite" in failure else tensor


def _done(action: Mapping[str, Any]) -> str:
    """Name an action with the number that matters; one without effect says so."""
    name = str(action.get("action", ""))
    try:
        words = WORDS.get(name, name).format(**action)
    except (KeyError, ValueError, IndexError):  # of another version of this library
        words = name
    return f"{words} (no effect)" if action.get("effect") is False else words


EVENTS, METRICS = "events", "metrics"
POSTMORTEM = "postmortem"

Subscriber = Callable[[str, Mapping[str, Any]], None]
"""Gets a kind of line ("events", "metrics" or "postmortem") and the line."""

MAX_BYTES = 64 * 2**20
"""Size at which a file is put aside as ``.1``; with the one before it, twice this is on disk."""

MAX_RECOVERIES = 1000
"""Entries of the postmortem; ``events.jsonl`` has them all."""

FILE_MODE = 0o600
OPEN_FLAGS = (
    os.O_RDWR  # the last byte is read: was the last line torn?
    | os.O_APPEND
    | os.O_CREAT
    | getattr(os, "O_NOFOLLOW", 0)
    | getattr(os, "O_NONBLOCK", 0)  # to open a pipe without a reader would wait for ever
)


class LineFile:
    """A file to which lines are appended, one write each; rotated at ``max_bytes``."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._descriptor: int | None = None
        self._size = 0
        self._is_torn = False  # the last line was cut short, by a crash or a full disk

    def append(self, line: bytes) -> None:
        """Write a line.

        Raises:
            OSError: it cannot be written, or not in full.
        """
        if self._descriptor is not None and self._size + len(line) > self._max_bytes:
            self.close()
            os.replace(self._path, self._path.with_suffix(self._path.suffix + ".1"))
        if self._descriptor is None:
            self._descriptor = self._open()
        line = b"\n" + line if self._is_torn else line  # do not join on to it
        written = os.write(self._descriptor, line)
        self._size += written
        self._is_torn = written < len(line)
        if self._is_torn:
            raise OSError(errno.ENOSPC, f"{written} of {len(line)} bytes were written")

    def close(self) -> None:
        """Close the file; the next line opens it again."""
        if self._descriptor is not None:
            descriptor, self._descriptor = self._descriptor, None
            os.close(descriptor)

    def _open(self) -> int:
        descriptor = os.open(self._path, OPEN_FLAGS, FILE_MODE)
        about = os.fstat(descriptor)
        if not stat.S_ISREG(about.st_mode):
            os.close(descriptor)
            raise OSError(errno.EINVAL, "it is no regular file")
        self._size = about.st_size
        self._is_torn = self._size > 0 and os.pread(descriptor, 1, self._size - 1) != b"\n"
        return descriptor


class Journal:
    """Writes the files of one rank.

    Args:
        run_dir: folder of the files, made if needed. None: nothing is written but a postmortem of
            a failed run, to the working directory.
        rank: rank 0 writes ``events.jsonl``, others ``events.rank3.jsonl`` and so on; that of the
            environment's ``RANK`` if None.
        max_bytes: size at which a file is rotated.
        warn: called once with what cannot be written; prints to standard error by default.

    Attributes:
        run_id: written into every line as ``run``; distinguishes this run from others in the same
            folder. Each rank has its own.
        recoveries: every recovery so far, as the postmortem will have it.
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
        self.run_id = f"{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{secrets.token_hex(3)}"
        self.recoveries: list[dict[str, Any]] = []
        self.failed_writes = 0
        self._warn = warn or (lambda line: print(f"heal: {line}", file=sys.stderr))
        self._subscribers: list[Subscriber] = []
        self._started = time.monotonic()
        self._max_bytes = max_bytes
        self._files: dict[str, LineFile] = {}
        if self.run_dir is not None:
            try:
                self.run_dir.mkdir(mode=DIRECTORY_MODE, parents=True, exist_ok=True)
            except OSError as error:
                self.report_failure(self.run_dir, error)

    @property
    def has_readers(self) -> bool:
        """Whether lines go anywhere: to a file, or to a subscriber."""
        return self.run_dir is not None or bool(self._subscribers)

    def path(self, name: str) -> Path | None:
        """Return where the lines of a kind go; None without a run_dir."""
        if self.run_dir is None:
            return None
        suffix = f".rank{self.rank}" if self.rank else ""
        return self.run_dir / f"{name}{suffix}.jsonl"

    def subscribe(self, subscriber: Subscriber) -> None:
        """Pass every line to ``subscriber`` too, also where there is no ``run_dir``.

        One that raises is removed with a warning: training goes on without it.
        """
        self._subscribers.append(subscriber)

    def note_outcome(self, is_healed: bool, loss: float, loss_before: float) -> None:
        """Add to the newest rollback, for the postmortem, whether the loss came back."""
        undone = [entry for entry in self.recoveries if "rollback" in entry["actions"]]
        if undone:
            verdict = "healed" if is_healed else "not recovered"
            undone[-1]["outcome"] = f"{verdict}: loss {loss:.4g}, was {loss_before:.4g} before"

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
        details = {name: value for name, value in entry.items() if name != "step"}
        details["severity"] = diagnosis.severity.name
        self.event("recovery" if actions else "alert", diagnosis.step, **details)
        is_loud = bool(actions) or diagnosis.severity >= Severity.WARN
        if self.rank == 0:  # all ranks act alike
            LOG.log(logging.WARNING if is_loud else logging.INFO, "heal: %s", line_for(entry))

    def metrics(self, step: int, values: Mapping[str, Any]) -> None:
        """Write numbers to plot."""
        self._append(METRICS, {"time": now(), "step": step, **values})

    def postmortem(self, *, exception: BaseException | None = None, **page: Any) -> Path | None:
        """Write the postmortem; see :func:`heal.postmortem.write_postmortem`.

        Why the run ended is worked out unless ``exit_reason`` is one of :class:`ExitReason`.
        """
        page = self._postmortem_page(exception, page)
        path = write_postmortem(self, exception=exception, **page)
        self._publish(POSTMORTEM, {"exception": exception, **page})
        self.close()
        return path

    def draft_postmortem(self, *, exception: BaseException | None = None, **page: Any) -> None:
        """Write a postmortem that another may replace; subscribers get the last one only."""
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
        for file in self._files.values():
            try:
                file.close()
            except OSError as error:
                self.report_failure(EVENTS, error)

    def _publish(self, kind: str, line: Mapping[str, Any]) -> None:
        for subscriber in list(self._subscribers):
            try:
                subscriber(kind, line)
            except Exception as error:
                self._subscribers.remove(subscriber)
                self._warn_safely(f"{subscriber!r} failed: {error!r}; it gets no more lines")

    def _append(self, name: str, line: Mapping[str, Any]) -> None:
        path = self.path(name)
        if path is not None:
            file = self._files.setdefault(name, LineFile(path, self._max_bytes))
            try:
                file.append((dumps({**line, "run": self.run_id}) + "\n").encode())
            except Exception as error:  # not only OSError: details may hold what JSON cannot
                self.report_failure(path, error)
        self._publish(name, line)

    def report_failure(self, where: object, error: Exception) -> None:
        """Count a write that failed, and warn of the first."""
        self.failed_writes += 1
        if self.failed_writes == 1:
            self._warn_safely(f"cannot write {where}: {error}; training goes on without")

    def _warn_safely(self, text: str) -> None:
        try:
            self._warn(text)
        except Exception:
            return  # there is no other way to report it


def _environment_rank() -> int:
    rank = os.environ.get("RANK", "")
    return int(rank) if rank.isdecimal() else 0


LEFT_OUT = "healing failed and was left out"
MAX_NOTES = 100  # different things that may go wrong with healing itself before we fall silent


class Notes:
    """What healing itself could not do: logged once, and never a reason to stop training.

    Notes go to the journal too, with the present ``step``; ``texts`` has them all.
    """

    def __init__(self, journal: Journal, step: Callable[[], int] = lambda: 0) -> None:
        self.texts: list[str] = []
        self._step = step
        self._journal = journal

    def add(self, text: str) -> None:
        """Log something, once."""
        if text not in self.texts and len(self.texts) < MAX_NOTES:
            self.texts.append(text)
            self._journal.event("note", self._step(), text=text)
            where = f"rank {self._journal.rank}: " if self._journal.rank else ""
            LOG.warning("heal: %s%s", where, text)

    def contain(self, action: Callable[[], None]) -> None:
        """Run our own code; if it fails, training goes on without what it was for, with a note."""
        try:
            action()
        except HealingError:
            raise
        except Exception as error:
            self.add(f"{LEFT_OUT}: {error!r}")
