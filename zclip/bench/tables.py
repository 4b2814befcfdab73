"""A run's results as tables: for the terminal, and for a page."""

from collections.abc import Callable

from rich import box
from rich.console import Console
from rich.table import Table

from zclip.bench.gradients import NORMAL
from zclip.bench.measuring import NORMAL_VALUES
from zclip.bench.results import Document, Result
from zclip.bench.suites import is_sweep
from zclip.bench.work import OURS, is_ours

COLUMNS: dict[str, Callable[[Result], str]] = {
    "work": lambda r: r.case,
    "zclip ms": lambda r: f"{r.ours.milliseconds:.2f}",
    "rival ms": lambda r: f"{r.rival} {r.contenders[r.rival].milliseconds:.2f}" if r.rival else "-",
    "ratio": lambda r: _ratio(r),
    "GB/s": lambda r: f"{r.ours.gigabytes_per_second:.1f}",
    "roof": lambda r: "-" if r.ours.roofline is None else f"{r.ours.roofline:.0%}",
    "host us": lambda r: f"{r.ours.host_microseconds:.0f}",
    "peak KB": lambda r: "-" if r.ours.peak_bytes is None else f"{r.ours.peak_bytes / 1024:.0f}",
    "launches": lambda r: _pair(r, "launches"),
    "syncs": lambda r: _pair(r, "syncs"),
    "spread": lambda r: f"{r.ours.spread:.0%}",
    "error": lambda r: f"{r.ours.error:.0e}" if r.ours.error else "0",
}
"""What a page shows. Launches and syncs are ours, then the rival's."""

ON_SCREEN = ("zclip ms", "rival ms", "ratio", "GB/s", "roof")
"""What fits beside each other in a narrow terminal; files have all columns."""

NO_RESULT = "A ratio with a question mark is no result"


def _ratio(result: Result) -> str:
    if result.ratio is None:
        return "-"
    return f"{result.ratio:.2f}x" + ("?" if result.noise else "")


def _pair(result: Result, field: str) -> str:
    both = [OURS, result.rival] if result.rival else [OURS]
    return "/".join(str(getattr(result.contenders[name], field)) for name in both)


def _short_name(result: Result) -> str:
    bits = result.dtype.replace("bfloat", "bf").replace("float", "f")
    words = [result.rule or result.op, result.shapes, bits, "clipped" * result.clips]
    words += [result.values] if result.values != NORMAL else []
    return " ".join(filter(None, words))


def _rows(document: Document) -> list[Result]:
    """Return the cases; points of a sweep are for the plot, unless there is nothing else."""
    cases = [r for r in document.results if not is_sweep(r.shapes)]
    return cases or document.results


def about(document: Document) -> str:
    """Return in one line what the numbers depend on."""
    facts = ", ".join(f"{key} {value}" for key, value in document.machine.items())
    rates = [r.read_gigabytes_per_second for r in document.results if r.bytes > 50_000_000]
    return facts + (f", memory {max(rates):.0f} GB/s" if rates else "")


def show(document: Document, console: Console) -> None:
    """Print the table, what took no part, and whether to believe it."""
    results = _rows(document)
    console.print(about(document), highlight=False, soft_wrap=True)
    table = Table(box=box.SIMPLE, padding=(0, 1, 0, 0))
    table.add_column("work")
    for name in ON_SCREEN:
        table.add_column(name, justify="right", no_wrap=True)
    for result in results:
        table.add_row(_short_name(result), *(COLUMNS[name](result) for name in ON_SCREEN))
    console.print(table)
    if results:
        worst = max(result.ours.error for result in results)
        console.print(f"All checked against float64: zclip is off by {worst:.0e} at most.")
    for line in _beside_normal(results):
        console.print(line, highlight=False, soft_wrap=True)
    for result in results:
        _show_backends(result, console)
    for line in document.left_out:
        console.print(line, highlight=False, soft_wrap=True)
    if reason := _noise(results):
        console.print(f"{NO_RESULT}: {reason}. Run again when it is calm.", soft_wrap=True)


def _show_backends(result: Result, console: Console) -> None:
    """Print a line for each backend that was forced, and for each further rival."""
    others = {name: m for name, m in result.contenders.items() if "[" in name or (m.is_wrong)}
    for name, measured in others.items():
        wrong = " WRONG" if measured.is_wrong else ""
        console.print(
            f"{result.case}: {name} {measured.milliseconds:.2f} ms, "
            f"off by {measured.error:.0e}{wrong}",
            highlight=False,
            soft_wrap=True,
        )


def _beside_normal(results: list[Result]) -> list[str]:
    """Return a line for each case of other gradients than normal ones: how much longer it took."""
    return [
        f"{r.case}: {r.ours.milliseconds / r.contenders[NORMAL_VALUES].milliseconds:.2f}x the time "
        f"of normal gradients{'?' if r.noise else ''}"
        for r in results
        if NORMAL_VALUES in r.contenders
    ]


def _noise(results: list[Result]) -> str | None:
    reasons = [r.noise for r in results if r.noise]
    if not reasons:
        return None
    return max(set(reasons), key=lambda reason: (reasons.count(reason), reason))


def markdown(document: Document) -> str:
    """Return the table as a page shows it."""
    results = _rows(document)
    lines = ["| " + " | ".join(COLUMNS) + " |", "|---|" + "---:|" * (len(COLUMNS) - 1)]
    lines += ["| " + " | ".join(cell(r) for cell in COLUMNS.values()) + " |" for r in results]
    for line in _beside_normal(results):
        lines += ["", f"{line}."]
    lines += ["", f"Measured by `{' '.join(document.command)}`: {about(document)}."]
    if reason := _noise(results):
        lines += ["", f"{NO_RESULT}: {reason}."]
    return "\n".join(lines) + "\n"


def contenders_markdown(document: Document) -> str:
    """Return one row per contender, for whoever wants to see all of them."""
    lines = ["| work | contender | ms | spread | GB/s | host us | launches | syncs | error |"]
    lines += ["|---|---|" + "---:|" * 7]
    for result in document.results:
        for name, m in result.contenders.items():
            shown = f"**{name}**" if is_ours(name) else name
            lines.append(
                f"| {result.case} | {shown} | {m.milliseconds:.2f} | {m.spread:.0%} | "
                f"{m.gigabytes_per_second:.1f} | {m.host_microseconds:.0f} | {m.launches} | "
                f"{m.syncs} | {m.error:.0e} |"
            )
    return "\n".join(lines) + "\n"
