"""Damage trainings in every way there is, and print which of them heal.

python -m benchmarks.damage                                   # all: about half an hour of one core
python -m benchmarks.damage --kinds "x 1000,1e4" --families MLP --seeds 1 --protections heal
python -m benchmarks.damage --arc                             # 50 steps, as ARC's comparison
python -m benchmarks.damage --list                            # names of kinds and families

python -m benchmarks.damage --read runs.json --page benchmarks/results/damage.md

A kind is chosen by any part of its name. ``--fresh N`` takes seeds from N on. ``--other PATH``
measures a checkout of an older version too, with its extension built; ARC is measured where it is
installed, ``pip install arc-training``. ``--read`` takes several files, by commas.
"""

import argparse
import json
import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from benchmarks.damage.families import FAMILIES, STEPS
from benchmarks.damage.kinds import KINDS, SHORT_RUN_KINDS
from benchmarks.damage.runs import MODES, PROTECTIONS, is_installed
from benchmarks.damage.table import Job, Record, page, run_job

SHORT_FAMILY, SHORT_STEPS, SHORT_SEEDS = "short CNN", 50, 10
LONG_SEEDS = 3


def words(text: str) -> list[str]:
    """Return the words between commas."""
    return [word.strip() for word in text.split(",") if word.strip()]


def parse(arguments: list[str]) -> argparse.Namespace:
    """Return the arguments, checked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kinds", type=words, default=[], help="parts of names, by commas")
    parser.add_argument("--families", type=words, help="names, by commas")
    parser.add_argument("--seeds", type=int)
    parser.add_argument("--fresh", type=int, default=0, help="the first seed")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--modes", type=words, default=list(MODES))
    parser.add_argument("--protections", type=words, default=list(PROTECTIONS))
    parser.add_argument("--arc", action="store_true", help="short runs, as ARC's comparison")
    parser.add_argument("--other", default="", help="the checkout of an older version")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write every run to this file")
    parser.add_argument("--read", type=words, help="run nothing; take what --json wrote")
    parser.add_argument("--page", type=Path, help="write the table to this file as well")
    parser.add_argument("--list", action="store_true", help="print all names and leave")
    parsed = parser.parse_args(arguments)
    for given, known in (
        (parsed.families or [], FAMILIES),
        (parsed.modes, MODES),
        (parsed.protections, PROTECTIONS),
    ):
        for name in given:
            if name not in known:
                parser.error(f"expected one of {', '.join(known)}, got {name}")
    return parsed


def jobs_of(parsed: argparse.Namespace) -> list[Job]:
    """Return the jobs that the arguments ask for."""
    known = SHORT_RUN_KINDS if parsed.arc else KINDS
    names = [kind.name for kind in known]
    kinds = [n for n in names if not parsed.kinds or any(word in n for word in parsed.kinds)]
    usual = [SHORT_FAMILY] if parsed.arc else [name for name in FAMILIES if name != SHORT_FAMILY]
    seeds = parsed.seeds or (SHORT_SEEDS if parsed.arc else LONG_SEEDS)
    steps = parsed.steps or (SHORT_STEPS if parsed.arc else STEPS)
    protections = tuple(filter(is_installed, parsed.protections))
    chosen = tuple(kinds), tuple(parsed.modes), protections, steps, parsed.arc, parsed.other
    return [
        Job(family, seed, *chosen)
        for seed in range(parsed.fresh, parsed.fresh + seeds)
        for family in parsed.families or usual
    ]


def main(arguments: list[str] | None = None) -> None:
    """Run, print the table, and write the file if one is wanted."""
    parsed = parse(sys.argv[1:] if arguments is None else arguments)
    if parsed.list:
        print("\n".join([*(kind.name for kind in KINDS + SHORT_RUN_KINDS), "", *FAMILIES]))
        return
    if parsed.read is None:
        records = run_all(parsed)
    else:
        records = [record for name in parsed.read for record in json.loads(Path(name).read_text())]
    if parsed.json is not None:
        parsed.json.write_text(json.dumps(records, indent=1) + "\n")
    lines = "\n".join(page(records))
    print(lines)
    if parsed.page is not None:
        parsed.page.write_text(lines + "\n")


def run_all(parsed: argparse.Namespace) -> list[Record]:
    """Run every job that the arguments ask for; return what came of it."""
    records: list[Record] = []
    jobs = jobs_of(parsed)
    method = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(parsed.processes, method) as pool:
        for done, found in enumerate(pool.map(run_job, jobs)):
            records += found
            print(f"{done + 1} of {len(jobs)}", file=sys.stderr, flush=True)
    return records


if __name__ == "__main__":
    main()
