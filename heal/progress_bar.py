"""The progress bar of ``Healer.run``: loss, norm, clips and heals, as late as the records are."""

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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


@contextmanager
def progress_bar(healer: "Healer", steps: int, shown: bool) -> Iterator[Callable[[int], None]]:
    """Yield a function that shows where the run is; after a rollback that is further back."""
    if not shown:
        yield lambda step: None
        return
    from tqdm import tqdm

    changes_before = healer.recovery.num_changes
    bar = tqdm(total=steps, initial=healer.last_step + 1, unit="step", file=sys.stderr)
    # With handlers of the program the lines go where it sends them.
    lines = None if LOG.hasHandlers() else _AboveBar(bar)

    def show(step: int) -> None:
        latest = healer.latest
        if latest is not None:
            bar.set_postfix(
                loss=f"{latest.loss:.3f}",
                norm=f"{latest.norm:.2f}",
                clips=latest.clips,
                heals=healer.recovery.num_changes - changes_before,
                refresh=False,
            )
        bar.update(step - bar.n)

    try:
        if lines is not None:
            LOG.addHandler(lines)
        yield show
    finally:
        if lines is not None:
            LOG.removeHandler(lines)
        bar.close()
