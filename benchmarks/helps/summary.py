"""From runs to numbers: who warned in time, how often in vain, and what became of the runs.

All that is compared is paired: the same family, fault and seed, hence the same weights, batches
and fault. When the loss doubles is told by the run in which nothing is healed, for all alike.
"""

import math
import statistics
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from benchmarks.helps.alarms import ALARMS, FIRST_LOOK, LOOK_STEPS
from benchmarks.helps.families import FAMILIES, STEPS
from benchmarks.helps.faults import HEALTHY, INSTANT, LAST, ONSET, SLOW
from benchmarks.helps.intervals import Interval, clustered_mean, rate, share
from benchmarks.helps.runs import CURES, NOTHING, Key

Results = dict[Key, dict[str, Any]]
Where = tuple[str, str, int]  # family, fault, seed
Times = Callable[[Where], list[int]]  # attempts at which something spoke

CALIBRATION = tuple(range(100, 105))  # seeds of healthy runs that set limits and do nothing else
BARE, MORE_CHECKS = "bare healer", "more checks"
BEFORE_STEPS, AFTER_STEPS = 50, 20  # around an instant fault
MOST_LOSS = 100.0  # what a broken model counts as; chance is below 3
PER = 10_000


def summary(results: Results) -> dict[str, Any]:
    """Return all that the pages tell."""
    runs = Runs(results)
    limits = {name: set_limits(results, name) for name in ALARMS}
    speakers: dict[str, tuple[Times, Times]] = {  # of what is warned, and of what counts as false
        BARE: (runs.told(BARE), runs.told(BARE)),
        MORE_CHECKS: (runs.told(MORE_CHECKS), runs.told(MORE_CHECKS)),
        "forecast": (runs.told("forecast", "instability_ahead"), runs.told("forecast")),
    }
    for name, kind in ALARMS.items():
        own = runs.risen(name, dict.fromkeys(FAMILIES, kind.limit))
        fitted = runs.risen(name, limits[name])
        speakers[f"{name}: {kind.words}"] = own, own
        speakers[f"{name}: above healthy runs"] = fitted, fitted
    return {
        "steps": STEPS,
        "onset": ONSET,
        "last": LAST,
        "families": list(FAMILIES),
        "seeds": len({seed for _, fault, seed in runs.faulty}),
        "healthy_steps": STEPS * len(runs.healthy),
        "limits": limits,
        "slow_runs": {k: sum(w[1] == k for w in runs.faulty) for k in SLOW},
        "doubled": {k: sum(w[1] == k for w in runs.doubled) for k in SLOW},
        "instant_runs": {k: sum(w[1] == k for w in runs.faulty) for k in INSTANT},
        "instant_doubled": {
            k: sum(w[1] == k and runs.doubling(w) is not None for w in runs.faulty) for k in INSTANT
        },
        "undisturbed": undisturbed(results, runs),
        "alarms": {
            name: {**warned(runs, *times), "cpu_us": added_cpu(results, runs, name)}
            for name, times in speakers.items()
        },
        "forecast_over_more_checks": {
            name: clustered_mean(
                _by_seed(
                    {
                        w: _log_loss(results[("forecast", *w)])
                        - _log_loss(results[(MORE_CHECKS, *w)])
                        for w in runs.faulty
                        if w[1] in kinds
                    }
                )
            )
            for name, kinds in (("slow", SLOW), ("instant", tuple(INSTANT)))
        },
        "cures": {name: cured(results, runs, name) for name in (NOTHING, *CURES)},
    }


class Runs:
    """What there is of runs that every variant has done."""

    def __init__(self, results: Results) -> None:
        self._results = results
        variants = (NOTHING, *ALARMS, *CURES)
        places = {key[1:] for key in results if key[0] == NOTHING}
        done = {w for w in places if all((v, *w) in results for v in variants)}
        self.healthy = sorted(w for w in done if w[1] == HEALTHY)
        self.faulty = sorted(w for w in done if w[1] != HEALTHY)
        self.doubled = [w for w in self.faulty if w[1] in SLOW and self.doubling(w) is not None]

    def doubling(self, where: Where) -> int | None:
        """Return when the loss doubles if nothing is healed."""
        found: int | None = self._results[(NOTHING, *where)]["doubled"]
        return found

    def told(self, variant: str, cause: str | None = None) -> Times:
        """Return when a healer spoke: of everything, or of one cause."""

        def times(where: Where) -> list[int]:
            told = self._results[(variant, *where)]["told"]
            return [at for at, named, _ in told if cause in (None, named)]

        return times

    def risen(self, name: str, limits: Mapping[str, float]) -> Times:
        """Return when a score rose above the limit of its family; it must fall to rise again."""

        def times(where: Where) -> list[int]:
            is_above = [
                score is not None and score > limits[where[0]]
                for score in self._results[(name, *where)]["scores"]
            ]
            before = [False, *is_above]
            rises = [now and not was for now, was in zip(is_above, before, strict=False)]
            return [FIRST_LOOK + LOOK_STEPS * i for i, rise in enumerate(rises) if rise]

        return times


def set_limits(results: Results, name: str) -> dict[str, float]:
    """Return the highest score of the healthy runs that set limits, by family."""
    return {
        family: max(
            (
                score
                for seed in CALIBRATION
                for score in results.get((name, family, HEALTHY, seed), {}).get("scores", [])
                if score is not None
            ),
            default=math.inf,
        )
        for family in FAMILIES
    }


def warned(runs: Runs, times: Times, all_times: Times) -> dict[str, Any]:
    """Return how often something warned in time, by chance, first, in vain, and of instants."""
    first = {w: _first(times(w), ONSET, runs.doubling(w)) for w in runs.doubled}
    bare = runs.told(BARE)
    rivals = {w: _first(bare(w), ONSET, runs.doubling(w)) for w in runs.doubled}
    chance = [
        _first(times((f, HEALTHY, s)), ONSET, runs.doubling((f, fault, s))) is not None
        for f, fault, s in runs.doubled
    ]
    ahead = [at is not None and (rivals[w] is None or at < rivals[w]) for w, at in first.items()]
    leads = [(runs.doubling(w) or 0) - at for w, at in first.items() if at is not None]
    false = sum(len(all_times(w)) for w in runs.healthy)
    struck = [w for w in runs.faulty if w[1] in INSTANT]
    before = [_first(times(w), ONSET - BEFORE_STEPS, ONSET) is not None for w in struck]
    after = {w: _first(times(w), ONSET, ONSET + AFTER_STEPS + 1) for w in struck}
    delays = [at - ONSET for at in after.values() if at is not None]
    return {
        "warned": _counted(at is not None for at in first.values()),
        "by_kind": {
            kind: _counted(at is not None for w, at in first.items() if w[1] == kind)
            for kind in SLOW
        },
        "by_family": {
            family: _counted(at is not None for w, at in first.items() if w[0] == family)
            for family in FAMILIES
        },
        "by_chance": _counted(chance),
        "before_the_detectors": _counted(ahead),
        "median_lead": statistics.median(leads) if leads else None,
        "false": false,
        "false_per_10k": rate(false, STEPS * len(runs.healthy) / PER) if runs.healthy else None,
        "instant_before": _counted(before),
        "instant_after": _counted(at is not None for at in after.values()),
        "instant_after_by_kind": {
            kind: _counted(at is not None for w, at in after.items() if w[1] == kind)
            for kind in INSTANT
        },
        "median_delay": statistics.median(delays) if delays else None,
    }


def cured(results: Results, runs: Runs, variant: str) -> dict[str, Any]:
    """Return what became of the runs under a variant, slow and instant faults apart."""
    told: dict[str, Any] = {}
    for name, kinds in (("slow", SLOW), ("instant", tuple(INSTANT)), (HEALTHY, (HEALTHY,))):
        places = [w for w in (*runs.faulty, *runs.healthy) if w[1] in kinds]
        ended = {w: results[(variant, *w)] for w in places}
        ratios = {w: _log_loss(ended[w]) - _log_loss(results[(BARE, *w)]) for w in places}
        lost = {w: e["lost"] for w, e in ended.items() if "lost" in e}
        more = {w: steps - results[(BARE, *w)]["lost"] for w, steps in lost.items()}
        told[name] = {
            "runs": len(places),
            "loss_over_bare": clustered_mean(_by_seed(ratios)),
            "lost": clustered_mean(_by_seed(lost)),
            "lost_more": clustered_mean(_by_seed(more)),
            "halted": _counted(e["halted"] for e in ended.values() if "halted" in e),
            "did_not_double": _counted(
                ended[w]["doubled"] is None for w in places if runs.doubling(w) is not None
            ),
        }
    if variant != NOTHING and runs.healthy:
        false = sum(len(results[(variant, *w)]["told"]) for w in runs.healthy)
        told["false_per_10k"] = rate(false, STEPS * len(runs.healthy) / PER)
    return {**told, "cpu_us": added_cpu(results, runs, variant)}


def added_cpu(results: Results, runs: Runs, row: str) -> Interval | None:
    """Return the mean CPU time per healthy step beyond the bare healer's, in microseconds."""
    name = row.partition(":")[0]
    if name in (NOTHING, BARE):
        return None
    added = {
        w: 1e6 * (results[(name, *w)]["cpu"] - bare)
        for w in runs.healthy
        for bare in [results[(BARE, *w)]["cpu"] if name in CURES else 0.0]
    }
    return clustered_mean(_by_seed(added))


def undisturbed(results: Results, runs: Runs) -> tuple[int, int]:
    """Return in how many healthy runs the loss with all alarms is that of the bare healer, bit by
    bit, and of how many in which that healer said nothing."""
    calm = [w for w in runs.healthy if not results[(BARE, *w)]["told"]]
    same = sum(results[(NOTHING, *w)]["loss"] == results[(BARE, *w)]["loss"] for w in calm)
    return same, len(calm)


def _first(times: Iterable[int], begin: int, end: int | None) -> int | None:
    return next((at for at in times if begin <= at < (math.inf if end is None else end)), None)


def _counted(claims: Iterable[bool]) -> dict[str, Any]:
    found = list(claims)
    return {"hits": sum(found), "of": len(found), "share": share(sum(found), len(found))}


def _log_loss(ended: Mapping[str, Any]) -> float:
    loss = ended["loss"]
    return math.log(MOST_LOSS if loss is None else min(loss, MOST_LOSS))


def _by_seed(values: Mapping[Where, float]) -> dict[tuple[str, int], list[float]]:
    """Put together what shares its weights and batches."""
    groups: dict[tuple[str, int], list[float]] = {}
    for (family, _, seed), value in values.items():
        groups.setdefault((family, seed), []).append(value)
    return groups
