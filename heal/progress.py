"""The progress bar of ``Healer.run``: loss, norm, clips and heals, as late as the records are."""

import logging
import sys
from typing import TYPE_CHECKING, Any

from heal.journal import LOG

if TYPE_CHECKING:
    from heal.healer import Healer


class _AboveBar(logging.Handler):
    """Prints lines of the log above the bar; as the log does by itself, warnings and errors."""

    def __init__(self, bar: Any) -> None:
        super().__init__(logging.WARNING)
        self._bar = bar

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._bar.write(self.format(record), sys.stderr)
        except Exception:
            self.handleError(record)


class Progress:
    """A tqdm bar of ``steps``, and a line above it for everything that was healed."""

    def __init__(self, healer: "Healer", steps: int, shown: bool) -> None:
        self._healer = healer
        self._steps = steps
        self._changes_before = 0
        self._shown = shown
        self._bar: Any = None
        self._lines: _AboveBar | None = None

    def __enter__(self) -> "Progress":
        if self._shown:
            from tqdm import tqdm

            begun = self._healer.last_step + 1
            self._changes_before = self._healer.recovery.num_changes
            self._bar = tqdm(total=self._steps, initial=begun, unit="step", file=sys.stderr)
            if not LOG.hasHandlers():  # else the lines go where the program sends them
                self._lines = _AboveBar(self._bar)
                LOG.addHandler(self._lines)
        return self

    def __exit__(self, *raised: object) -> None:
        if self._lines is not None:
            LOG.removeHandler(self._lines)
        if self._bar is not None:
            self._bar.close()

    def update(self, step: int) -> None:
        """Show where the run is; after a rollback that is further back."""
        if self._bar is None:
            return
        latest = self._healer.latest
        if latest is not None:
            self._bar.set_postfix(
                loss=f"{latest.loss:.3f}",
                norm=f"{latest.norm:.2f}",
                clips=latest.clips,
                heals=self._healer.recovery.num_changes - self._changes_before,
                refresh=False,
            )
        self._bar.update(step - self._bar.n)
