"""The interface of a tracker: four methods."""

from collections.abc import Mapping
from enum import Enum
from typing import Any, Protocol, runtime_checkable

PROJECT = "self-healing"
"""What a project is called if nobody named it."""


class Level(str, Enum):
    """How loud an alert is; trackio and W&B have the same three."""

    INFO = "INFO"
    WARN = "WARN"
    ERROR = "ERROR"


@runtime_checkable
class Tracker(Protocol):
    """Shows what a run does. May raise: whoever calls it goes on without it.

    Example:
        >>> class Printer:
        ...     def start(self, config): print("settings:", dict(config))
        ...     def log(self, metrics, step): print(step, dict(metrics))
        ...     def alert(self, level, title, text): print(level.value, title, text)
        ...     def close(self): print("the end")
        >>> healer = Healer(model, optimizer, trackers=[Printer(), "tensorboard"])
    """

    def start(self, config: Mapping[str, Any]) -> None:
        """Begin, with the settings of healing; after ``close``, go on with the same run."""
        ...

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Take numbers, all finite. After a rollback steps come again."""
        ...

    def alert(self, level: Level, title: str, text: str) -> None:
        """Tell somebody what was decided."""
        ...

    def close(self) -> None:
        """Send what waits to be sent, and end the run if ``start`` began it."""
        ...
