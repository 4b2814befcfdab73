"""The progress bar of ``Healer.run``: loss, norm, clips and heals, as late as the records are."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

from heal.journal import LOG

if TYPE_CHECKING:
    from heal.healer import Healer


@contextmanager
def progress_bar(healer: "Healer", steps: int, shown: bool) -> Iterator[Callable[[int], None]]:
    """Yield a function that shows where the run is; after a rollback that is further back."""
    if not shown:
        yield lambda step: None
        return
    from tqdm import tqdm
    from tqdm.contrib.logging import logging_redirect_tqdm

    changes_before = healer.recovery.num_changes
    bar = tqdm(total=steps, initial=healer.last_step + 1, unit="step", file=sys.stderr)
    # Above the bar; with handlers of the program the lines go where it sends them.
    lines = nullcontext() if LOG.hasHandlers() else logging_redirect_tqdm([LOG])

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

    with bar, lines:
        yield show
