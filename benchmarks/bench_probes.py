"""What each probe costs, in training steps: a ratio, measured in turns with the bare step.

python benchmarks/bench_probes.py [--save benchmarks/results]
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
from torch import nn

from heal.forecast.features import Features
from heal.forecast.score import shipped
from heal.probes import (
    LyapunovMeter,
    fisher_diagonal,
    noise_scale,
    optimizer_health,
    oscillation,
    sharpness,
)

WIDTH, LAYERS, BATCH, ROUNDS = 256, 4, 32, 15


def subjects():
    torch.manual_seed(0)
    layers = [m for _ in range(LAYERS) for m in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    batch = torch.randn(BATCH, WIDTH)
    meter = LyapunovMeter(model.parameters())
    losses = torch.randn(256).tolist()
    features, scorer = Features(), shipped()

    def train_step(inputs):
        return model(inputs).square().mean()

    def step():
        optimizer.zero_grad()
        train_step(batch).backward()
        optimizer.step()

    def forecast():
        scorer.logit(features.update(1.0, 1.0, 1.0, 1e-3, 1e-3, False, False, 0.1))

    step()
    return step, {
        "fisher_diagonal, 8 pieces": lambda: fisher_diagonal(model, train_step, batch, 8),
        "fisher_diagonal, per sample": lambda: fisher_diagonal(model, train_step, batch),
        "noise_scale, 8 pieces": lambda: noise_scale(model, train_step, batch, 8),
        "sharpness, 10 products": lambda: sharpness(
            model, train_step, batch, iterations=10, tolerance=0.0
        ),
        "optimizer_health": lambda: optimizer_health(optimizer),
        "LyapunovMeter.observe": meter.observe,
        "oscillation, 256 losses": lambda: oscillation(losses),
        "forecast, one step": forecast,
    }


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
            repeats = 200 if name.startswith("forecast") else 1
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
        print(f"{name:30} {row['steps']:8.3f} steps {row['cpu_us']:10.0f} us of CPU time")
    if arguments.save:
        path = Path(arguments.save) / "probes.json"
        path.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
