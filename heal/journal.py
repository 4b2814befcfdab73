"""Writes down what happened: ``events.jsonl``, ``metrics.jsonl`` and ``postmortem.json``.

A journal never raises: a full or read-only disk must not end a run that trains well. It degrades,
and says so once.
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

# One line per action for people, through the logger ``heal``.
#
# Recoveries are warnings: without any handler Python prints them to standard error. The logging
# module is the only switch: ``logging.getLogger("heal").setLevel(logging.ERROR)`` silences them.


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
MOST_SAMPLES = 8  # indices of samples in a line; the journal has them all
MAX_MESSAGE = 120  # characters of an exception's message


def line_for(entry: Mapping[str, Any]) -> str:
    """Return what happened and what was done, from an entry of ``recovery_actions``."""
    evidence = entry.get("evidence") or {}
    text = f"step {entry.get('step')}"
    place = place_of(evidence)
    text += f" ({place})" if place else ""
    text += f": {entry.get('failure')}"
    detail = _detail(str(entry.get("failure")), evidence)
    text += f" ({detail})" if detail else ""
    done = ", ".join(_done(action) for action in entry.get("plan", ()))
    return f"{text} -> {done}" if done else text


def place_of(evidence: Mapping[str, Any]) -> str:
    """Return which batch it was, and the number of the call of ``step``; empty if unknown."""
    parts = []
    if evidence.get("call") is not None:
        parts.append(f"call {evidence['call']}")
    if evidence.get("batch") is not None:
        parts.append(f"epoch {evidence.get('epoch')} batch {evidence['batch']}")
    samples = evidence.get("samples")
    if samples:
        shown = ", ".join(map(str, samples[:MOST_SAMPLES]))
        more = ", ..." if len(samples) > MOST_SAMPLES else ""
        parts.append(f"samples {shown}{more}")
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
        run_id: written into every line as ``run``; tells this run from others in the same folder.
            Each rank has its own.
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
        self.run_id = f"{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{secrets.token_hex(3)}"
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
        """Write the postmortem; see :func:`heal.postmortem.write_postmortem`.

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
            data = (dumps({**line, "run": self.run_id}) + "\n").encode()
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


# What healing itself could not do: told once, and never a reason to stop training.


LEFT_OUT = "healing failed and was left out"
MAX_NOTES = 100  # different things that may go wrong with healing itself before we fall silent


class Notes:
    """Collects notes, logs them, and runs our own code so that its failures become notes.

    Args:
        journal: where they are written too.
        step: returns the number of the present step.

    Attributes:
        texts: what was noted.
    """

    def __init__(self, journal: Journal, step: Callable[[], int] = lambda: 0) -> None:
        self.texts: list[str] = []
        self._step = step
        self._journal = journal

    def add(self, text: str) -> None:
        """Tell something, once."""
        if text not in self.texts and len(self.texts) < MAX_NOTES:
            self.texts.append(text)
            self._journal.event("note", self._step(), text=text)
            where = f"rank {self._journal.rank}: " if self._journal.rank else ""
            LOG.warning("heal: %s%s", where, text)

    def contain(self, action: Callable[[], None]) -> None:
        """Run our own code. If it fails, training goes on without what it was for, and hears so."""
        try:
            action()
        except HealingError:
            raise
        except Exception as error:
            self.add(f"{LEFT_OUT}: {error!r}")
