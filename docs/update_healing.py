"""Writes tables of ``docs/healing.md`` and ``docs/journal.md`` from the code; a test compares.

python docs/update_healing.py
"""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from heal.causes import Cause, Family  # noqa: E402
from heal.exit_codes import ExitCode  # noqa: E402

HEALING = ROOT / "docs" / "healing.md"
JOURNAL = ROOT / "docs" / "journal.md"

CURES = {
    Family.NUMERIC: "the ladder",
    Family.MEMORY: "smaller micro-batches, then activation checkpointing",
    Family.DATA: "skip the batch",
    Family.WAIT: "wait and try again",
    Family.STOP: "halt",
    Family.WARNING: "snapshot, tighter clip, more frequent checks",
    Family.ALERT: "alert only",
}


def causes_table() -> str:
    """One row per cause."""
    rows = ["| cause | meaning | response | reference |", "|---|---|---|---|"]
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


TABLES = {
    HEALING: {"causes": causes_table},
    JOURNAL: {"exit codes": exit_codes_table},
}
"""The tables of each page, by name."""


def updated(page: Path, text: str) -> str:
    """Return the text of a page with every table between its marks replaced."""
    for name, make in TABLES[page].items():
        start = f"<!-- {name}: made by docs/update_healing.py -->\n"
        end = f"<!-- end of {name} -->"
        before, _, rest = text.partition(start)
        _, found, after = rest.partition(end)
        if not found:
            raise SystemExit(f"{page.name} has no place for the table of {name}")
        text = f"{before}{start}{make()}\n{end}{after}"
    return text


if __name__ == "__main__":
    for page in TABLES:
        page.write_text(updated(page, page.read_text()))
