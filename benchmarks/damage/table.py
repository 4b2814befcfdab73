"""All cases of one family and seed, and whether each healed, judged by undamaged twins.

A healed run has taken as many steps as its twin, but not all on the same batches: those of undone
steps are left out. What that changes is no damage. So its twin is trained on the batches of the
steps that counted, in their order. Other protections do not say which steps they undo; their twin
has the batches as the loader gives them.
"""

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.damage.families import make
from benchmarks.damage.kinds import HEALED, KINDS, LAST_GOOD, REPORTED, SHORT_RUN_KINDS, Kind
from benchmarks.damage.runs import ARC, OLDER, Ended, train

NUM_TWINS = 6
TOLERANCE = 1.1
SPREADS = 3.0  # standard deviations of the twins that count as noise: 1 in 50 runs is beyond

Record = dict[str, Any]


class Job(NamedTuple):
    """Everything that shares its undamaged twins."""

    family: str
    seed: int
    kinds: tuple[str, ...]
    modes: tuple[str, ...]
    protections: tuple[str, ...]
    steps: int
    is_short: bool = False  # whether the kinds are those of short runs
    other: str = ""  # the checkout of an older version, for the protection OLDER


def limit_of(twins: Sequence[float], twin: float) -> float:
    """Return the highest loss that counts as that of an undamaged run.

    Args:
        twins: losses of undamaged runs that differ in the order of their data only.
        twin: that of the run with the same data.
    """
    noise = statistics.fmean(twins) + SPREADS * statistics.stdev(twins)
    return max(TOLERANCE * twin, noise)


def verdict(kind: Kind, ended: Ended, limit: float) -> str:
    """Return how a damaged run ended: healed, reported, halted, or not healed."""
    if kind.demand == LAST_GOOD:
        return "last good" if ended.keeps_last_good else "not the last good weights"
    if not ended.died and ended.loss <= limit:
        return "healed"
    if kind.demand == REPORTED and ended.reports:
        return "reported"
    return "halted" if ended.died else "not healed"


GOOD = {HEALED, REPORTED, LAST_GOOD}


def run_job(job: Job) -> list[Record]:
    """Run every kind under every protection, each beside undamaged twins; return all records."""
    known = SHORT_RUN_KINDS if job.is_short else KINDS
    kinds = [kind for kind in known if kind.name in job.kinds]
    records: list[Record] = []
    for protection in job.protections:
        if protection == OLDER:
            records += _run_with_older_version(job) if job.other else []
            continue
        twins = [
            train(make(job.family, job.seed, order, job.steps), None, 0, job.steps, protection)
            for order in range(NUM_TWINS)
        ]
        losses = [twin.loss for twin in twins]
        limit = limit_of(losses, losses[0])
        records += [
            _record(job, "undamaged", protection, "run", twin, limit, order=order)
            for order, twin in enumerate(twins)
        ]
        for kind in kinds:
            if kind.families and job.family not in kind.families:
                continue
            for mode in job.modes if protection == "heal" else ("loop",):
                training = make(job.family, job.seed, steps=job.steps)
                ended = train(training, kind, job.seed, job.steps, protection, mode)
                twin = _twin_of(job, ended, losses[0])
                limit = limit_of(losses, twin)
                said = verdict(kind, ended, limit)
                more = {
                    "twin": twin,
                    "at": kind.starts_at(job.steps, job.seed),
                    "verdict": said,
                    "ok": said in GOOD,
                }
                records.append(_record(job, kind.name, protection, mode, ended, limit, **more))
    return records


def _twin_of(job: Job, ended: Ended, usual: float) -> float:
    """Return the loss of an undamaged run on the batches of the steps that counted."""
    if not ended.rollbacks or ended.died or ended.batches is None:
        return usual  # they are those of the loader
    training = make(job.family, job.seed, steps=job.steps)
    twin = training._replace(loader=ended.batches)
    return train(twin, None, 0, job.steps, "heal").loss


def _run_with_older_version(job: Job) -> list[Record]:
    """Run a job, healed in a hand-written loop, with heal and zclip of another checkout."""
    here = Path(__file__).parents[2]
    args = [sys.executable, "-c", _WITH_OLDER_VERSION, job.other, str(here)]
    job = job._replace(protections=("heal",), modes=("loop",), other="")
    env = {**os.environ, "PYTHONPATH": ""}
    done = subprocess.run(
        args, input=json.dumps(job), capture_output=True, text=True, check=False, env=env
    )
    if done.returncode:
        raise RuntimeError(f"the run with {job.other} failed: {done.stderr[-2000:]}")
    found: list[Record] = json.loads(done.stdout.splitlines()[-1])
    return [{**record, "protection": OLDER} for record in found]


_WITH_OLDER_VERSION = """
import json, sys
older, here = sys.argv[1:]
sys.path.insert(0, older)
import zclip, heal
sys.path[0] = here  # the benchmarks are ours
from benchmarks.damage.table import Job, run_job
assert heal.__file__.startswith(older), heal.__file__
job = Job(*(tuple(x) if isinstance(x, list) else x for x in json.load(sys.stdin)))
print()
print(json.dumps(run_job(job)))
"""


def _record(
    job: Job, kind: str, protection: str, mode: str, ended: Ended, limit: float, **more: Any
) -> Record:
    where = {"kind": kind, "family": job.family, "seed": job.seed}
    return {
        **where,
        "protection": protection,
        "mode": mode,
        "limit": limit,
        **more,
        **ended.to_json(),
    }


NAMES = {"none": "none", "clip": "clipping", OLDER: "version 0.1", ARC: "ARC"}
"""Of the protections beside ours, as the table has them."""


def page(records: Sequence[Record]) -> Iterator[str]:
    """Yield the lines of the table, and of what was not healed."""
    damaged = [r for r in records if r["kind"] != "undamaged"]
    healed = [r for r in damaged if r["protection"] == "heal"]
    modes = sorted({r["mode"] for r in healed}, reverse=True)
    yield from _kinds(damaged, modes)
    yield ""
    for mode in modes:
        of_mode = [r for r in healed if r["mode"] == mode]
        yield f"`{mode}`: {_share(of_mode)} as required."
        yield ""
    seeds, families = ({r[name]: None for r in records} for name in ("seed", "family"))
    yield f"Families: {', '.join(families)}; seeds {', '.join(map(str, seeds))}."
    yield ""
    calm = [r for r in records if r["kind"] == "undamaged" and r["protection"] == "heal"]
    changed = [r for r in calm if r["rollbacks"] or r["lr_changes"] or r["died"]]
    yield (
        f"Undamaged runs: {len(calm)}; {len(changed)} changed, "
        f"{sum(bool(r['reports']) for r in calm)} with a report, "
        f"{sum(r['experiments'] for r in calm)} experiments."
    )
    yield ""
    yield from _others(records)
    yield from _failures(healed, damaged)


def _others(records: Sequence[Record]) -> Iterator[str]:
    """Yield what became of all cases, and of undamaged runs, under other protections."""
    measured = {r["protection"] for r in records}
    missing = [name for protection, name in NAMES.items() if protection not in measured]
    if missing:
        yield f"Not measured: {', '.join(missing)}."
        yield ""
    for protection in filter(measured.__contains__, NAMES):
        name = NAMES[protection]
        rows = [r for r in records if r["protection"] == protection]
        calm = [r for r in rows if r["kind"] == "undamaged"]
        changed = [r for r in calm if r["rollbacks"] or r["lr_changes"] or r["died"]]
        yield (
            f"{name[0].upper()}{name[1:]}: {_share(r for r in rows if r not in calm)} as required; "
            f"undamaged runs: {len(calm)}, {len(changed)} changed, "
            f"{sum(bool(r['reports']) for r in calm)} with a report."
        )
        yield ""


def _kinds(damaged: Sequence[Record], modes: Sequence[str]) -> Iterator[str]:
    others = [p for p in NAMES if any(r["protection"] == p for r in damaged)]
    heads = [*(NAMES[p] for p in others), *(f"heal, {mode}" for mode in modes)]
    yield "| damage | " + " | ".join(heads) + " | found after | rollbacks | LR | experiments |"
    yield "|---|" + "---|" * len(heads) + "---:|---:|---:|---:|"
    for kind in dict.fromkeys(r["kind"] for r in damaged):
        rows = [r for r in damaged if r["kind"] == kind]
        cells = [_share(r for r in rows if r["protection"] == p) for p in others]
        ours = [r for r in rows if r["protection"] == "heal"]
        cells += [_share(r for r in ours if r["mode"] == mode) for mode in modes]
        waits = [r["detected"] - r["at"] for r in ours if r["detected"] is not None]
        cells += [f"{statistics.median(waits):g} ({len(waits)})" if waits else "-"]
        cells += [
            f"{sum(r[name] for r in ours) / len(ours):.1f}" if ours else "-"
            for name in ("rollbacks", "lr_changes", "experiments")
        ]
        yield f"| {kind} | " + " | ".join(cells) + " |"


def _share(rows: Iterable[Record]) -> str:
    rows = list(rows)
    return f"{sum(r['ok'] for r in rows)}/{len(rows)}"


def _failures(healed: Sequence[Record], damaged: Sequence[Record]) -> Iterator[str]:
    bare = {
        (r["kind"], r["family"], r["seed"]): r["loss"] for r in damaged if r["protection"] == "none"
    }
    bad = [r for r in healed if not r["ok"]]
    if not bad:
        yield "Every case ended as required."
        return
    yield "| not as required | family, seed, mode | loss | twin | limit | bare | what happened |"
    yield "|---|---|---:|---:|---:|---:|---|"
    for r in bad:
        key = r["kind"], r["family"], r["seed"]
        happened = ", ".join(
            [
                f"{r['verdict']}: {r['rollbacks']} rollbacks, {r['lr_changes']} LR changes",
                *(f"{cause} x {count}" for cause, count in (r["reports"] or {}).items()),
                *([r["died"][:80]] if r["died"] else []),
            ]
        )
        yield (
            f"| {r['kind']} | {r['family']}, {r['seed']}, {r['mode']} "
            f"| {_number(r['loss'])} | {_number(r['twin'])} | {_number(r['limit'])} "
            f"| {_number(bare[key]) if key in bare else '-'} | {happened} |"
        )


def _number(loss: float | None) -> str:
    return "NaN" if loss is None else f"{loss:.4g}"
