"""Writes the tables of ``docs/forecast.md`` and ``docs/probes.md`` from the code and the results.

python docs/update_forecast.py
"""

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

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


def helps_table() -> str:
    """The failure suite with and without each piece."""
    rows = [
        "| variant | warned in time | lead | false per 10,000 | steps lost | halted | "
        "final loss over that without fault |",
        "|---|---|---|---|---|---|---|",
    ]
    for variant, row in results("forecast_helps")["variants"].items():
        ratio = [math.exp(value) for value in row["ratio"]]
        warned = _range(row["warned"], 100, "{:.0f} %")
        rows.append(
            f"| {variant} | {warned} | {_range(row['lead'], 1, '{:.0f}')} | "
            f"{row['false_per_10k']:.1f} | {_range(row['lost'], 1, '{:.0f}')} | "
            f"{100 * row['halted'][0]:.0f} % | {_range(ratio, 1, '{:.2f}')} |"
        )
    return "\n".join(rows)


def costs_table() -> str:
    """What each probe costs."""
    rows = ["| probe | training steps | CPU time |", "|---|---|---|"]
    for name, row in results("probes").items():
        rows.append(f"| {name} | {row['steps']:.2g} | {row['cpu_us']:.0f} µs |")
    return "\n".join(rows)


def share_sentence() -> str:
    """What following the weights costs, beside a step."""
    share = results("probes")["LyapunovMeter.observe"]["steps"]
    return (
        f"By the table below `LyapunovMeter.observe` costs {share:.2g} of a training step. It "
        "follows 4096 weights however\nmany there are, and does not wait: call it every step where "
        "steps are long, every tenth where they are short."
    )


def cost_sentence() -> str:
    """What the forecast costs: the one number that is published."""
    cost = results("probes")["forecast, one step"]["cpu_us"]
    return (
        f"A step costs {cost:.0f} µs of host time ([as measured with the probes]"
        "(probes.md#what-they-cost); the aim was 50)."
    )


PAGES: dict[str, dict[str, Callable[[], str]]] = {
    "forecast.md": {
        "features": features_table,
        "detection": detection_table,
        "kinds": kinds_table,
        "architectures": architectures_table,
        "limits": limits_table,
        "coverage": coverage_table,
        "helps": helps_table,
        "cost": cost_sentence,
    },
    "probes.md": {"costs": costs_table, "share": share_sentence},
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


def _range(values: Any, factor: float, form: str) -> str:
    """Mean and its interval."""
    if not values:
        return "-"
    mean, low, high = (form.format(factor * value) for value in values)
    return f"{mean} ({low} to {high})"


if __name__ == "__main__":
    for name in PAGES:
        page = ROOT / "docs" / name
        page.write_text(updated(name, page.read_text(encoding="utf-8")), encoding="utf-8")
