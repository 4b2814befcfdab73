"""A whole optimizer step: bare, with torch's clipping, with ours, with ours and healing.

pytest benchmarks/bench_step.py --benchmark-quiet
python benchmarks/bench_step.py [--quick] [--save benchmarks/results]

Run as a script, contenders take turns, so that a busy moment hits all alike. What healing costs in
a loop with forward and backward, and what a snapshot costs, is in bench_heal.py.
"""

import argparse
import json
from pathlib import Path

import torch
from torch import nn

from heal import Healer, HealingConfig
from zclip.bench import shapes, stepping
from zclip.bench.gradients import Gradients
from zclip.bench.load import LoadMeter
from zclip.bench.measure import interleaved
from zclip.bench.results import write_whole

OP = "step"
SHAPES = ("resnet-50",)
DTYPES = ("float32",)
HEALED = "zclip + heal"


def work(gradients):
    """The contenders of ``zclip-bench --op step``, and one more that zclip cannot know of."""
    made = stepping.step(gradients, [], [])
    model = nn.ParameterList(gradients.params)
    optimizer = torch.optim.AdamW(model.parameters(), lr=stepping.SMALL, fused=True)
    # No snapshot falls into the rounds: it is paid once in snapshot_interval steps.
    healer = Healer(model, optimizer, config=HealingConfig(snapshot_interval=10**6))
    healer.exits.dismiss()
    loss = torch.ones((), device=gradients.device)
    made.contenders[HEALED] = lambda: healer.step(loss) and None
    return made


def test_step(contend, case, contender):
    contend()


def measured(name, rounds, seconds):
    made = work(Gradients(shapes.named(name), torch.float32))
    for contender in made.contenders:
        error = made.check(contender)
        if made.is_wrong(contender, error):
            raise AssertionError(f"{name}, {contender}: off by {error}")
    meter = LoadMeter(torch.get_num_threads())
    timings = interleaved(made.contenders, rounds, seconds)
    load = meter.read()
    return {
        "shapes": name,
        "milliseconds": {n: t.median_seconds * 1e3 for n, t in timings.items()},
        "spread": {n: t.spread for n, t in timings.items()},
        "load": load.average,
        "noise": load.problem,
    }


def as_markdown(results):
    names = list(results[0]["milliseconds"])
    lines = [
        f"Milliseconds of one fused AdamW step, medians of one interleaved run, "
        f"{torch.get_num_threads()} threads. Made by `python benchmarks/bench_step.py`.",
        "",
        f"| shapes | {' | '.join(names)} |",
        f"|---|{'---:|' * len(names)}",
    ]
    for result in results:
        times = " | ".join(f"{result['milliseconds'][n]:.2f}" for n in names)
        lines.append(f"| {result['shapes']} | {times} |")
    noise = next((r["noise"] for r in results if r["noise"]), None)
    return "\n".join([*lines, "", f"No result: {noise}."] if noise else lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a few rounds")
    parser.add_argument("--shapes", nargs="+", default=["resnet-50", "vit-b", "2000-small"])
    parser.add_argument("--save", type=Path, help="write step.json and step.md into this folder")
    options = parser.parse_args()
    rounds, seconds = (5, 2.0) if options.quick else (40, 20.0)
    results = [measured(name, rounds, seconds) for name in options.shapes]
    print(as_markdown(results))
    if options.save:
        write_whole(options.save / "step.json", json.dumps(results, indent=1) + "\n")
        write_whole(options.save / "step.md", as_markdown(results))


if __name__ == "__main__":
    main()
