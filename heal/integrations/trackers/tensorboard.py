"""TensorBoard: event files on disk."""

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from heal.integrations.trackers.tracker import PROJECT, Level


class TensorBoardTracker:
    """Writes scalars, and alerts as text under ``healing/alerts``.

    Args:
        log_dir: of the event files; ``runs/<project>/<name>`` if None.
        project: see ``log_dir``.
        name: see ``log_dir``; left out if None.
        writer: a SummaryWriter that is already open, say that of a logger; used, not closed.
    """

    def __init__(
        self,
        log_dir: str | Path | None = None,
        project: str = PROJECT,
        name: str | None = None,
        writer: Any = None,
    ) -> None:
        self.log_dir = Path("runs", project, name or "") if log_dir is None else Path(log_dir)
        self._writer = writer
        self._is_ours = writer is None
        self._step = 0

    def start(self, config: Mapping[str, Any]) -> None:
        """Open a file of events in ``log_dir``, beside those of earlier starts."""
        if self._is_ours:
            module = import_module("torch.utils.tensorboard")
            self._writer = module.SummaryWriter(str(self.log_dir))
        rows = [f"| {name} | {value} |" for name, value in config.items()]
        self._writer.add_text("healing/config", "\n".join(["| setting | value |", "|-|-|", *rows]))

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Write a scalar for each number."""
        self._step = step
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def alert(self, level: Level, title: str, text: str) -> None:
        """Write text at the step that was logged last, to the disk at once."""
        self._writer.add_text("healing/alerts", f"**{level.value}** {title}: {text}", self._step)
        self._writer.flush()

    def close(self) -> None:
        """Close the file if it is ours, else send it to the disk."""
        if self._is_ours:
            self._writer.close()
        else:
            self._writer.flush()
