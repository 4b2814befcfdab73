"""Inject every failure and write the page.

python -m benchmarks.failures            # about 20 minutes of one core
python -m benchmarks.failures --seeds 1  # a quick look; writes to standard output only

What is done is kept in a file of results, so that an interrupted run goes on where it was.
"""

import argparse
import json
import multiprocessing
import os
from pathlib import Path
from typing import Any

from benchmarks.failures.alerts import alert_rows
from benchmarks.failures.families import FAMILIES
from benchmarks.failures.page import Key, page
from benchmarks.failures.protections import PROTECTIONS, run_one
from benchmarks.failures.rows import ROWS

PAGE = Path(__file__).parents[2] / "docs" / "failures.md"
SEEDS = 5
CALM = "undisturbed"  # these runs say what noise is, also those of a seed not yet complete


def read(path: Path) -> dict[Key, dict[str, Any]]:
    """Return the results of a file; a torn last line is left out."""
    results: dict[Key, dict[str, Any]] = {}
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            row, family, seed, protection, ended = json.loads(line)
        except ValueError:
            continue
        results[row, family, seed, protection] = ended
    return results


def main() -> None:
    """Run what is missing, then write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--no-runs", action="store_true", help="write the page of what is there")
    parser.add_argument("--results", type=Path, default=Path("failures.jsonl"))
    arguments = parser.parse_args()
    keys = [
        (row.name, family, seed, protection)
        for seed in range(arguments.seeds)
        for family in FAMILIES
        for row in ROWS
        for protection in PROTECTIONS
    ]
    results = read(arguments.results)
    missing = [] if arguments.no_runs else [key for key in keys if key not in results]
    method = multiprocessing.get_context("spawn")
    with method.Pool(arguments.processes) as pool, arguments.results.open("a") as file:
        for done, (key, ended) in enumerate(pool.imap_unordered(run_one, missing, chunksize=8)):
            results[key] = ended
            file.write(json.dumps([*key, ended]) + "\n")
            file.flush()
            if done % 50 == 0:
                print(f"{done} of {len(missing)}", flush=True)
    complete = [s for s in range(arguments.seeds) if all(k in results for k in keys if k[2] == s)]
    keys = [key for key in keys if key in results and (key[0] == CALM or key[2] in complete)]
    load = f"made on {os.cpu_count()} cores with a load of {os.getloadavg()[0]:.0f}"
    alerts = list(alert_rows(arguments.seeds, FAMILIES))
    text = page({key: results[key] for key in keys}, load, alerts)
    if arguments.seeds >= SEEDS:
        PAGE.write_text(text)
    else:
        print(text)


if __name__ == "__main__":
    main()
