"""trackio: a local SQLite store, offline unless a Space is named."""

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from heal.integrations.trackers.tracker import PROJECT, Level


class TrackioTracker:
    """Logs to trackio, and alerts by ``trackio.alert``.

    A run that is already going on, say that of a Trainer with ``report_to="trackio"``, is used and
    not ended. Where it is stored is trackio's affair (``TRACKIO_DIR``, ``space_id``).

    Args:
        project: of the run that is begun if none is going on.
        name: of that run; trackio makes one up if None.
        settings: further arguments of ``trackio.init``, such as ``space_id``.
    """

    def __init__(self, project: str = PROJECT, name: str | None = None, **settings: Any) -> None:
        self.project = project
        self.name = name
        self.settings = settings
        self._run: Any = None
        self._is_ours = False

    def start(self, config: Mapping[str, Any]) -> None:
        """Adopt the current run, or begin or resume one."""
        trackio = import_module("trackio")
        self._run = import_module("trackio.context_vars").current_run.get()
        self._is_ours = self._run is None
        if self._is_ours:
            self._run = trackio.init(
                project=self.project,
                name=self.name,
                config=dict(config),
                resume="never" if self.name is None else "allow",
                **self.settings,
            )
            self.name = self._run.name

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Log numbers at their step."""
        self._run.log(dict(metrics), step=step)

    def alert(self, level: Level, title: str, text: str) -> None:
        """Raise an alert; it appears at the step that was logged last."""
        levels = import_module("trackio").AlertLevel
        self._run.alert(title=title, text=text, level=levels[level.value])

    def close(self) -> None:
        """End the run if it is ours."""
        if self._is_ours:
            self._run.finish()
            import_module("trackio.context_vars").current_run.set(None)
