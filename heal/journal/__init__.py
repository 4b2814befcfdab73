"""What happened, on disk: ``events.jsonl``, ``metrics.jsonl`` and ``postmortem.json``."""

from heal.journal.journal import (
    ExitReason,
    Journal,
    exit_reason,
    read_all,
    read_events,
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
