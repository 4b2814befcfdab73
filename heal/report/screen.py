"""A live run on a terminal, by rich."""

import time
from collections.abc import Callable

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from heal.report.watch import LiveRun, curve_of, quiet_words, rate_of, shown, step_of
from heal.report.words import duration

MAX_RANKS = 16  # rows; of more, those furthest behind
MAX_NEWS = 8
BLOCKS = " ▁▂▃▄▅▆▇█"


class Screen:
    """Draws a run again and again until it ends."""

    def __init__(self, run: LiveRun, console: Console | None = None) -> None:
        self._run = run
        self._console = console or Console()

    def __call__(self, interval: float, sleep: Callable[[float], None]) -> None:
        """Show the run until it ends."""
        with Live(self.view(), console=self._console, auto_refresh=False) as live:
            while not self._run.ended:
                sleep(interval)
                self._run.poll()
                live.update(self.view(), refresh=True)

    def view(self) -> Group:
        """Return what is shown now."""
        run = self._run
        parts: list[Text | Table] = [self._head(), self._ranks()]
        if run.ranks and (curve := curve_of(run.ranks[min(run.ranks)], BLOCKS)):
            parts.append(Text(f"loss {curve}", style="green"))
        for sentence in list(run.news)[-MAX_NEWS:]:
            parts.append(Text(sentence, style="dim", overflow="ellipsis", no_wrap=True))
        quiet = quiet_words(run, time.time())
        if quiet and not run.ended:
            parts.append(Text(quiet, style="yellow"))
        return Group(*parts)

    def _head(self) -> Table:
        run = self._run
        done = 0 if run.step is None else run.step + 1
        grid = Table.grid(padding=(0, 1))
        cells: list[Text | ProgressBar] = [Text(run.folder.name, style="bold")]
        if run.goal:
            cells += [ProgressBar(total=run.goal, completed=done, width=24)]
            cells += [Text(f"{done} of {run.goal} steps, {done / run.goal:.0%}")]
            rate = next(filter(None, map(rate_of, run.ranks.values())), 0)
            if rate and done < run.goal:
                cells += [Text(f"{duration((run.goal - done) / rate)} to go", style="dim")]
        else:
            cells += [Text(f"{done} steps")]
        cells += [Text(f"acted {run.acted}, logged {run.noted}", style="cyan")]
        if run.bad_lines:
            cells += [Text(f"{run.bad_lines} unreadable lines", style="yellow")]
        grid.add_row(*cells)
        return grid

    def _ranks(self) -> Table:
        table = Table(box=None, pad_edge=False, header_style="dim")
        for name in ("rank", "step", "loss", "norm", "lr x", "split", "steps/s", "NaN"):
            table.add_column(name, justify="right", no_wrap=True)
        order = sorted(
            self._run.ranks, key=lambda rank: (step_of(self._run.ranks[rank]) or 0, rank)
        )
        for rank in sorted(order[:MAX_RANKS]):
            curves, rate = self._run.ranks[rank], rate_of(self._run.ranks[rank])
            names = ("step", "loss", "norm", "lr_scale", "micro_batches")
            cells = [str(rank), *(shown(curves, name) for name in names)]
            cells += ["-" if rate is None else f"{rate:.3g}", str(curves.nonfinite)]
            table.add_row(*(Text(cell) for cell in cells))
        if len(order) > MAX_RANKS:
            table.caption = f"{len(order) - MAX_RANKS} more ranks are further ahead"
        return table
