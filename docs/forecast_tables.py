"""Tables and sentences of ``docs/forecast.md`` that say how good the forecast is, from results."""

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
GOAL, MOST_FALSE = 0.95, 1.0  # of the aim: warned in time, false warnings per 10,000 steps
MOST_OFF = 1.5  # points that coverage may be off
BEFORE, LAG = 50, 2  # steps before an instant failure in which a warning is looked for


def results(name: str) -> Any:
    """Read what a benchmark saved."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def percent(share: float | None, digits: int = 1) -> str:
    """A share as people read it."""
    return "-" if share is None else f"{100 * share:.{digits}f} %"


def between(values: Any, factor: float = 1.0, form: str = "{:.2f}") -> str:
    """An interval."""
    if values is None:
        return "-"
    low, high = (form.format(factor * value) for value in values)
    return f"{low} to {high}"


def detection_table() -> str:
    """How many slow failures were warned of in time, by kind of model and of held-out runs."""
    rows = [
        "| held out | model | failures | warned in time | 95 % interval | median lead, steps | "
        "false per 10,000 | 95 % interval |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, entry in results("forecast").items():
        if not isinstance(entry, dict) or "total" not in entry or name == "fresh":
            continue
        model, _, by = name.partition(" by ")
        held_out = f"{by}s" if by else "exam: " + ", ".join(entry["folds"])
        total = entry["total"]
        is_drawn = by != "run"  # three folds of runs are no clusters
        warned = between(total["detection_interval"], 100, "{:.1f}") if is_drawn else "-"
        false = between(total["false_per_10k_interval"]) if is_drawn else "-"
        rows.append(
            f"| {held_out} | {model if by else 'network'} | {total['failures']} | "
            f"{percent(total['detection'])} | {warned} | {total['median_lead']:.0f} | "
            f"{total['false_per_10k']:.2f} | {false} |"
        )
    return "\n".join(rows)


def goal_sentence() -> str:
    """Whether the aim is met, by the mean and by the interval."""
    told = results("forecast")
    total = told["network by architecture"]["total"]
    low, high = total["detection_interval"]
    least, most = total["false_per_10k_interval"]
    warned = _verdict(total["detection"] >= GOAL, low >= GOAL)
    false = _verdict(total["false_per_10k"] <= MOST_FALSE, most <= MOST_FALSE)
    exam = told["exam"]["total"]
    return (
        f"The aim was 95 % at no more than one false warning in 10,000 healthy steps, on "
        f"architectures never seen. Warned in time: **{percent(total['detection'])}** "
        f"({100 * low:.1f} to {100 * high:.1f}): {warned}. False: "
        f"**{total['false_per_10k']:.2f}** ({least:.2f} to {most:.2f}): {false}. "
        f"The exam: {percent(exam['detection'])} at {exam['false_per_10k']:.2f}. A healthy run "
        f"stands falsely warned in {percent(total['falsely_warned'], 2)} of its steps."
    )


def _verdict(by_mean: bool, by_interval: bool) -> str:
    if by_mean and by_interval:
        return "met, and the whole interval is on the right side"
    return "met by the mean, not by the whole interval" if by_mean else "not met"


def kinds_table() -> str:
    """The network on held-out architectures, by kind of failure."""
    total = results("forecast")["network by architecture"]["total"]
    rows = [
        "| failure | runs | warned in time | lead, steps: 10 %, median, 90 % |",
        "|---|---|---|---|",
    ]
    for kind, entry in total["by_kind"].items():
        lead = ", ".join(f"{value:.0f}" for value in entry["lead_p10_p50_p90"]) or "-"
        rows.append(f"| {kind} | {entry['failures']} | {percent(entry['detection'])} | {lead} |")
    instant = percent(total["instant_warned_before"])
    rows.append(f"| nan_batch, corrupt_weights | {total['instant_failures']} | {instant} | - |")
    return "\n".join(rows)


def instant_sentence() -> str:
    """Failures of one instant, beside what false warnings alone would make."""
    total = results("forecast")["network by architecture"]["total"]
    count = total["instant_failures"]
    warned = round(total["instant_warned_before"] * count)
    usual = total["false_per_10k"] * (BEFORE - LAG) / 1e4
    return (
        f"Failures of one instant are not foreseen: in the {BEFORE} steps before them a warning "
        f"began in {warned} of {count} runs ({percent(warned / count)}); false warnings alone "
        f"would make it {count * usual:.1f} ({percent(usual)})."
    )


def architectures_table() -> str:
    """The network, by the architecture that it had not seen."""
    folds = results("forecast")["network by architecture"]["folds"]
    rows = ["| held out | failures | warned in time | false per 10,000 |", "|---|---|---|---|"]
    for name, entry in folds.items():
        false = entry["false_per_10k"]
        told = percent(entry["detection"])
        rows.append(f"| {name} | {entry['failures']} | {told} | {false:.2f} |")
    return "\n".join(rows)


def architectures_sentence() -> str:
    """How many architectures miss the aim, and which by most."""
    folds = results("forecast")["network by architecture"]["folds"]
    warned = {n: e["detection"] for n, e in folds.items() if e["failures"]}
    short = sorted((share, name) for name, share in warned.items() if share < GOAL)
    false = {n: e["false_per_10k"] for n, e in folds.items()}
    many = sorted(((v, n) for n, v in false.items() if v > MOST_FALSE), reverse=True)
    worst = ", ".join(f"`{name}` {100 * share:.0f} %" for share, name in short[:3])
    loudest = ", ".join(f"`{name}` {value:.1f}" for value, name in many[:3])
    return (
        f"These are means. {len(short)} of {len(warned)} architectures with failures lie below "
        f"95 %{f' ({worst} are the lowest)' if worst else ''}. {len(many)} of {len(false)} "
        f"have more than one false warning in 10,000 steps"
        f"{f' ({loudest} have the most)' if loudest else ''}."
    )


def shares_table(source: str) -> str:
    """Every share of false alarms: what is found, what is false."""
    rows = [
        "| share of false alarms | warned in time | median lead, steps | false per 10,000 | "
        "95 % interval | falsely warned, of healthy steps |",
        "|---|---|---|---|---|---|",
    ]
    for share, row in results("forecast")[source]["by_share"].items():
        rows.append(
            f"| {share} | {percent(row['detection'])} | {row['median_lead']:.0f} | "
            f"{row['false_per_10k']:.2f} | {between(row['false_per_10k_interval'])} | "
            f"{percent(row['falsely_warned'], 2)} |"
        )
    return "\n".join(rows)


COVERED = {
    "fresh runs": "alike",
    "fresh runs, other batch sizes": "fresh",
    "held-out architectures": "network by architecture",
}
"""Whose coverage is told, and where it is in the results."""


def coverage_table() -> str:
    """Share of healthy runs below the limit: mean, interval, and the extremes."""
    told = {name: results("forecast")[source]["by_share"] for name, source in COVERED.items()}
    rows = [f"| promised | {' | '.join(told)} |", "|---|" + "---|" * len(told)]
    for share in told["fresh runs"]:
        cells = []
        for by_share in told.values():
            row = by_share[share]
            low, *_, high = row["coverage_low_p10_p90_high"]
            interval = between(row["coverage_interval"], 100, "{:.1f}")
            extremes = between((low, high), 100, "{:.0f}")
            cells.append(f"{percent(row['coverage'])} ({interval}; {extremes})")
        rows.append(f"| {percent(1 - float(share), 0)} | {' | '.join(cells)} |")
    return "\n".join(rows)


def coverage_sentence() -> str:
    """How far coverage is from what was promised."""
    told = results("forecast")

    def furthest(source: str) -> str:
        off = [r["coverage"] - 1 + float(s) for s, r in told[source]["by_share"].items()]
        return f"{100 * max(off, key=abs):+.1f}"

    alike, fresh, other = (furthest(source) for source in COVERED.values())
    runs = told["alike"]["by_share"]["0.02"]["healthy_runs"]
    is_met = "met" if abs(float(alike)) <= MOST_OFF else "not met"
    return (
        f"On {runs:,} fresh healthy runs the coverage is at most {alike} points from the promise "
        f"(the aim was {MOST_OFF}: {is_met}). With other batch sizes than those that set the "
        f"limits it is {fresh}, and on held-out architectures {other}. More means fewer false "
        f"alarms than promised. These are means: single architectures are far from it."
    )


def reliability_table() -> str:
    """What was said, and what came, on architectures that were held out."""
    rows = ["| said | came | steps |", "|---|---|---|"]
    for said, was, steps in results("forecast")["network by architecture"]["reliability"]["bins"]:
        rows.append(f"| {percent(said)} | {percent(was)} | {steps:,} |")
    return "\n".join(rows)


def reliability_sentence() -> str:
    """The errors of the probability."""
    told = results("forecast")
    held, fresh = (told[n]["reliability"] for n in ("network by architecture", "fresh"))

    def points(source: Any, name: str) -> str:
        return f"{100 * source[name][0]:.1f} ({between(source[name][1:], 100, '{:.1f}')})"

    return (
        f"On held-out architectures {percent(held['base'][0])} of steps are followed by the event. "
        f"The expected calibration error is {points(held, 'error')} points over all steps and "
        f"{points(held, 'error_above')} over those with more than 10 %; the Brier skill is "
        f"{held['skill'][0]:.2f} ({between(held['skill'][1:])}). The shipped model on fresh runs "
        f"of known architectures: {points(fresh, 'error_above')} points above 10 %, skill "
        f"{fresh['skill'][0]:.2f}. Single architectures may be further off."
    )


def blind_sentence() -> str:
    """What is left without norms of weights."""
    blind = results("forecast")["fresh"]["without_weight_norms"]
    seen = results("forecast")["fresh"]["total"]
    drift = blind["by_kind"]["drift"]["detection"]
    return (
        f"Without them (`check_interval=0`, pipeline stages) the shipped model warns of "
        f"{percent(blind['detection'], 0)} of slow failures instead of "
        f"{percent(seen['detection'], 0)}, of {percent(drift, 0)} of drifts, at "
        f"{blind['false_per_10k']:.2f} false warnings per 10,000 steps."
    )


def real_table() -> str:
    """Real runs, by kind of failure."""
    told = results("forecast_real")
    rows = [
        "| failure | runs | loss doubled | warned in time | median lead, steps |",
        "|---|---|---|---|---|",
    ]
    for kind, row in told["by_kind"].items():
        lead = "-" if row["median_lead"] is None else f"{row['median_lead']:.0f}"
        rows.append(f"| {kind} | {row['runs']} | {row['failures']} | {row['warned']} | {lead} |")
    rows.append(
        f"| nan_gradient, corrupt_weight | {told['instant_failures']} | - | "
        f"{told['instant_warned_before']} before the fault | - |"
    )
    return "\n".join(rows)


def real_sentence() -> str:
    """Real runs, all together."""
    told = results("forecast_real")
    share, *interval = told["detection"]
    false, *interval_of_false = told["false_per_10k"]
    if told["false_warnings"]:
        bounds = f"{false:.2f} per 10,000 ({between(interval_of_false)})"
    else:  # of none the bootstrap knows nothing: the rule of three
        bounds = f"fewer than {3e4 / told['healthy_steps']:.1f} per 10,000 with 95 % confidence"
    return (
        f"There were {told['runs']} runs of {len(told['networks'])} networks "
        f"({', '.join(told['networks'])}). {told['failures']} slow failures doubled the loss, and "
        f"{percent(share, 0)} ({between(interval, 100, '{:.0f}')}) of them were warned of in time, "
        f"{told['median_lead']:.0f} steps ahead in the median. There were "
        f"{told['false_warnings']:.0f} false warnings in {told['healthy_steps']:,} healthy steps: "
        f"{bounds}. Intervals are over networks."
    )


def card_sentence() -> str:
    """The headline numbers for the card of the model."""
    total = results("forecast")["network by architecture"]["total"]
    return (
        f"- **How good it is.** On architectures that it has not seen it warns of "
        f"{percent(total['detection'])} of slow failures in time "
        f"({between(total['detection_interval'], 100, '{:.1f}')}),\n  with "
        f"{total['false_per_10k']:.2f} false warnings per 10,000 healthy steps "
        f"({between(total['false_per_10k_interval'])}); 95 % intervals over architectures.\n"
        f"  docs/forecast.md has the tables, made by `python -m tools.forecast evaluate`."
    )
