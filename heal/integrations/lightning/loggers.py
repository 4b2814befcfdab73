"""The Trainer's own loggers as a tracker."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from heal.integrations.trackers import Level

LEVELS = {Level.INFO: logging.INFO, Level.WARN: logging.WARNING, Level.ERROR: logging.ERROR}


class LoggersTracker:
    """Sends numbers to Lightning's loggers; alerts, which these lack, to Python's log.

    Args:
        loggers: those of the Trainer; begun and ended by it.
    """

    def __init__(self, loggers: Sequence[Any]) -> None:
        self._loggers = list(loggers)
        self._log = logging.getLogger("heal")

    def start(self, config: Mapping[str, Any]) -> None:
        """Do nothing: the Trainer has started them."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Log numbers, with the healer's count of steps."""
        for logger in self._loggers:
            logger.log_metrics(dict(metrics), step)

    def alert(self, level: Level, title: str, text: str) -> None:
        """Write a line to the log called "heal"."""
        self._log.log(LEVELS[level], "%s: %s", title, text)

    def close(self) -> None:
        """Do nothing: the Trainer ends them."""
