"""What healing costs a whole training loop: batches loaded, forward, backward, step.

python benchmarks/bench_loop.py [--rounds 60] [--other CHECKOUT] [--save benchmarks/results]

The work is that of the table by which ARC tells its own cost: its small MLP and its large CNN,
with its batches, its optimizer and pictures of the same kind; and the MLP with a fused AdamW, that
of torch and ours. Each loop takes turns with the bare one, step by step, or ten by ten where steps
are quick; so does that of ARC, where that is installed, ``pip install arc-training``. A round has
as many steps as lie between two snapshots. The ratio is taken round by round, and its median is
told, so that whatever comes in every round is in it.

All loops of one work take turns with their rounds. ``--other`` adds an older version: a checkout
whose extension is built, such as ``git worktree add ../older COMMIT && cd ../older && python
setup.py build_ext --inplace``. It runs in a process of its own, beside a bare loop of its own.
"""

import argparse
import json
import os
import statistics
import subprocess
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

import zclip
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

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.02, momentum=0.9),
    "fused AdamW": lambda params: torch.optim.AdamW(params, lr=1e-3, fused=True),
}

ASKED = (
    ("small MLP", True, "SGD"),
    ("small MLP", False, "SGD"),
    ("small MLP", False, "fused AdamW"),
    ("large CNN", True, "SGD"),
)
"""What to measure, whether batches are loaded (to the CNN that makes no difference), and by what
the bare loop is optimized."""

OURS = "healed, zclip.optim"
"""A healed loop with the optimizer of ours in place of torch's."""

QUICK = 2e-3  # seconds: a step that takes less finds what the one before left in the caches
TURN = 10  # quick steps of one loop in a row, as when it trains alone; others take turns one by one

Step = Callable[[], None]

CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "CPU": time.process_time}


def loop(
    build: Callable[[], nn.Module], kind: str, loads: bool, optimized_by: str
) -> tuple[Step, Callable[[], str]]:
    """Return a function that takes one step, and one that tells what was done to the run.

    Args:
        build: makes the model.
        kind: "bare", "healed", "healed, not clipped", OURS or "ARC" and its version.
        loads: whether each step loads its batch; else all have one that is there.
        optimized_by: one of OPTIMIZERS.
    """
    torch.manual_seed(0)
    model, criterion, batches = build(), nn.CrossEntropyLoss(), loader()
    if kind == OURS:
        optimizer: Any = zclip.optim.AdamW(model.parameters(), lr=1e-3)
    else:
        optimizer = OPTIMIZERS[optimized_by](model.parameters())
    epoch: Callable[[Any], Iterator[Any]] = iter
    tell = str

    def finish(loss):
        optimizer.step()

    if kind.startswith("healed"):
        clips = "not clipped" not in kind
        healer = Healer(model, optimizer, config=HealingConfig(zclip_enabled=clips))
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


class Pair:
    """One kind of loop beside a bare one, on one work.

    Args:
        asked: one of ASKED.
        kind: of the loop.
        clock: seconds.
    """

    def __init__(self, asked: tuple[str, bool, str], kind: str, clock: Callable[[], float]) -> None:
        work, loads, optimized_by = asked
        build, self.kind, self._clock, self._turn = WORK[work][0], kind, clock, 1
        bare, _ = loop(build, "bare", loads, optimized_by)
        step, self.tell = loop(build, kind, loads, optimized_by)
        self._steps = bare, step
        for _ in range(WARM_ROUNDS):
            self._turn = TURN if self.round()[0] < QUICK * ROUND else 1

    def round(self) -> tuple[float, float]:
        """Take a round of both; return the seconds of the bare one and of the other."""
        seconds = [0.0, 0.0]
        for number in range(ROUND // self._turn):
            for which in (0, 1) if number % 2 else (1, 0):
                began = self._clock()
                for _ in range(self._turn):
                    self._steps[which]()
                seconds[which] += self._clock() - began
        return seconds[0], seconds[1]

    def close(self) -> None:
        """Nothing is left behind."""


class OlderPair:
    """The same with heal and zclip of another checkout, in another process."""

    def __init__(self, checkout: Path, *job: Any) -> None:
        here = Path(__file__).resolve().parents[1]
        self._process = subprocess.Popen(
            [sys.executable, "-c", _OLDER, str(checkout.resolve()), str(here), json.dumps(job)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": ""},
            text=True,
        )
        self.kind = f"healed, version {self._answer()}"

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"the older version ended with code {self._process.wait()}")
        return json.loads(line)

    def _ask(self, word: str) -> Any:
        assert self._process.stdin is not None
        print(word, file=self._process.stdin, flush=True)
        return self._answer()

    def round(self) -> tuple[float, float]:
        """As that of Pair."""
        return tuple(self._ask("round"))

    def tell(self) -> str:
        """What was done to the run."""
        return self._ask("tell")

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


_OLDER = """
import json, sys
older, here, job = sys.argv[1:]
sys.path.insert(0, older)
import zclip, heal
sys.path[0] = here  # the benchmarks are ours
from benchmarks import bench_loop
assert heal.__file__.startswith(older), heal.__file__
bench_loop.serve(*json.loads(job))
"""


def serve(asked: tuple[str, bool, str], kind: str, clock: str, threads: int) -> None:
    """Take a round for each line that comes, and write down what it took."""
    torch.set_num_threads(threads)
    pair = Pair(asked, kind, CLOCKS[clock])
    print(json.dumps(zclip.__version__), flush=True)
    for line in sys.stdin:
        print(json.dumps(pair.round() if line.strip() == "round" else pair.tell()), flush=True)


def compare(
    asked: tuple[str, bool, str], pairs: list[Pair | OlderPair], rounds: int
) -> list[tuple[str, ...]]:
    """Measure loops beside bare ones, in turns; return a row of the table for each."""
    (work, loads, optimized_by), rows = asked, []
    build, goal, share = WORK[work]
    measured: list[list[tuple[float, float]]] = [[] for _ in pairs]
    for number in tqdm(range(max(rounds // share, 3)), desc=work, leave=False):
        order = list(zip(pairs, measured, strict=True))
        for pair, seconds in order if number % 2 else order[::-1]:
            seconds.append(pair.round())
    count = sum(p.numel() for p in build().parameters())
    name = f"{work}, {count:,} parameters" + ("" if loads else ", batch already there")
    name += "" if optimized_by == "SGD" else f", {optimized_by}"
    for pair, seconds in zip(pairs, measured, strict=True):
        ratios = [100 * (other / bare - 1) for bare, other in seconds]
        percent, quarters = statistics.median(ratios), statistics.quantiles(ratios, n=4)
        has_goal = loads and pair.kind in ("healed", "healed, not clipped")
        verdict = ("met" if percent <= goal else "NOT MET") if has_goal else ""
        limit = f"<= {goal:g} %" if has_goal else "-"
        spread = f"{quarters[0]:+.1f} to {quarters[2]:+.1f}"
        milliseconds = 1e3 * statistics.median(bare for bare, _ in seconds) / ROUND
        more = f"{milliseconds:.2f} ms a step bare; {pair.tell()}"
        what = f"{name:<64} {pair.kind:<24}"
        print(f"{what} {percent:+6.1f} % ({spread}) {limit} {verdict:<8} {more}")
        rows.append((name, pair.kind, f"{percent:+.1f} %", spread, limit, verdict, more))
        pair.close()
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--work", choices=WORK, nargs="*", default=list(WORK))
    parser.add_argument("--other", type=Path, help="the checkout of an older version, built")
    parser.add_argument("--cpu-time", action="store_true", help="for a machine that others use")
    parser.add_argument("--save", type=Path, help="write loop.md into this folder")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    clock = "CPU" if arguments.cpu_time else "wall"
    kinds = ["healed", "healed, not clipped"]
    with suppress(PackageNotFoundError):
        kinds.append(f"ARC {version('arc-training')}")
    meter, rows = LoadMeter(threads=1), []
    for asked in ASKED:
        if asked[0] not in arguments.work:
            continue
        ours = [OURS] if asked[2] == "fused AdamW" else []
        pairs: list[Pair | OlderPair] = [Pair(asked, kind, CLOCKS[clock]) for kind in kinds + ours]
        if arguments.other is not None:
            pairs.insert(1, OlderPair(arguments.other, asked, "healed", clock, 1))
        rows += compare(asked, pairs, arguments.rounds)
    load = meter.read()
    told = f"1 thread, {clock} time; {load.problem or f'load {load.average:.1f}'}; "
    told += "median and quartiles of rounds"
    head = "| | loop | over the bare one | | goal | | |", "|---|---|---:|---:|---:|---|---|"
    publish(arguments.save and arguments.save / "loop.md", head, rows, told)


if __name__ == "__main__":
    main()
