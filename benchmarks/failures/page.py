"""From results to ``docs/failures.md``."""

import math
import statistics
from collections.abc import Iterable, Mapping
from typing import Any

from benchmarks.failures.families import FAMILIES, STEPS
from benchmarks.failures.protections import PROTECTIONS, SETTINGS
from benchmarks.failures.rows import AT, ROWS
from zclip.version import __version__

Key = tuple[str, str, int, str]  # row, family, seed, protection
Results = Mapping[Key, Mapping[str, Any]]

NOISE = 2.0  # standard deviations over the seeds of the undisturbed runs
LEAST_NOISE = 0.05  # of the loss of the undisturbed run, where seeds happen to agree


def is_healed(results: Results, key: Key) -> bool:
    """Return whether a run ended within the noise of undisturbed ones, and did end."""
    _, family, seed, protection = key
    ended = results[key]
    calm = undisturbed(results, family, protection)
    usual = results["undisturbed", family, seed, protection]["loss"]
    spread = statistics.stdev(calm) if len(calm) > 1 else 0.0
    limit = usual + max(NOISE * spread, LEAST_NOISE * usual)
    return not ended["died"] and math.isfinite(ended["loss"]) and ended["loss"] <= limit


def undisturbed(results: Results, family: str, protection: str) -> list[float]:
    """Return the losses of the undisturbed runs of a family, one per seed."""
    return [
        ended["loss"]
        for (row, f, _, p), ended in results.items()
        if row == "undisturbed" and f == family and p == protection
    ]


def page(results: Results, load: str, alerts: Iterable[str] = ()) -> str:
    """Return the page; ``alerts`` are the lines of the table of what is reported and not healed."""
    rows = [row.name for row in ROWS if row.name != "undisturbed"]
    return "\n".join(
        [
            *_head(results, load),
            *_summary(results, rows),
            "",
            "## By failure",
            "",
            "Each cell counts the runs that ended within noise, of all. *detected* counts runs in",
            "which healing reported the failure, at least as a note",
            f"(without a fault: {_false_reports(results)}). *steps lost* is the median of steps",
            "undone, skipped or never taken under healing.",
            "",
            *_table(results, rows),
            "",
            "## By family",
            "",
            *_families(results, rows),
            "",
            "## Where healing loses",
            "",
            *_losses(results, rows),
            "",
            "## Reported, not healed",
            "",
            "Where nothing can be undone, healing reports the problem and changes nothing. These",
            "are the same trainings, with the problem and without. A crash counts if its",
            "postmortem is complete.",
            "",
            *alerts,
            "",
        ]
    )


def _false_reports(results: Results) -> str:
    calm = [e for k, e in results.items() if k[0] == "undisturbed" and k[3] == "heal"]
    return f"{sum(e['detected'] for e in calm)} of {len(calm)}"


def _head(results: Results, load: str) -> Iterable[str]:
    seeds = len({seed for row, _, seed, _ in results if row != "undisturbed"})
    calm = len({seed for _, _, seed, _ in results})
    settings = ", ".join(f"`{name}={value}`" for name, value in SETTINGS.items())
    yield "# Failures, injected"
    yield ""
    yield "<!-- made by python -m benchmarks.failures -->"
    yield ""
    yield (
        "Each failure below is injected into small real trainings and compared with three other "
        "protections.\n\n"
        f"- **Trainings:** {', '.join(FAMILIES)} on the digits of scikit-learn and the help text "
        f"of Python, {STEPS} steps of AdamW, {seeds} seed(s). The failure comes at step {AT}.\n"
        "- **Protections:** healing; none; `clip_grad_norm_` to 1; a monitor that sees the loss "
        "only, returns to a copy made every 20 steps and halves the learning rate.\n"
        "- **Within noise:** the run reaches the last step, and its held-out loss is at most that "
        "of its own undisturbed run plus a margin. The undisturbed run has the same seed and "
        f"protection; the margin is {NOISE:g} standard deviations over {calm} seeds (at least "
        f"{LEAST_NOISE:.0%}).\n"
        f"- **Settings** that differ from the defaults, because runs are short: {settings}."
    )
    yield ""
    yield f"`python -m benchmarks.failures` makes this page; version {__version__}, {load}."
    yield ""


def _summary(results: Results, rows: list[str]) -> Iterable[str]:
    yield "| protection | reached the end | within noise | false alarms that changed training |"
    yield "|---|---|---|---|"
    for protection in PROTECTIONS:
        keys = [k for k in results if k[3] == protection and k[0] in rows]
        calm = [k for k in results if k[3] == protection and k[0] == "undisturbed"]
        ended = sum(not results[k]["died"] for k in keys)
        good = sum(is_healed(results, k) for k in keys)
        alarms = sum(results[k]["changed"] for k in calm)
        yield (
            f"| {protection} | {ended} of {len(keys)} | {good} of {len(keys)} "
            f"({good / max(len(keys), 1):.1%}) | {alarms} of {len(calm)} |"
        )


def _table(results: Results, rows: list[str]) -> Iterable[str]:
    yield "| failure | detected | heal | steps lost | none | clipping | loss monitor |"
    yield "|---|---|---|---|---|---|---|"
    for row in rows:
        cells = {}
        for protection in PROTECTIONS:
            keys = [k for k in results if k[0] == row and k[3] == protection]
            cells[protection] = f"{sum(is_healed(results, k) for k in keys)}/{len(keys)}"
        ours = [results[k] for k in results if k[0] == row and k[3] == "heal"]
        if not ours:
            continue
        detected = f"{sum(e['detected'] for e in ours)}/{len(ours)}"
        lost = statistics.median(e["lost"] for e in ours)
        yield (
            f"| {row} | {detected} | {cells['heal']} | {lost:g} | {cells['none']} "
            f"| {cells['clipping']} | {cells['loss monitor']} |"
        )


def _families(results: Results, rows: list[str]) -> Iterable[str]:
    yield "| family | undisturbed loss | " + " | ".join(PROTECTIONS) + " |"
    yield "|---|---|" + "---|" * len(PROTECTIONS)
    for family in FAMILIES:
        calm = undisturbed(results, family, "heal")
        if not calm:
            continue
        cells = []
        for protection in PROTECTIONS:
            keys = [k for k in results if k[1] == family and k[3] == protection and k[0] in rows]
            cells.append(f"{sum(is_healed(results, k) for k in keys)}/{len(keys)}")
        spread = statistics.stdev(calm) if len(calm) > 1 else 0.0
        yield f"| {family} | {statistics.mean(calm):.3f} ± {spread:.3f} | {' | '.join(cells)} |"


def _losses(results: Results, rows: list[str]) -> Iterable[str]:
    """Name every failure in which some healed run did not end within noise."""
    lines = list(_lost(results, rows))
    if not lines:
        yield "In none of these runs."
        return
    yield "| failure | family | not within noise | their losses | undisturbed |"
    yield "|---|---|---|---|---|"
    yield from lines


def _lost(results: Results, rows: list[str]) -> Iterable[str]:
    for row in rows:
        for family in FAMILIES:
            keys = [k for k in results if k[0] == row and k[1] == family and k[3] == "heal"]
            bad = [k for k in keys if not is_healed(results, k)]
            if not bad:
                continue
            found = ", ".join(results[k]["died"] or f"{results[k]['loss']:.3f}" for k in bad)
            calm = statistics.mean(undisturbed(results, family, "heal"))
            yield f"| {row} | {family} | {len(bad)} of {len(keys)} | {found} | {calm:.3f} |"
