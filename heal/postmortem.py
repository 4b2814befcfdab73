"""The last page of the journal: why the run ended and what was done to save it.

Field names as in the first seed of this project, so that tools made for it can read ours.
"""

import os
import platform
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from heal.actions import HealingError, action_in_words
from heal.causes import Cause
from heal.config import HealingConfig
from heal.diagnose import Diagnosis
from heal.exceptions import classify, message_of, qualified_name
from heal.exit_codes import ExitCode
from heal.exit_codes import ExitReason as ExitReason
from heal.json_lines import dumps, encodable, now, replace_text

if TYPE_CHECKING:
    from heal.journal import Journal

SCHEMA_VERSION = 1
DIRECTORY_MODE = 0o700


BY_EXIT_CODE: dict[int, ExitReason] = {
    ExitCode.OK: ExitReason.COMPLETED,
    ExitCode.NONFINITE: ExitReason.NAN,
    ExitCode.OUT_OF_MEMORY: ExitReason.OOM,
    ExitCode.PREEMPTED: ExitReason.SIGTERM,
    ExitCode.NOT_SAVED: ExitReason.SIGTERM,
}


def exit_reason(exc: BaseException | None, last_cause: str = "") -> ExitReason:
    """Return why a run ended: by what was raised, then by the cause that was last treated."""
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


def original_of(exc: BaseException | None) -> BaseException | None:
    """Return what was raised first: what a halt gave up on, else the exception itself."""
    while isinstance(exc, HealingError) and exc.__cause__ is not None:
        exc = exc.__cause__
    return exc


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
    journal: "Journal",
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
    original = original_of(exception)
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
    is_failure = reason != ExitReason.COMPLETED.value and (
        reason != ExitReason.EXITED.value or bool(exit_code)
    )
    name = f"postmortem.rank{journal.rank}.json" if journal.rank else "postmortem.json"
    folders = [] if journal.run_dir is None else [journal.run_dir]
    if is_failure:
        folders.append(Path())
    for folder in folders:
        try:
            folder.mkdir(mode=DIRECTORY_MODE, parents=True, exist_ok=True)
            path = folder.absolute() / name
            replace_text(path, dumps({**additions, **page}) + "\n")
            return path
        except Exception as error:
            journal.report_failure(folder / name, error)
    return None


VARIABLES = ("WORLD_SIZE", "LOCAL_RANK", "SLURM_JOB_ID", "TORCHELASTIC_RESTART_COUNT")
"""What launchers set. Nothing else of the environment is recorded: it holds secrets."""


def describe_machine() -> dict[str, Any]:
    """Return versions, host and launcher; torch only if it is imported already."""
    found: dict[str, Any] = {
        "host": platform.node(),
        "platform": platform.platform(),
        "processors": os.cpu_count(),
        "python": platform.python_version(),
        "script": Path(sys.argv[0]).name if sys.argv and sys.argv[0] else "interactive",
        "pid": os.getpid(),
        "zclip-heal": _version("zclip-heal"),
    }
    torch: Any = sys.modules.get("torch")
    if torch is not None:
        found["torch"] = str(torch.__version__)
        found["device"] = f"cpu, {torch.get_num_threads()} threads"
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


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "not installed"
