"""Count how often each detector suspects or reports something in streams in which nothing is wrong.

python -m benchmarks.suspicions                # 10 seeds: half a minute of one core
python -m benchmarks.suspicions --seeds 3 --write   # put the table into docs/experiments.md
"""

import argparse
import inspect
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from heal.causes import Finding
from heal.config import HealingConfig
from heal.detectors import robust
from heal.detectors.foreign_writes import ForeignWrites
from heal.detectors.gradients import GradientExplosion, SkippedSteps
from heal.detectors.host import ThroughputCollapse
from heal.detectors.learning_rate import LrChange
from heal.detectors.loss import LossChange
from heal.detectors.plateau import NotLearning, OverfittingGap, Plateau
from heal.detectors.preference import ChancePlateau, LikelihoodCollapse, PreferenceInversion
from heal.detectors.rewards import KlBlowUp, RewardCollapse
from heal.detectors.weights import StateHealth
from tests.heal.detectors import streams

SEEDS = 10
EVAL_INTERVAL = 100  # steps; an evaluation has the loss of the step, as without overfitting
PAGE = Path(__file__).resolve().parent.parent / "docs" / "experiments.md"
START, END = "<!-- made by benchmarks/suspicions.py -->\n", "<!-- end -->"

Stream = tuple[str, list[Any]]


def by_loss(seed: int) -> Iterator[Stream]:
    for name, losses in streams.healthy_streams(seed):
        yield name, list(streams.records(losses))


def by_norm(seed: int) -> Iterator[Stream]:
    for name, norms in streams.norm_streams(seed):
        yield name, list(streams.records(streams.learning_curve(len(norms)), norms=norms))


def by_rate(seed: int) -> Iterator[Stream]:
    for name, lrs in streams.schedules():
        yield name, list(streams.records(streams.learning_curve(len(lrs)), lrs=lrs))
        told = streams.records(streams.learning_curve(len(lrs)), lrs=lrs, scheduled_lrs=lrs)
        yield f"{name}, schedule known", list(told)


def by_pace(seed: int) -> Iterator[Stream]:
    for name, seconds in streams.durations(seed):
        yield name, list(streams.records(streams.learning_curve(len(seconds)), seconds=seconds))


class Row(NamedTuple):
    """A detector, and the healthy streams that it is shown.

    Attributes:
        reacts_to: what it looks for, in words.
        name: by which ``disabled_detectors`` knows it; others read the log of a trainer.
        leads_to: what its findings may lead to.
    """

    detector: Any
    name: str
    reacts_to: str
    leads_to: str
    healthy: Callable[[int], Iterable[Stream]]


EXPERIMENT, ACTION, ALERT = "experiment", "action", "alert"
ROWS = [
    Row(
        LossChange,
        "loss",
        "a leap above the recent level, a climb above the best",
        EXPERIMENT,
        by_loss,
    ),
    Row(
        GradientExplosion,
        "gradient_explosion",
        "norms far above their upper range",
        EXPERIMENT,
        by_norm,
    ),
    Row(
        SkippedSteps,
        "skipped_steps",
        "NaN, Inf and skipped steps, counted in a row",
        EXPERIMENT,
        by_norm,
    ),
    Row(
        StateHealth,
        "health",
        "NaN or Inf in weights and moments, norms that leap, lost moments",
        f"{ACTION}, {EXPERIMENT}",
        streams.weight_rows,
    ),
    Row(
        LrChange,
        "lr",
        "a rate off its schedule, a leap that no schedule explains, a rate of zero or less",
        ALERT,
        by_rate,
    ),
    Row(
        NotLearning,
        "not_learning",
        "a loss no lower than at the start, gradients of zero",
        f"{EXPERIMENT}, {ALERT}",
        by_loss,
    ),
    Row(
        ForeignWrites,
        "foreign_writes",
        "weights, moments or running statistics that neither update nor forward wrote",
        EXPERIMENT,
        by_norm,
    ),
    Row(Plateau, "plateau", "a loss that has stopped improving", ALERT, by_loss),
    Row(OverfittingGap, "overfitting_gap", "an evaluation far above training", ALERT, by_loss),
    Row(
        ThroughputCollapse,
        "throughput_collapse",
        "steps far slower than their upper range",
        ALERT,
        by_pace,
    ),
    Row(ChancePlateau, "", "preferences that stay at chance", ALERT, streams.logs),
    Row(PreferenceInversion, "", "rejected answers that win", ALERT, streams.logs),
    Row(LikelihoodCollapse, "", "chosen answers that become unlikely", ALERT, streams.logs),
    Row(RewardCollapse, "", "rewards that are all alike, or fall", ALERT, streams.logs),
    Row(KlBlowUp, "", "a divergence far above its upper range", ALERT, streams.logs),
]


def constants_of(detector: Any) -> list[str]:
    """Return the names of the tuned numbers that a detector uses, its own first."""
    text = inspect.getsource(detector)
    if "UpperRange" in text:
        text += inspect.getsource(robust.UpperRange)
    own = [n for n, v in vars(detector).items() if n.isupper() and isinstance(v, int | float)]
    shared = [n for n, v in vars(robust).items() if n.isupper() and isinstance(v, int | float)]
    return own + [name for name in shared if re.search(rf"\b{name}\b", text)]


def found_in(detector: Any, stream: list[Any]) -> list[Finding]:
    """Return what a detector finds; a level that was suspected is then taken as usual."""
    one = detector(HealingConfig())
    found = []
    for step, item in enumerate(stream):
        if isinstance(item, dict):
            finding = one.observe(step, item)
        elif isinstance(one, StateHealth):
            finding = one.observe_health(item)
        else:
            finding = one.observe(item)
        if isinstance(one, OverfittingGap) and step % EVAL_INTERVAL == EVAL_INTERVAL - 1:
            finding = one.observe_eval(step, item.loss)
        if finding is not None:
            found.append(finding)
            if finding.wants_proof and hasattr(one, "rebase"):
                one.rebase()  # as an experiment does that finds other data
    return found


def measured(row: Row, seeds: int) -> tuple[int, int, Counter[str], Counter[str]]:
    """Return streams and steps seen, and the findings and steps of each kind of stream."""
    count = steps = 0
    findings: Counter[str] = Counter()
    lengths: Counter[str] = Counter()
    for seed in range(seeds):
        for name, stream in row.healthy(seed):
            last = stream[-1]
            length = last.step + 1 if hasattr(last, "step") else len(stream)
            count, steps = count + 1, steps + length
            findings[name] += len(found_in(row.detector, stream))
            lengths[name] += length
    return count, steps, findings, lengths


def table(seeds: int) -> list[str]:
    """Return the lines of the table."""
    lines = [
        "| detector | reacts to | leads to | constants | kinds of healthy streams | with findings "
        "| most per 1,000 steps |",
        "|---|---|---|---|---:|---:|---|",
    ]
    for row in ROWS:
        _, _, findings, lengths = measured(row, seeds)
        rates = {name: 1000 * findings[name] / lengths[name] for name in lengths}
        worst = max(rates, key=lambda name: rates[name])
        most = f"{rates[worst]:.2g} ({worst})" if rates[worst] else "0"
        name = f"`{row.name}`" if row.name else f"{row.detector.__name__} (log)"
        constants = ", ".join(constants_of(row.detector)) or "-"
        with_findings = sum(rate > 0 for rate in rates.values())
        lines.append(
            f"| {name} | {row.reacts_to} | {row.leads_to} | {constants} | {len(rates)} "
            f"| {with_findings} | {most} |"
        )
    return lines


def updated(page: str, lines: list[str], seeds: int) -> str:
    """Return the page with the table in its place."""
    before, start, rest = page.partition(START)
    _, end, after = rest.partition(END)
    if not start or not end:
        raise SystemExit(f"{PAGE.name} has no place for the table of detectors")
    made = f"\nMade by `python -m benchmarks.suspicions --seeds {seeds} --write`.\n"
    return f"{before}{START}" + "\n".join(lines) + f"\n{made}{END}{after}"


def main() -> None:
    """Measure, print the table, and write it if that is wanted."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--write", action="store_true", help=f"put the table into {PAGE.name}")
    parsed = parser.parse_args()
    lines = table(parsed.seeds)
    print("\n".join(lines))
    if parsed.write:
        PAGE.write_text(updated(PAGE.read_text(), lines, parsed.seeds))


if __name__ == "__main__":
    main()
