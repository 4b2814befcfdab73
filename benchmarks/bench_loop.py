"""What healing costs a whole training loop: batches loaded, forward, backward, step.

python benchmarks/bench_loop.py [--rounds 60] [--save benchmarks/results]

The work is that of the table by which ARC tells its own cost: its small MLP and its large CNN,
with its batches, its optimizer and pictures of the same kind. Each loop takes turns with the bare
one, step by step, or ten by ten where steps are quick; so does that of ARC, where that is
installed, ``pip install arc-training``. A round has as many steps as lie between two snapshots.
The ratio is taken round by round, and its median is told, so that whatever comes in every round is
in it.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.photographs import SIDE, loader
from benchmarks.tables import publish
from heal import Healer, HealingConfig
from zclip.bench.load import LoadMeter

CLASSES = 10
ROUND = HealingConfig().snapshot_interval  # steps, one of them with a snapshot
WARM_ROUNDS = 2  # until all detectors know what is usual


def small_mlp():
    return nn.Sequential(
        nn.Flatten(), nn.Linear(3 * SIDE * SIDE, 16), nn.ReLU(), nn.Linear(16, CLASSES)
    )


def large_cnn():
    layers, channels = [], 3
    for width in (64, 128, 256):
        layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
        channels = width
    layers[-1] = nn.AdaptiveAvgPool2d(4)
    layers += [nn.Flatten(), nn.Linear(16 * channels, 512), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, CLASSES))


WORK = {"small MLP": (small_mlp, 5.0, 1), "large CNN": (large_cnn, 2.0, 6)}
"""What to train; how much slower healing may make it, in percent; into how many its rounds go."""

ASKED = (("small MLP", True), ("small MLP", False), ("large CNN", True))
"""What to measure, and whether batches are loaded: to the CNN that makes no difference."""

QUICK = 2e-3  # seconds: a step that takes less finds what the one before left in the caches
TURN = 10  # quick steps of one loop in a row, as when it trains alone; others take turns one by one

Step = Callable[[], None]


def loop(build: Callable[[], nn.Module], kind: str, loads: bool) -> tuple[Step, Callable[[], str]]:
    """Return a function that takes one step, and one that tells what was done to the run.

    Args:
        build: makes the model.
        kind: "bare", "healed", "healed, not clipped" or "ARC" and its version.
        loads: whether each step loads its batch; else all have one that is there.
    """
    torch.manual_seed(0)
    model, criterion, batches = build(), nn.CrossEntropyLoss(), loader()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    epoch: Callable[[Any], Iterator[Any]] = iter
    tell = str

    def finish(loss):
        optimizer.step()

    if kind.startswith("healed"):
        healer = Healer(model, optimizer, config=HealingConfig(zclip_enabled=kind == "healed"))
        healer.exits.dismiss()
        epoch, finish = healer.batches, healer.step

        def tell():
            return f"{healer.metrics()['healing/recovery_attempts']:.0f} recoveries"

    elif kind.startswith("ARC"):
        import arc

        controller = arc.Controller(model, optimizer)

        def finish(loss):
            if not controller.step(loss).should_skip:
                optimizer.step()

        def tell():
            return f"{controller.total_rollbacks} rollbacks"

    def endless():
        while True:
            yield from epoch(batches)

    drawn, there = endless(), next(iter(batches))

    def step():
        pictures, labels = next(drawn) if loads else there
        optimizer.zero_grad()
        loss = criterion(model(pictures), labels)
        loss.backward()
        finish(loss)

    return step, tell


def timed(steps: dict[str, Step], turn: int, bar: tqdm) -> dict[str, float]:
    """Take a round of each; return the seconds that each took."""
    seconds = dict.fromkeys(steps, 0.0)
    names = list(steps)
    for number in range(ROUND // turn):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            began = time.perf_counter()
            for _ in range(turn):
                steps[name]()
            seconds[name] += time.perf_counter() - began
            bar.update(turn)
    return seconds


def compare(work: str, kind: str, loads: bool, rounds: int) -> tuple[str, ...]:
    """Measure one kind of loop beside the bare one, on one work; return a row of the table."""
    build, goal, share = WORK[work]
    bare, _ = loop(build, "bare", loads)
    step, tell = loop(build, kind, loads)
    steps = {"bare": bare, kind: step}
    rounds, turn = max(rounds // share, 3), 1
    total = (WARM_ROUNDS + rounds) * ROUND * len(steps)
    with tqdm(total=total, desc=f"{work}, {kind}", leave=False) as bar:
        for _ in range(WARM_ROUNDS):
            turn = TURN if timed(steps, turn, bar)["bare"] < QUICK * ROUND else 1
        measured = [timed(steps, turn, bar) for _ in range(rounds)]
    ratios = [100 * (seconds[kind] / seconds["bare"] - 1) for seconds in measured]
    percent, quarters = statistics.median(ratios), statistics.quantiles(ratios, n=4)
    has_goal = loads and kind.startswith("healed")
    verdict = ("met" if percent <= goal else "NOT MET") if has_goal else ""
    limit = f"<= {goal:g} %" if has_goal else "-"
    spread = f"{quarters[0]:+.1f} to {quarters[2]:+.1f}"
    milliseconds = 1e3 * statistics.median(seconds["bare"] for seconds in measured) / ROUND
    count = sum(p.numel() for p in build().parameters())
    name = f"{work}, {count:,} parameters" + ("" if loads else ", batch already there")
    more = f"{milliseconds:.2f} ms a step bare; {tell()}"
    print(f"{name:<52} {kind:<20} {percent:+6.1f} % ({spread}) {limit} {verdict:<8} {more}")
    return name, kind, f"{percent:+.1f} %", spread, limit, verdict, more


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--work", choices=WORK, nargs="*", default=list(WORK))
    parser.add_argument("--save", type=Path, help="write loop.md into this folder")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    kinds = ["healed", "healed, not clipped"]
    with suppress(PackageNotFoundError):
        kinds.append(f"ARC {version('arc-training')}")
    meter, rows = LoadMeter(threads=1), []
    for work, loads in ASKED:
        if work in arguments.work:
            rows += [compare(work, kind, loads, arguments.rounds) for kind in kinds]
    load = meter.read()
    told = f"1 thread; {load.problem or f'load {load.average:.1f}'}; median and quartiles of rounds"
    head = "| | loop | over the bare one | | goal | | |", "|---|---|---:|---:|---:|---|---|"
    publish(arguments.save and arguments.save / "loop.md", head, rows, told)


if __name__ == "__main__":
    main()
