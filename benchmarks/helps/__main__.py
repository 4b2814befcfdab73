"""Run every fault with and without every piece, and save what came of it.

python -m benchmarks.helps                     # what is missing, then the summary; 20 minutes
python -m benchmarks.helps --only sharpness    # this variant anew, the others as they are
python -m benchmarks.helps --no-runs           # the summary alone

Every run is a line of a file, so that an interrupted benchmark goes on where it was. The pages are
made of the summary by ``python docs/update_forecast.py``.
"""

import argparse
import itertools
import json
import multiprocessing
from pathlib import Path

from benchmarks.helps.alarms import ALARMS
from benchmarks.helps.families import FAMILIES
from benchmarks.helps.faults import HEALTHY, INSTANT, SLOW, is_possible
from benchmarks.helps.runs import CURES, NOTHING, Job, Key, run_one
from benchmarks.helps.summary import CALIBRATION, Results, summary

RESULTS = Path(__file__).parents[1] / "results"
SEEDS = 5
MORE_HEALTHY = 5  # seeds of which there are only healthy runs: false alarms are rare


def all_keys(seeds: int, healthy: int) -> list[Key]:
    """Return every run that is wanted: those that set limits, then seed by seed, then healthy."""
    alarms, rest = list(ALARMS), [NOTHING, *ALARMS, *CURES]
    keys = [(v, f, HEALTHY, s) for s in CALIBRATION for f in FAMILIES for v in alarms]
    for seed in range(seeds + healthy):
        faults = (HEALTHY, *SLOW, *INSTANT) if seed < seeds else (HEALTHY,)
        for fault, family in itertools.product(faults, FAMILIES):
            if is_possible(family, fault):
                keys += [(variant, family, fault, seed) for variant in rest]
    return keys


def jobs_of(keys: list[Key]) -> list[Job]:
    """Put what can share a training together: alarms change nothing, cures do."""
    jobs: dict[tuple[str, str, int, str], list[str]] = {}
    for variant, family, fault, seed in keys:
        alone = variant if variant in CURES else ""
        jobs.setdefault((family, fault, seed, alone), []).append(variant)
    return [(f, fault, s, tuple(variants)) for (f, fault, s, _), variants in jobs.items()]


def read(path: Path) -> Results:
    """Return the results of a file; a torn last line is left out."""
    results: Results = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            variant, family, fault, seed, told = json.loads(line)
        except ValueError:
            continue
        results[variant, family, fault, seed] = told
    return results


def write(path: Path, results: Results) -> None:
    """Write all lines anew, in order."""
    lines = [json.dumps([*key, told], separators=(",", ":")) for key, told in results.items()]
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")


def of_whole_seeds(results: Results) -> Results:
    """Leave out faults of seeds that are not yet complete: every kind has as many runs."""
    seeds = sorted({seed for _, _, fault, seed in results if fault != HEALTHY})
    wanted = all_keys(max(seeds, default=-1) + 1, 0)
    whole = [s for s in seeds if all(key in results for key in wanted if key[3] == s)]
    return {k: told for k, told in results.items() if k[2] == HEALTHY or k[3] in whole}


def main() -> None:
    """Run what is missing, then save the summary."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    variants = [NOTHING, *ALARMS, *CURES]
    parser.add_argument("--only", action="append", choices=variants, help="run this anew")
    parser.add_argument("--no-runs", action="store_true", help="the summary of what is there")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--healthy", type=int, default=MORE_HEALTHY)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--save", type=Path, default=RESULTS, help="folder for helps.jsonl, .json")
    arguments = parser.parse_args()
    lines = arguments.save / "helps.jsonl"
    only = arguments.only or []
    results = {key: told for key, told in read(lines).items() if key[0] not in only}
    if only:
        write(lines, results)
    keys = all_keys(arguments.seeds, arguments.healthy)
    missing = [key for key in keys if key not in results and (not only or key[0] in only)]
    jobs = [] if arguments.no_runs else jobs_of(missing)
    method = multiprocessing.get_context("spawn")
    with method.Pool(arguments.processes) as pool, lines.open("a", encoding="utf-8") as file:
        for done, found in enumerate(pool.imap(run_one, jobs)):
            results.update(found)
            file.writelines(
                json.dumps([*key, told], separators=(",", ":")) + "\n"
                for key, told in found.items()
            )
            file.flush()
            if done % 20 == 0:
                print(f"{done} of {len(jobs)}", flush=True)
    results = dict(sorted(results.items()))
    if jobs:
        write(lines, results)
    told = json.dumps(summary(of_whole_seeds(results)), indent=1)
    (arguments.save / "helps.json").write_text(told + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
