"""A run's results: as a table for people, as JSON for machines."""

import json
import platform
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from zclip.bench.cases import OURS, Case
from zclip.bench.measure import Timing, is_busy


@dataclass
class Result:
    """One case, measured."""

    case: str
    rival: str
    milliseconds: dict[str, float]
    spread: dict[str, float]
    ratio: float
    wanted: float
    gigabytes_per_second: float
    microseconds_per_tensor: float
    relative_error: dict[str, float]
    load: float
    is_noise: bool

    @classmethod
    def of(cls, case: Case, timings: dict[str, Timing], load: float) -> "Result":
        """Hold our time against the fastest rival's."""
        rival = min((n for n in timings if n != OURS), key=lambda n: timings[n].median_seconds)
        ours = timings[OURS].median_seconds
        return cls(
            case=case.name,
            rival=rival,
            milliseconds={n: t.median_seconds * 1e3 for n, t in timings.items()},
            spread={n: t.spread for n, t in timings.items()},
            ratio=timings[rival].median_seconds / ours,
            wanted=case.wanted,
            gigabytes_per_second=case.bytes_read / ours / 1e9,
            microseconds_per_tensor=ours * 1e6 / case.tensors,
            relative_error=case.errors,
            load=load,
            is_noise=timings[OURS].is_noise or timings[rival].is_noise or is_busy(load),
        )

    def cells(self) -> tuple[str, ...]:
        """Return the row of the table."""
        errors = self.relative_error
        return (
            self.case,
            f"{self.milliseconds[OURS]:.2f}",
            f"{self.rival} {self.milliseconds[self.rival]:.2f}",
            f"{self.ratio:.2f}x" + ("?" if self.is_noise else ""),
            f"{self.wanted:g}x",
            f"{self.gigabytes_per_second:.1f}",
            f"{self.microseconds_per_tensor:.2f}",
            "/".join(f"{errors[n]:.0e}" for n in (OURS, self.rival) if n in errors) or "-",
        )


COLUMNS = (
    "work",
    "zclip ms",
    "rival ms",
    "ratio",
    "goal",
    "GB/s",
    "us/tensor",
    "error us/them",
)

ON_SCREEN = ("work", "zclip ms", "rival ms", "ratio", "GB/s", "error us/them")
"""What fits beside each other in a narrow terminal; files have all columns."""


def machine() -> dict[str, str]:
    """Return what the numbers depend on."""
    return {
        "torch": torch.__version__,
        "threads": str(torch.get_num_threads()),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "machine": platform.machine(),
    }


def show(results: list[Result], console: Console) -> None:
    """Print the table."""
    about = ", ".join(f"{key} {value}" for key, value in machine().items())
    load = max((r.load for r in results), default=0.0)
    table = Table(title=f"{about}, load {load:.1f}", title_justify="left", box=box.SIMPLE)
    shown = [COLUMNS.index(column) for column in ON_SCREEN]
    for i in shown:
        table.add_column(COLUMNS[i], justify="left" if i == 0 else "right", no_wrap=i > 0)
    for result in results:
        table.add_row(*(result.cells()[i] for i in shown))
    console.print(table)
    if any(r.is_noise for r in results):
        console.print(
            "A ratio with a question mark is no result: the machine is busy or the rounds "
            "disagree. Run again when it is calm."
        )


def markdown(results: list[Result]) -> str:
    """Return the table as GitHub shows it."""
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    lines += ["| " + " | ".join(r.cells()) + " |" for r in results]
    about = ", ".join(f"{key} {value}" for key, value in machine().items())
    return "\n".join([*lines, "", f"Measured by `zclip-bench`: {about}."]) + "\n"


def save_json(results: list[Result], path: Path) -> None:
    """Write everything that was measured; the file is whole at any moment."""
    document = {"machine": machine(), "results": [asdict(r) for r in results]}
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(document, indent=1))
    partial.replace(path)
