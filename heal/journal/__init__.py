"""What happened, on disk: ``events.jsonl``, ``metrics.jsonl`` and ``postmortem.json``."""

from heal.journal.journal import Journal
from heal.journal.json_lines import read_all, read_events
from heal.journal.postmortem import ExitReason, exit_reason, recovery_action, write_postmortem

__all__ = [
    "ExitReason",
    "Journal",
    "exit_reason",
    "read_all",
    "read_events",
    "recovery_action",
    "write_postmortem",
]
