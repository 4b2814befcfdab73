"""Records what happened: ``events.jsonl``, ``metrics.jsonl`` and ``postmortem.json``.

A journal never raises: a full or read-only disk must not end a run that trains well. It degrades,
and warns once. Names of fields are those of the first seed of this project, so that tools made for
it can read ours.
"""

import errno
import logging
import os
import platform
import secrets
import stat
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from heal.actions import HealingError, action_in_words
from heal.causes import Cause, Severity
from heal.checkpoint.files import DIRECTORY_MODE, FILE_MODE, write_file
from heal.config import HealingConfig
from heal.diagnose import Diagnosis
from heal.exception_causes import classify, message_of, qualified_name
from heal.exit_codes import ExitCode, ExitReason
from heal.former import OldName
from heal.json_lines import dumps, encodable, now, read_all, read_events
from heal.report.words import count, recovery_line

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

SCHEMA_VERSION = 1
EVENTS, METRICS, POSTMORTEM = "events", "metrics", "postmortem"
MAX_BYTES = 64 * 2**20
"""Size at which a file is put aside as ``.1``; with the one before it, twice this is on disk."""

MAX_RECOVERIES = 1000
"""Entries of the postmortem; ``events.jsonl`` has them all."""

Subscriber = Callable[[str, Mapping[str, Any]], None]
"""Gets a kind of line ("events", "metrics" or "postmortem") and the line."""

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
        launched_as = os.environ.get("RANK", "")
        own_rank = int(launched_as) if launched_as.isdecimal() else 0
        self.rank = own_rank if rank is None else rank
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

    is_heard = OldName("has_readers")

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
            LOG.log(logging.WARNING if is_loud else logging.INFO, "heal: %s", recovery_line(entry))

    def metrics(self, step: int, values: Mapping[str, Any]) -> None:
        """Write numbers to plot."""
        self._append(METRICS, {"time": now(), "step": step, **values})

    def postmortem(self, *, exception: BaseException | None = None, **page: Any) -> Path | None:
        """Write the postmortem; see :func:`write_postmortem`.

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


BY_EXIT_CODE: dict[int, ExitReason] = {
    ExitCode.OK: ExitReason.COMPLETED,
    ExitCode.NONFINITE: ExitReason.NAN,
    ExitCode.OUT_OF_MEMORY: ExitReason.OOM,
    ExitCode.PREEMPTED: ExitReason.SIGTERM,
    ExitCode.NOT_SAVED: ExitReason.SIGTERM,
}


def exit_reason(exc: BaseException | None, last_cause: str = "") -> ExitReason:
    """Return why a run ended: by what was raised, then by the cause that was last acted upon."""
    if exc is None:
        return ExitReason.COMPLETED
    if isinstance(exc, KeyboardInterrupt):
        return ExitReason.SIGINT
    if isinstance(exc, SystemExit):
        return ExitReason.EXITED if exc.code else ExitReason.COMPLETED
    if not isinstance(exc, HealingError):
        return classify(exc)[0].about.exit_reason or ExitReason.EXCEPTION
    by_cause = {cause.value: cause.about.exit_reason for cause in Cause}
    known = BY_EXIT_CODE.get(exc.exit_code) or by_cause.get(last_cause)
    return known or ExitReason.UNRECOVERABLE


def recovery_action(
    diagnosis: Diagnosis, actions: Sequence[Mapping[str, Any]], **details: Any
) -> dict[str, Any]:
    """Return one entry of ``recovery_actions``: what failed, why, what was done.

    ``actions`` are as :func:`heal.actions.action_to_json` returns them, perhaps with their effect;
    ``details`` what only the run knows: values before and after, seconds that it took.
    """
    return {
        "failure": diagnosis.cause.value,
        "diagnosis": diagnosis.summary,
        "actions": [action_in_words(str(action.get("action", ""))) for action in actions],
        "step": diagnosis.step,
        "bad_step": diagnosis.bad_step,
        "confidence": diagnosis.confidence,
        "reference": diagnosis.reference,
        "evidence": encodable(diagnosis.evidence),
        "plan": [dict(action) for action in actions],
        **details,
    }


def write_postmortem(
    journal: Journal,
    *,
    exit_reason: str,
    last_step: int,
    exception: BaseException | None = None,
    final_metrics: Mapping[str, float] | None = None,
    recovery_actions: Sequence[Mapping[str, Any]] = (),
    running_time_seconds: float | None = None,
    exit_code: int | None = 0,
    **additions: Any,
) -> Path | None:
    """Write ``postmortem.json``, whole or not at all; return where it is, None if nowhere.

    Never raises. A run_dir that was removed is made again. Without one only a failure is written,
    to the working directory, and there too if the run_dir cannot be written; ranks other than 0
    write ``postmortem.rank3.json`` and so on.

    Args:
        journal: where to write; its age is that of the run.
        exit_reason: one of :class:`ExitReason`.
        last_step: the last optimizer step that was applied.
        exception: what ended the run, if anything was raised; a halt is named by what it could not
            heal.
        final_metrics: the last known numbers; NaN and Inf are written as strings.
        recovery_actions: entries made by :func:`recovery_action`, oldest first.
        running_time_seconds: of the whole run; the age of the journal if left out.
        exit_code: that of the process; None if it is not known.
        additions: what else is worth knowing; cannot replace the fields above.
    """
    reason = str(getattr(exit_reason, "value", exit_reason))
    seconds = journal.running_seconds() if running_time_seconds is None else running_time_seconds
    original = exception
    while isinstance(original, HealingError) and original.__cause__ is not None:
        original = original.__cause__  # what was raised first: what the halt gave up on
    page = {
        "exit_reason": reason,
        "exception_type": None if original is None else qualified_name(original),
        "last_step": last_step,
        "timestamp": now(),
        "final_metrics": dict(final_metrics or {}),
        "recovery_actions": [dict(entry) for entry in recovery_actions],
        "running_time_seconds": round(seconds, 3),
        "schema_version": SCHEMA_VERSION,
        "exit_code": None if exit_code is None else int(exit_code),
        "exception_message": None if original is None else message_of(original),
        "halted_because": message_of(exception) if isinstance(exception, HealingError) else None,
        "rank": journal.rank,
        "python": sys.version.split()[0],
    }
    is_calm = reason == ExitReason.COMPLETED or (reason == ExitReason.EXITED and not exit_code)
    name = f"postmortem.rank{journal.rank}.json" if journal.rank else "postmortem.json"
    for folder in filter(None, (journal.run_dir, None if is_calm else Path())):
        try:
            folder.mkdir(mode=DIRECTORY_MODE, parents=True, exist_ok=True)
            path = folder.absolute() / name
            write_file(path, [f"{dumps({**additions, **page})}\n".encode()])
            return path
        except Exception as error:
            journal.report_failure(folder / name, error)
    return None


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


VARIABLES = ("WORLD_SIZE", "LOCAL_RANK", "SLURM_JOB_ID", "TORCHELASTIC_RESTART_COUNT")
"""What launchers set. Nothing else of the environment is recorded: it holds secrets."""


def describe_machine() -> dict[str, Any]:
    """Return versions, host and launcher; torch only if it is imported already."""
    try:
        installed = version("zclip-heal")
    except PackageNotFoundError:
        installed = "not installed"
    found: dict[str, Any] = {
        "host": platform.node(),
        "platform": platform.platform(),
        "processors": os.cpu_count(),
        "python": platform.python_version(),
        "script": Path(sys.argv[0]).name if sys.argv and sys.argv[0] else "interactive",
        "pid": os.getpid(),
        "zclip-heal": installed,
    }
    torch: Any = sys.modules.get("torch")
    if torch is not None:
        found["torch"] = str(torch.__version__)
        found["device"] = f"cpu, {count(torch.get_num_threads(), 'thread')}"
        if torch.cuda.is_available() and torch.cuda.is_initialized():  # must not claim a GPU
            found["device"] = f"{torch.cuda.get_device_name()} (CUDA {torch.version.cuda})"
    found.update({name.lower(): os.environ[name] for name in VARIABLES if name in os.environ})
    return found


def describe_training(
    model: Any, optimizers: Iterable[Any], config: HealingConfig
) -> dict[str, Any]:
    """Return what is trained by what, and the settings that differ from the defaults."""
    default = asdict(HealingConfig())
    changed = {name: value for name, value in asdict(config).items() if value != default[name]}
    found: dict[str, Any] = {
        "model": type(model).__name__,
        "optimizer": ", ".join(type(getattr(o, "inner", o)).__name__ for o in optimizers),
        "settings": changed,
        "zclip_z_threshold": config.zclip_z_threshold,
    }
    try:
        found["parameters"] = sum(p.numel() for p in model.parameters())
        found["trainable"] = sum(p.numel() for p in model.parameters() if p.requires_grad)
    except Exception as error:  # lazy modules have no shape yet
        found["parameters"] = f"unknown: {error}"
    return found
