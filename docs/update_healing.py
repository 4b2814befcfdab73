"""Writes the tables of ``docs/healing.md`` from the code; a test fails if they are not current.

python docs/update_healing.py
"""

import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from heal.causes import Cause, Family  # noqa: E402
from heal.config import HealingConfig  # noqa: E402
from heal.exit_codes import ExitCode  # noqa: E402
from heal.settings import settings_of  # noqa: E402

PAGE = ROOT / "docs" / "healing.md"

CURES = {
    Family.NUMERIC: "the ladder",
    Family.MEMORY: "smaller micro-batches, then activation checkpointing",
    Family.DATA: "skip the batch",
    Family.WAIT: "wait and try again",
    Family.STOP: "halt",
    Family.WARNING: "snapshot, tighter clip, closer watch",
    Family.ALERT: "alert only",
}


def settings_table() -> str:
    """One row per setting, grouped as in heal.toml."""
    rows = ["| setting | default | takes | meaning |", "|---|---|---|---|"]
    group = ""
    for name, (kind, default, about) in settings_of(HealingConfig).items():
        if about.group != group:
            group = about.group
            rows.append(f"| **{group}** | | | |")
        rows.append(f"| `{name}` | `{_shown(default)}` | {about.wanted(kind)} | {about.doc} |")
    return "\n".join(rows)


def causes_table() -> str:
    """One row per cause."""
    rows = ["| cause | means | cure | reference |", "|---|---|---|---|"]
    for cause in Cause:
        about = cause.about
        cure = CURES[about.family]
        rows.append(f"| `{cause.value}` | {about.summary} | {cure} | {about.reference} |")
    return "\n".join(rows)


def exit_codes_table() -> str:
    """One row per exit code; the explanations are the strings below the members."""
    source = (ROOT / "heal" / "exit_codes.py").read_text().splitlines()
    rows = ["| code | name | the run ended because |", "|---|---|---|"]
    for code in ExitCode:
        at = next(i for i, line in enumerate(source) if line.strip() == f"{code.name} = {code}")
        meaning = source[at + 1].strip().strip('"').replace("``", "`")
        rows.append(f"| {int(code)} | `{code.name}` | {meaning} |")
    return "\n".join(rows)


TABLES = {"settings": settings_table, "causes": causes_table, "exit codes": exit_codes_table}


def updated(text: str) -> str:
    """Return the page with every table between its marks made anew."""
    for name, make in TABLES.items():
        start = f"<!-- {name}: made by docs/update_healing.py -->\n"
        end = f"<!-- end of {name} -->"
        before, _, rest = text.partition(start)
        _, found, after = rest.partition(end)
        if not found:
            raise SystemExit(f"{PAGE.name} has no place for the table of {name}")
        text = f"{before}{start}{make()}\n{end}{after}"
    return text


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


if __name__ == "__main__":
    PAGE.write_text(updated(PAGE.read_text()))
