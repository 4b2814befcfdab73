"""The report for a terminal: coloured if rich is installed, plain otherwise."""

import shutil
import textwrap
from typing import Any

from heal.report.collect import STEP, RunReport, highest
from heal.report.data import report_data
from heal.report.story import OUTCOMES
from heal.report.words import count, sparkline, times

MIN_WIDTH, MAX_WIDTH = 40, 100
MAX_ENTRIES = 20  # of a list


def make_text(report: RunReport, *, to_terminal: bool = True) -> str:
    """Return the report as text, with the colours and width of the terminal if it goes there."""
    width = shutil.get_terminal_size((80, 24)).columns if to_terminal else 80
    width = min(MAX_WIDTH, max(MIN_WIDTH, width))
    data = report_data(report)
    title = f"Run {data['run_dir']}"
    lines = [title, "=" * min(width, len(title)), ""]
    for sentence in (*data["summary"]["sentences"], *(f"Damaged: {d}" for d in data["damage"])):
        lines += textwrap.wrap(sentence, width)
    lines += _curve(report, width)
    lines += _incidents(data["incidents"], width)
    listed = {
        "Experiments": [f"step {e['step']}: {e['text']}" for e in data["experiments"]],
        "Tensors that incidents name": [
            f"{e['tensor']}: {count(e['times'], 'time')}" for e in data["tensors"]
        ],
        "Where it ran": [f"{name}: {value}" for name, value in data["environment"]],
    }
    for name, entries in listed.items():
        lines += ["", name] if entries else []
        for entry in entries[:MAX_ENTRIES]:
            lines += textwrap.wrap(entry, width, initial_indent="  ", subsequent_indent="    ")
    text = "\n".join(lines) + "\n"
    return _coloured(text) if to_terminal else text


def _curve(report: RunReport, width: int) -> list[str]:
    """Return the loss as one line of marks, the highest of every stretch."""
    rows = next((c.rows() for c in report.curves.values() if c.count), [])
    heights = highest(rows, width - 7)
    if not heights:
        return []
    steps = [int(step) for row in rows if (step := row[STEP]) is not None]
    ends = f"{min(steps)}{max(steps):>{len(heights) - len(str(min(steps)))}}"
    return ["", f"loss  |{sparkline(heights)}", f"step   {ends}"]


def _incidents(incidents: list[dict[str, Any]], width: int) -> list[str]:
    if not incidents:
        return []
    lines = ["", f"Incidents ({len(incidents)})"]
    for incident in incidents:
        head = f"[{incident['outcome_label']}] step {incident['steps']}: {incident['what']}"
        lines += ["", *textwrap.wrap(head, width)]
        evidence = [f"{n} {v}" for part in incident["evidence"] for n, v in part["values"]]
        actions = [times(action["text"], action["times"]) for action in incident["actions"]]
        for name, text in (
            ("seen", "; ".join(evidence)),
            ("cause", incident["cause"]),
            ("tried", " ".join(incident["experiments"])),
            ("action", "; ".join(actions) or "none"),
            ("cost", incident["cost"]),
            ("result", incident["outcome_text"]),
        ):
            lines += textwrap.wrap(
                f"{name + ':':<8}{text}" if text else "",
                width,
                initial_indent="  ",
                subsequent_indent=" " * 10,
            )
    return lines


STYLES = {
    "healed": "green",
    "contained": "green",
    "noted": "cyan",
    "unhealed": "bold red",
    "ended": "bold red",
}
"""Colours of outcomes; all others are yellow."""


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
    for key, label in OUTCOMES.items():
        shown.highlight_words([f"[{label}]"], STYLES.get(key, "yellow"))
    shown.highlight_regex(r"(?m)^(Run|Incidents|Experiments|Tensors that|Where it ran).*$", "bold")
    with console.capture() as capture:
        console.print(shown, end="")
    return capture.get()
