"""From the summary of ``benchmarks/results/helps.json`` to the tables of the documentation."""

import math
from collections.abc import Mapping
from typing import Any

PLAIN = {"nothing": "nothing healed", "bare healer": "bare healer"}  # the rest is "+ name"
HEALERS = ("bare healer", "more checks", "forecast")  # what speaks without a probe


def without_probes(told: Mapping[str, Any]) -> dict[str, Any]:
    """Return the summary with the alarms of detectors and forecast alone."""
    return {**told, "alarms": {name: told["alarms"][name] for name in HEALERS}}


def design(told: Mapping[str, Any]) -> str:
    """Say in a sentence or two what was run."""
    slow = ", ".join(
        f"{kind} ({told['doubled'][kind]} of {runs})" for kind, runs in told["slow_runs"].items()
    )
    instant = ", ".join(
        f"{kind} ({told['instant_doubled'][kind]} of {runs})"
        for kind, runs in told["instant_runs"].items()
    )
    same, calm = told["undisturbed"]
    return (
        f"{', '.join(told['families'])} on handwritten digits; {told['steps']} steps; "
        f"{told['seeds']} seeds of every fault. Slow faults grow from step {told['onset']} on and "
        f"are repaired at {told['last']}. Without healing, so many of them double the loss: "
        f"{slow}. Instant ones strike at step {told['onset']}: {instant}. "
        f"{told['healthy_steps']:,} healthy steps for every variant. Probes left {same} of {calm} "
        "healthy runs bit by bit as they were."
    )


def warnings_table(told: Mapping[str, Any]) -> str:
    """Who warned of slow faults in time."""
    rows = [
        "| alarm | warned in time | by chance | median lead, steps | before the detectors | "
        "false per 10,000 steps |",
        "|---|---|---|---|---|---|",
    ]
    for name, row in told["alarms"].items():
        lead = "-" if row["median_lead"] is None else f"{row['median_lead']:.0f}"
        rows.append(
            f"| {_named(name)} | {_share(row['warned'])} | {_part(row['by_chance'])} | {lead} | "
            f"{_part(row['before_the_detectors'])} | {_interval(row['false_per_10k'], 1)} |"
        )
    return "\n".join(rows)


def kinds_table(told: Mapping[str, Any]) -> str:
    """Who warned in time, by fault and by family."""
    kinds = {kind: count for kind, count in told["doubled"].items() if count}
    columns = [*(f"{kind} ({count})" for kind, count in kinds.items()), *told["families"]]
    rows = ["| alarm | " + " | ".join(columns) + " |", "|---|" + "---|" * len(columns)]
    for name, row in told["alarms"].items():
        cells = [_part(row["by_kind"][kind]) for kind in kinds]
        cells += [_part(row["by_family"][family]) for family in told["families"]]
        rows.append(f"| {_named(name)} | " + " | ".join(cells) + " |")
    return "\n".join(rows)


def instants_table(told: Mapping[str, Any]) -> str:
    """Faults of one instant: what was said before and after."""
    kinds = list(told["instant_runs"])
    rows = [
        "| alarm | in the 50 steps before | within 20 after | median delay, steps | "
        + " | ".join(kinds)
        + " |",
        "|---|---|---|---|" + "---|" * len(kinds),
    ]
    for name, row in told["alarms"].items():
        delay = "-" if row["median_delay"] is None else f"{row['median_delay']:.0f}"
        cells = " | ".join(_part(row["instant_after_by_kind"][kind]) for kind in kinds)
        rows.append(
            f"| {_named(name)} | {_part(row['instant_before'])} | {_share(row['instant_after'])} | "
            f"{delay} | {cells} |"
        )
    return "\n".join(rows)


def outcomes_table(told: Mapping[str, Any]) -> str:
    """What became of the runs, slow and instant faults and healthy runs apart."""
    rows = [
        "| runs | variant | did not double | steps lost | more than bare | halted | "
        "held-out loss over that of bare | false per 10,000 steps |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for kind in ("slow", "instant", "healthy"):
        for variant, row in told["cures"].items():
            found = row[kind]
            is_rival = variant != "bare healer"
            ratio = [math.exp(x) for x in found["loss_over_bare"] or ()] if is_rival else None
            more = found["lost_more"] if is_rival else None
            false = row.get("false_per_10k") if kind == "healthy" else None
            doubles = _share(found["did_not_double"]) if found["did_not_double"]["of"] else "-"
            rows.append(
                f"| {kind} | {_cure(variant)} | {doubles} | {_interval(found['lost'], 0)} | "
                f"{_interval(more, 1)} | {_share(found['halted'])} | {_interval(ratio, 3)} | "
                f"{_interval(false, 1)} |"
            )
    return "\n".join(rows)


def control(told: Mapping[str, Any]) -> str:
    """Say what the forecast does beyond the checks that come with it."""
    parts = [
        f"{_interval([math.exp(x) for x in ratio or ()], 3)} after {kind} faults"
        for kind, ratio in told["forecast_over_more_checks"].items()
    ]
    return f"Held-out loss with the forecast over that with more checks alone: {', '.join(parts)}."


def costs_table(told: Mapping[str, Any]) -> str:
    """CPU time per step beyond the bare healer's."""
    rows_of = {**told["cures"], **told["alarms"]}
    costs = {name.partition(":")[0]: row["cpu_us"] for name, row in rows_of.items()}
    rows = ["| piece | added CPU time per step, µs |", "|---|---|"]
    rows += [f"| {name} | {_interval(cost, 0)} |" for name, cost in costs.items() if cost]
    return "\n".join(rows)


def _named(name: str) -> str:
    return f"detectors, {name}" if name in HEALERS[:2] else name


def _cure(variant: str) -> str:
    return PLAIN.get(variant, f"+ {variant}")


def _part(counted: Mapping[str, Any]) -> str:
    return f"{counted['hits']} of {counted['of']}" if counted["of"] else "-"


def _share(counted: Mapping[str, Any]) -> str:
    """Hits, trials and Wilson's interval."""
    if not counted["of"]:
        return "-"
    _, low, high = counted["share"]
    return f"{_part(counted)} ({100 * low:.0f} to {100 * high:.0f} %)"


def _interval(found: Any, places: int) -> str:
    if not found:
        return "-"
    middle, low, high = (f"{value + 0.0:.{places}f}" for value in found)
    return f"{middle} ({low} to {high})"
