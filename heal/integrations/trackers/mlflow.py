"""MLflow, through its client: the fluent interface has one active run, which may be the user's."""

import time
from collections import deque
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from heal.integrations.trackers.tracker import PROJECT, Level

ALERTS_FILE = "healing_alerts.txt"
MAX_ALERTS = 1000  # lines kept in the file, which is sent whole each time
MAX_TAG = 5000  # characters that MLflow takes for a tag


class MlflowTracker:
    """Logs metrics to MLflow.

    MLflow has no alerts: they go into the artifact ``healing_alerts.txt``, the newest one into the
    tag ``healing.alert``, and their numbers into ``healing/alerts/warn`` and so on. A run that is
    already going on is used and not ended.

    Args:
        project: the experiment of the run that is begun if none is going on.
        name: of that run; MLflow makes one up if None.
        tracking_uri: of the server or database; that of the environment if None.
    """

    def __init__(
        self, project: str = PROJECT, name: str | None = None, tracking_uri: str | None = None
    ) -> None:
        self.project = project
        self.name = name
        self.tracking_uri = tracking_uri
        self.run_id: str | None = None
        self._client: Any = None
        self._is_ours = False
        self._alerts: deque[str] = deque(maxlen=MAX_ALERTS)
        self._counts = {level: 0 for level in Level}
        self._step = 0

    def start(self, config: Mapping[str, Any]) -> None:
        """Adopt the active run, or begin or resume one."""
        mlflow = import_module("mlflow")
        self._client = mlflow.MlflowClient(tracking_uri=self.tracking_uri)
        if self.run_id is not None:
            if self._is_ours:
                self._client.update_run(self.run_id, status="RUNNING")
            return
        active = mlflow.active_run()
        self._is_ours = active is None
        if active is None:
            active = self._client.create_run(self._experiment(), run_name=self.name)
        self.run_id = active.info.run_id
        entities = import_module("mlflow.entities")
        params = [entities.Param(f"healing.{name}", str(value)) for name, value in config.items()]
        self._client.log_batch(self.run_id, params=params)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Log numbers at their step, in one call."""
        self._step = step
        entities, now = import_module("mlflow.entities"), int(time.time() * 1000)
        rows = [entities.Metric(name, value, now, step) for name, value in metrics.items()]
        self._client.log_batch(self.run_id, metrics=rows)

    def alert(self, level: Level, title: str, text: str) -> None:
        """Write an alert down where MLflow can show it."""
        line = f"{level.value} {title}: {text}"
        self._alerts.append(line)
        self._counts[level] += 1
        self._client.log_text(self.run_id, "\n".join(self._alerts) + "\n", ALERTS_FILE)
        self._client.set_tag(self.run_id, "healing.alert", line[:MAX_TAG])
        self.log({f"healing/alerts/{level.value.lower()}": self._counts[level]}, self._step)

    def close(self) -> None:
        """End the run if it is ours."""
        if self._is_ours:
            self._client.set_terminated(self.run_id)

    def _experiment(self) -> str:
        known = self._client.get_experiment_by_name(self.project)
        found: str = (
            self._client.create_experiment(self.project) if known is None else known.experiment_id
        )
        return found
