"""What each probe costs, in training steps: a ratio, measured in turns with the bare step.

python benchmarks/bench_probes.py [--save benchmarks/results]
"""

import argparse
import itertools
import json
import math
import statistics
import time
from pathlib import Path

import torch
from torch import nn

from heal import HealingConfig
from heal.guarded_step import GuardedStep
from heal.lab.forecast.forecast_watch import ForecastWatch
from heal.lab.probes import (
    Anchor,
    LyapunovMeter,
    fisher_diagonal,
    importance,
    noise_scale,
    optimizer_health,
    oscillation,
    sharpness,
)
from heal.lab.weight_anchor import WeightAnchor
from heal.record import Record

WIDTH, LAYERS, BATCH, ROUNDS = 256, 4, 32, 15

REPEATS = {"forecast, one step": 200, "LyapunovMeter.observe": 10, "AnchorWeights, one step": 10}
"""How often in a row what takes microseconds is called; all else once."""


def subjects():
    torch.manual_seed(0)
    layers = [m for _ in range(LAYERS) for m in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    batch = torch.randn(BATCH, WIDTH)
    meter = LyapunovMeter(model.parameters())
    losses = torch.randn(256).tolist()

    def train_step(inputs):
        return model(inputs).square().mean()

    def step():
        optimizer.zero_grad()
        train_step(batch).backward()
        optimizer.step()

    step()
    fisher = fisher_diagonal(model, train_step, batch)
    anchor = Anchor(model, fisher, strength=1.0)
    guarded = GuardedStep([optimizer], HealingConfig(), model.named_parameters())
    held = WeightAnchor(guarded.optimizers, guarded.ranks)
    held.hold(1.0, steps=1)
    return step, {
        "fisher_diagonal, 8 pieces": lambda: fisher_diagonal(model, train_step, batch, 8),
        "fisher_diagonal, per sample": lambda: fisher_diagonal(model, train_step, batch),
        "importance": lambda: importance(model, fisher),
        "noise_scale, 8 pieces": lambda: noise_scale(model, train_step, batch, 8),
        "sharpness, 10 products": lambda: sharpness(
            model, train_step, batch, iterations=10, tolerance=0.0
        ),
        "optimizer_health": lambda: optimizer_health(optimizer),
        "LyapunovMeter.observe": meter.observe,
        "oscillation, 256 losses": lambda: oscillation(losses),
        "AnchoredRecovery, at a rollback": lambda: Anchor(
            model, fisher_diagonal(model, train_step, batch), strength=1.0
        ),
        "Anchor, one step": lambda: anchor.penalty().backward(),
        "AnchorWeights, at a rollback": lambda: held.hold(1.0, steps=1),
        "AnchorWeights, one step": lambda: guarded.optimizers[0].pull.add_to_gradients(None),
        "forecast, one step": forecast_step(),
    }


def forecast_step():
    """What a healer calls for each record, on the noisy stream of a healthy run."""
    watch = ForecastWatch()
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(5000, 3, generator=generator).tolist()
    records = itertools.cycle(
        Record(
            step=at,
            loss=0.3 + 2.0 * math.exp(-at / 1000) + 0.05 * a,
            norm=math.exp(0.3 * b),
            lr=1e-3,
            scheduled_lr=1e-3,
            seconds=0.1 * math.exp(0.05 * c),
        )
        for at, (a, b, c) in enumerate(noise)
    )
    for _ in range(100):  # the first steps are not scored
        watch.observe(next(records))
    return lambda: watch.observe(next(records))


def measure(rounds):
    """Median over rounds of probe time over step time, and the median microseconds of CPU time."""
    step, probes = subjects()
    ratios = {name: [] for name in probes}
    costs = {name: [] for name in probes}
    for _ in range(rounds):
        began = time.process_time()
        for _ in range(5):
            step()
        bare = (time.process_time() - began) / 5
        for name, probe in probes.items():
            repeats = REPEATS.get(name, 1)
            began = time.process_time()
            for _ in range(repeats):
                probe()
            cost = (time.process_time() - began) / repeats
            ratios[name].append(cost / bare)
            costs[name].append(cost * 1e6)
    return {
        name: {"steps": statistics.median(ratios[name]), "cpu_us": statistics.median(costs[name])}
        for name in probes
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--save", help="folder for probes.json")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    told = measure(arguments.rounds)
    for name, row in told.items():
        print(f"{name:32} {row['steps']:8.3f} steps {row['cpu_us']:10.0f} us of CPU time")
    if arguments.save:
        path = Path(arguments.save) / "probes.json"
        path.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
