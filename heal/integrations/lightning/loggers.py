"""The Trainer's own loggers as a tracker."""

from collections.abc import Mapping, Sequence
from typing import Any

from heal.integrations.trackers import Level


class LoggersTracker:
    """Sends numbers to Lightning's loggers, which have no alerts; Python's log has those.

    Args:
        loggers: those of the Trainer; begun and ended by it.
    """

    def __init__(self, loggers: Sequence[Any]) -> None:
        self._loggers = list(loggers)

    def start(self, config: Mapping[str, Any]) -> None:
        """Do nothing: the Trainer has started them."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Log numbers, with the healer's count of steps."""
        for logger in self._loggers:
            logger.log_metrics(dict(metrics), step)

    def alert(self, level: Level, title: str, text: str) -> None:
        """Do nothing: the journal logs every recovery and alert by itself."""

    def close(self) -> None:
        """Do nothing: the Trainer ends them."""
