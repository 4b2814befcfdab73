"""Writes the tables of ``docs/forecast.md``, of ``docs/probes.md`` and of the model's card.

From the code and the results; what says how good the forecast is lives in ``forecast_tables.py``.

python docs/update_forecast.py
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.helps import page  # noqa: E402
from docs import forecast_tables as told  # noqa: E402
from docs.forecast_tables import results  # noqa: E402
from heal.lab.forecast.features import ABOUT  # noqa: E402
from heal.lab.forecast.forecast_watch import shipped  # noqa: E402


def features_table() -> str:
    """One row per feature."""
    used = set(shipped().names)
    rows = ["| feature | meaning | in the model |", "|---|---|---|"]
    rows += [f"| `{n}` | {about} | {'yes' if n in used else 'no'} |" for n, about in ABOUT.items()]
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


def share_sentence() -> str:
    """What following the weights costs, beside a step."""
    share = results("probes")["LyapunovMeter.observe"]["steps"]
    return (
        f"By the table below `LyapunovMeter.observe` costs {share:.2g} of a training step. It "
        "follows 4096 weights however\nmany there are, and does not wait. Call it every step where "
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
    "docs/forecast.md": {
        "features": features_table,
        "blind": told.blind_sentence,
        "detection": told.detection_table,
        "goal": told.goal_sentence,
        "kinds": told.kinds_table,
        "instant": told.instant_sentence,
        "architectures": told.architectures_table,
        "spread": told.architectures_sentence,
        "held out": lambda: told.shares_table("network by architecture"),
        "fresh": lambda: told.shares_table("fresh"),
        "coverage": told.coverage_table,
        "covered": told.coverage_sentence,
        "reliability": told.reliability_table,
        "calibration": told.reliability_sentence,
        "real": told.real_table,
        "real runs": told.real_sentence,
        "design": helps(page.design, with_probes=False),
        "warnings": helps(page.warnings_table, with_probes=False),
        "outcomes": helps(page.outcomes_table, with_probes=False),
        "control": helps(page.control, with_probes=False),
        "instants": helps(page.instants_table, with_probes=False),
        "cost": cost_sentence,
    },
    "docs/probes.md": {
        "costs": costs_table,
        "share": share_sentence,
        "warnings": helps(page.warnings_table, with_probes=True),
        "kinds": helps(page.kinds_table, with_probes=True),
        "instants": helps(page.instants_table, with_probes=True),
        "added": helps(page.costs_table, with_probes=True),
    },
    "heal/lab/forecast/CARD.md": {"metrics": told.card_sentence},
}


def updated(name: str, text: str) -> str:
    """Return a page with every table between its marks replaced."""
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


if __name__ == "__main__":
    for name in PAGES:
        path = ROOT / name
        path.write_text(updated(name, path.read_text(encoding="utf-8")), encoding="utf-8")
