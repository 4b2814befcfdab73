"""Writes the tables of ``docs/forecast.md`` and ``docs/probes.md`` from the code and the results.

python docs/update_forecast.py
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.helps import page  # noqa: E402
from heal.forecast.names import ABOUT  # noqa: E402
from heal.forecast.score import shipped  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"


def results(name: str) -> Any:
    """Read what a benchmark saved."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def features_table() -> str:
    """One row per feature."""
    used = set(shipped().names)
    rows = ["| feature | meaning | in the model |", "|---|---|---|"]
    rows += [f"| `{n}` | {about} | {'yes' if n in used else 'no'} |" for n, about in ABOUT.items()]
    return "\n".join(rows)


def detection_table() -> str:
    """How many slow failures were warned of in time, by kind of model and of held-out runs."""
    told = results("forecast")
    rows = [
        "| held out | model | failures | warned in time | median lead, steps | false per 10,000 |",
        "|---|---|---|---|---|---|",
    ]
    for name, entry in told.items():
        if not isinstance(entry, dict) or "total" not in entry:
            continue
        model, _, by = name.partition(" by ")
        held_out = f"{by}s" if by else "exam: " + ", ".join(entry["folds"])
        model = model if by else "network"
        total = entry["total"]
        rows.append(
            f"| {held_out} | {model} | {total['failures']} | {_percent(total['detection'])} | "
            f"{total['median_lead']:.0f} | {total['false_per_10k']:.2f} |"
        )
    return "\n".join(rows)


def kinds_table() -> str:
    """The network on held-out architectures, by kind of failure."""
    by_kind = results("forecast")["network by architecture"]["total"]
    rows = [
        "| failure | runs | warned in time | lead, steps: 10 %, median, 90 % |",
        "|---|---|---|---|",
    ]
    for kind, entry in by_kind["by_kind"].items():
        lead = ", ".join(f"{value:.0f}" for value in entry["lead_p10_p50_p90"]) or "-"
        rows.append(f"| {kind} | {entry['failures']} | {_percent(entry['detection'])} | {lead} |")
    instant = _percent(by_kind["instant_warned_before"])
    rows.append(f"| nan_batch, corrupt_weights | {by_kind['instant_failures']} | {instant} | - |")
    return "\n".join(rows)


def architectures_table() -> str:
    """The network, by the architecture that it had not seen."""
    folds = results("forecast")["network by architecture"]["folds"]
    rows = ["| held out | failures | warned in time | false per 10,000 |", "|---|---|---|---|"]
    for name, entry in folds.items():
        detection = _percent(entry["detection"])
        false = entry["false_per_10k"]
        rows.append(f"| {name} | {entry['failures']} | {detection} | {false:.2f} |")
    return "\n".join(rows)


def limits_table() -> str:
    """The shipped network on runs that it has not seen, of architectures that it has, by limit."""
    rows = [
        "| `forecast_false_alarms` | warned in time | median lead, steps | false per 10,000 |",
        "|---|---|---|---|",
    ]
    for share, entry in results("forecast")["limits"].items():
        rows.append(
            f"| {share} | {_percent(entry['detection'])} | {entry['median_lead']:.0f} | "
            f"{entry['false_per_10k']:.2f} |"
        )
    return "\n".join(rows)


def coverage_table() -> str:
    """Wanted and found coverage."""
    told = results("forecast")
    rows = ["| wanted | found |", "|---|---|"]
    for wanted, found in told["coverage"].items():
        rows.append(f"| {100 * float(wanted):.0f} % | {100 * found:.1f} % |")
    return "\n".join(rows)


def helps(table: Callable[[Any], str], with_probes: bool) -> Callable[[], str]:
    """Return what makes a table of ``python -m benchmarks.helps``."""

    def make() -> str:
        told = results("helps")
        return table(told if with_probes else page.without_probes(told))

    return make


def costs_table() -> str:
    """What each probe costs."""
    rows = ["| probe | training steps | CPU time |", "|---|---|---|"]
    for name, row in results("probes").items():
        rows.append(f"| {name} | {row['steps']:.2g} | {row['cpu_us']:.0f} µs |")
    return "\n".join(rows)


PAGES: dict[str, dict[str, Callable[[], str]]] = {
    "forecast.md": {
        "features": features_table,
        "detection": detection_table,
        "kinds": kinds_table,
        "architectures": architectures_table,
        "limits": limits_table,
        "coverage": coverage_table,
        "design": helps(page.design, with_probes=False),
        "warnings": helps(page.warnings_table, with_probes=False),
        "outcomes": helps(page.outcomes_table, with_probes=False),
        "control": helps(page.control, with_probes=False),
        "instants": helps(page.instants_table, with_probes=False),
    },
    "probes.md": {
        "costs": costs_table,
        "warnings": helps(page.warnings_table, with_probes=True),
        "kinds": helps(page.kinds_table, with_probes=True),
        "instants": helps(page.instants_table, with_probes=True),
        "added": helps(page.costs_table, with_probes=True),
    },
}


def updated(name: str, text: str) -> str:
    """Return a page with every table between its marks made anew."""
    for table, make in PAGES[name].items():
        start = f"<!-- {table}: made by docs/update_forecast.py -->\n"
        end = f"<!-- end of {table} -->"
        before, found, rest = text.partition(start)
        _, closed, after = rest.partition(end)
        if not found or not closed:
            raise SystemExit(f"{name} has no place for the table of {table}")
        text = f"{before}{start}{_made(make)}\n{end}{after}"
    return text


def _made(make: Callable[[], str]) -> str:
    """Return a table, or say what it waits for: no number is shown that was not measured."""
    try:
        return make()
    except (FileNotFoundError, KeyError) as missing:
        what = Path(missing.filename).name if isinstance(missing, OSError) else missing.args[0]
        return f"Not measured yet: {what} is missing."


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f} %"


if __name__ == "__main__":
    for name in PAGES:
        path = ROOT / "docs" / name
        path.write_text(updated(name, path.read_text(encoding="utf-8")), encoding="utf-8")
