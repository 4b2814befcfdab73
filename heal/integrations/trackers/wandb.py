"""Weights & Biases; ``WANDB_MODE=offline`` keeps it on this machine."""

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from heal.integrations.trackers.tracker import PROJECT, Level

STEP = "healing/step"
"""Our own axis: W&B drops what comes with a smaller step than before, as after a rollback."""


class WandbTracker:
    """Logs to W&B, and alerts by ``run.alert``.

    A run that is already going on is used and not ended.

    Args:
        project: of the run that is begun if none is going on.
        name: of that run; W&B makes one up if None.
        settings: further arguments of ``wandb.init``.
    """

    def __init__(self, project: str = PROJECT, name: str | None = None, **settings: Any) -> None:
        self.project = project
        self.name = name
        self.settings = settings
        self._run: Any = None
        self._is_ours = False
        self._id: str | None = None

    def start(self, config: Mapping[str, Any]) -> None:
        """Adopt the current run, or begin or resume one."""
        wandb = import_module("wandb")
        self._run = wandb.run
        self._is_ours = self._run is None
        if self._is_ours:
            resumed = {} if self._id is None else {"id": self._id, "resume": "allow"}
            self._run = wandb.init(
                project=self.project,
                name=self.name,
                config={"healing": dict(config)},
                **{**self.settings, **resumed},
            )
            self._id = self._run.id
        for numbers in ("healing/*", "zclip/*"):
            self._run.define_metric(numbers, step_metric=STEP)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Log numbers along our own axis, ``healing/step``."""
        self._run.log({**metrics, STEP: step})

    def alert(self, level: Level, title: str, text: str) -> None:
        """Raise an alert; W&B itself keeps back those of the same title that follow too soon."""
        levels = import_module("wandb").AlertLevel
        self._run.alert(title=title, text=text, level=levels[level.value])

    def close(self) -> None:
        """End the run if it is ours."""
        if self._is_ours:
            self._run.finish()
