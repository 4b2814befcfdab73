"""Makes the table of ``docs/trainers.md``: every failure in every trainer, on tiny models.

python docs/update_trainers.py [--trainers SFT DPO] [--cells cells.jsonl]

Takes some minutes. With ``--cells`` what was found is kept in a file, a line per cell, and is not
computed again: so can several processes share the work, and the last one write the page.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

PAGE = ROOT / "docs" / "trainers.md"
BEGIN, END = "<!-- table: made by docs/update_trainers.py -->", "<!-- end of table -->"
UNDISTURBED = "undisturbed"


def main() -> None:
    """Compute what is missing, then write the table."""
    from tests.heal.trainers import matrix, tiny

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trainers", nargs="*", default=list(tiny.TRAINERS))
    parser.add_argument("--cells", type=Path)
    wanted = parser.parse_args()
    known = read_cells(wanted.cells)
    for name in wanted.trainers:
        for failure in (UNDISTURBED, *matrix.FAILURES):
            if (name, failure) in known:
                continue
            with tempfile.TemporaryDirectory() as folder:
                cell = matrix.run(name, None if failure == UNDISTURBED else failure, Path(folder))
            line = {"trainer": name, "failure": failure, **vars(cell)}
            known[name, failure] = line
            print(json.dumps(line), flush=True)
            if wanted.cells is not None:
                with open(wanted.cells, "a") as file:
                    file.write(json.dumps(line) + "\n")
    missing = [
        (name, failure)
        for name in tiny.TRAINERS
        for failure in (UNDISTURBED, *matrix.FAILURES)
        if (name, failure) not in known
    ]
    if missing:
        print(f"{len(missing)} cells are missing; the page stays as it is")
        return
    PAGE.write_text(updated(PAGE.read_text(), table(known, list(tiny.TRAINERS))))


def read_cells(path: Path | None) -> dict[tuple[str, str], dict[str, Any]]:
    """Return cells that were computed before."""
    if path is None or not path.exists():
        return {}
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return {(line["trainer"], line["failure"]): line for line in lines}


def table(cells: dict[tuple[str, str], dict[str, Any]], trainers: list[str]) -> str:
    """One row per trainer, one column per failure, the undisturbed run first."""
    from tests.heal.trainers import matrix

    failures = [UNDISTURBED, *matrix.FAILURES]
    head = ["trainer", *failures]
    rows = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for name in trainers:
        shown = [_shown(cells[name, failure]) for failure in failures]
        rows.append(f"| {name} | {' | '.join(shown)} |")
    import transformers
    import trl

    if not hasattr(trl, "PPOTrainer"):
        absent = f"not in TRL {trl.__version__}; see below"
        rows.append(f"| PPO | {absent} |" + " |" * (len(head) - 2))
    made = f"transformers {transformers.__version__}, TRL {trl.__version__}"
    found = sum(c["detected"] for (_, f), c in cells.items() if f != UNDISTURBED)
    well = sum(c["detected"] and c["healed"] for (_, f), c in cells.items() if f != UNDISTURBED)
    count = sum(f != UNDISTURBED for _, f in cells)
    total = f"Detected {found} of {count}, healed {well} of {count}. Made with {made}."
    return "\n".join([*rows, "", total])


def _shown(cell: dict[str, Any]) -> str:
    loss = f"{cell['final_loss']:.3f}"
    if cell["failure"] == UNDISTURBED:
        return loss if not cell["causes"] else f"{loss} (reported: {', '.join(cell['causes'])})"
    if not cell["detected"]:
        return f"**missed**, {loss}"
    return f"found, {'healed' if cell['healed'] else '**not healed**'}, {loss}"


def updated(page: str, made: str) -> str:
    """Return the page with its table replaced."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"{PAGE.name} has no place for the table: expected {BEGIN} and {END}")
    return f"{before}{BEGIN}\n{made}\n{END}{after}"


if __name__ == "__main__":
    main()
