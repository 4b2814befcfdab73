"""The report for a terminal: with rich if it is there, plain otherwise; at home in 80 columns."""

import shutil
import textwrap
from typing import Any

from heal.report.collect import RunReport
from heal.report.data import report_data
from heal.report.page import OUTCOMES
from heal.report.words import count, duration

MIN_WIDTH, MAX_WIDTH = 40, 100
BARS = " .:-=+*#"


def make_text(report: RunReport, *, to_terminal: bool = True) -> str:
    """Return the report as text.

    Args:
        report: of which run.
        to_terminal: whether standard output will show it, which may have colours and a width.
    """
    width = shutil.get_terminal_size((80, 24)).columns if to_terminal else 80
    width = min(MAX_WIDTH, max(MIN_WIDTH, width))
    data = report_data(report)
    lines = [*_head(data, width), *_curve(data, width)]
    lines += _incidents(data["incidents"], width)
    if data["tensors"]:
        lines += ["", "Tensors that were blamed"]
        for entry in data["tensors"][:10]:
            lines += textwrap.wrap(
                f"{entry['tensor']}: {count(entry['times'], 'time')}",
                width,
                initial_indent="  ",
                subsequent_indent="    ",
            )
    if data["environment"]:
        lines += ["", "Where it ran"]
        for name, value in data["environment"]:
            lines += textwrap.wrap(
                f"{name}: {value}", width, initial_indent="  ", subsequent_indent="    "
            )
    text = "\n".join(lines) + "\n"
    return _coloured(text) if to_terminal else text


def _head(data: dict[str, Any], width: int) -> list[str]:
    title = f"Run {data['run_dir']}"
    lines = [title, "=" * min(width, len(title)), ""]
    for sentence in data["summary"]["sentences"]:
        lines += textwrap.wrap(sentence, width)
    for sentence in data["damage"]:
        lines += textwrap.wrap(f"Damaged: {sentence}", width)
    return lines


def _curve(data: dict[str, Any], width: int) -> list[str]:
    """Return the loss as one line of marks, the highest of every stretch."""
    columns = next((r["columns"] for r in data["ranks"] if r["records"]), None)
    if columns is None:
        return []
    pairs = [
        (step, loss)
        for step, loss in zip(columns["step"], columns["loss"], strict=True)
        if isinstance(loss, (int, float))
    ]
    if len(pairs) < 2:
        return []
    first, last = min(s for s, _ in pairs), max(s for s, _ in pairs)
    cells = width - 7
    heights: list[float | None] = [None] * cells
    for step, loss in pairs:
        cell = min(cells - 1, int((step - first) / max(1, last - first) * cells))
        before = heights[cell]
        heights[cell] = loss if before is None else max(before, loss)
    known = sorted(h for h in heights if h is not None)
    low, high = known[0], known[min(len(known) - 1, int(0.98 * len(known)))]
    marks = "".join(
        " " if height is None else BARS[1 + min(6, int((height - low) / ((high - low) or 1.0) * 6))]
        for height in heights
    )
    return ["", f"loss  |{marks}", f"step   {first:<{cells // 2}}{last:>{cells - cells // 2}}"]


def _incidents(incidents: list[dict[str, Any]], width: int) -> list[str]:
    if not incidents:
        return []
    lines = ["", f"Incidents ({len(incidents)})"]
    for incident in incidents:
        first, last = incident["first_step"], incident["last_step"]
        steps = f"step {first}" if first == last else f"steps {first} to {last}"
        outcome = OUTCOMES[incident["outcome"]]
        lines.append("")
        lines += textwrap.wrap(f"[{outcome}] {steps}: {incident['what']}", width)
        evidence = "; ".join(
            f"{name} {value}" for part in incident["evidence"] for name, value in part["values"]
        )
        actions = "; ".join(
            action["text"] + (f" ({action['times']} times)" if action["times"] > 1 else "")
            for action in incident["actions"]
        )
        costs = [
            count(incident["lost_steps"], "step") if incident["lost_steps"] else "",
            count(incident["skipped_batches"], "batch", "batches")
            if incident["skipped_batches"]
            else "",
            duration(incident["lost_seconds"]) if incident["lost_seconds"] >= 0.005 else "",
        ]
        for name, told in (
            ("seen", evidence),
            ("cause", incident["cause"]),
            ("action", actions or "none needed"),
            ("cost", ", ".join(filter(None, costs)) or "nothing"),
            ("result", incident["outcome_text"]),
        ):
            lines += textwrap.wrap(
                f"{name + ':':<8}{told}", width, initial_indent="  ", subsequent_indent=" " * 10
            )
    return lines


STYLES = {
    "[healed]": "green",
    "[contained]": "green",
    "[noted]": "cyan",
    "[run stopped]": "bold red",
    "[open]": "yellow",
    "[started again]": "yellow",
}


def _coloured(text: str) -> str:
    """Return the text with colours, if rich is there and the terminal takes them."""
    try:
        from rich.console import Console
        from rich.text import Text
    except ImportError:
        return text
    console = Console(highlight=False, soft_wrap=True)
    if not console.is_terminal:
        return text
    shown = Text(text)
    for words, style in STYLES.items():
        shown.highlight_words([words], style)
    shown.highlight_regex(r"(?m)^(Run .*|Incidents \(.*|Tensors that .*|Where it ran)$", "bold")
    with console.capture() as capture:
        console.print(shown, end="")
    return capture.get()
