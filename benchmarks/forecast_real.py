"""The shipped forecast beside real runs: trained by a Healer, broken by ``heal.testing``.

python -m benchmarks.forecast_real [--seeds 2] [--save benchmarks/results]

Six networks that the model never saw, ten to a hundred times larger than those that it learned
from, AdamW and SGD with momentum. Every plan is refused, so that a fault runs its course to the
damage; what is judged is the forecast alone: was the run warned of before its loss had doubled?
"""

import argparse
import json
import math
from pathlib import Path

import numpy as np
import torch

from benchmarks import sequence_networks
from benchmarks.failures import families
from heal import Healer, HealingConfig
from heal.causes import Cause
from heal.lab.forecast.forecast_watch import FIRST_STEP
from heal.testing import Chaos, Fault
from tools.forecast.corpus import damaged_at
from tools.forecast.intervals import ratio_interval

STEPS = 600
LAG = 2
EARLIEST, LATEST = 150, 350  # onsets
RATES = {  # the exponents of ten of the corpus, tools/forecast/scenarios.py; depths for the swings
    "growing_lr": (-2.1, -1.2),
    "creeping_noise": (-1.7, -1.1),
    "creeping_scale": (-1.9, -1.1),
    "oscillating_lr": (-2.0, -1.4),
    "creeping_drift": (-2.2, -1.4),
}
INSTANT = ("nan_gradient", "corrupt_weight")
CORRUPTED = 30.0  # the value of a corrupted weight
NETWORKS = (*families.FAMILIES, *sequence_networks.NETWORKS)


def training(network, seed):
    """Model, optimizer, loader and train_step."""
    if network in families.FAMILIES:
        made = families.make(network, seed)
        model, optimizer, loader, train_step = (
            made.model,
            torch.optim.AdamW(made.model.parameters(), lr=3e-3),
            made.loader,
            made.train_step,
        )
    else:
        model, optimizer, loader, train_step = sequence_networks.setup(network, seed)
    if seed % 2:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    return model, optimizer, loader, train_step


def cosine(step):
    return min(1.0, (step + 1) / 40) * (0.5 + 0.5 * math.cos(math.pi * step / (1.2 * STEPS)))


def follow(network, kind, seed):
    """Train one run; return its losses, the steps of its warnings and the onset of the fault."""
    torch.set_num_threads(1)
    random = np.random.default_rng([NETWORKS.index(network), seed, len(kind)])
    model, optimizer, loader, train_step = training(network, seed)
    scheduler = None
    if kind == "healthy" and seed % 4 >= 2:
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, cosine)
    healer = Healer(model, optimizer, scheduler, HealingConfig(forecast=True))
    healer.exits.dismiss()
    warned, losses = [], []

    def refuse(diagnosis, plan):
        if diagnosis.cause is Cause.INSTABILITY_AHEAD:
            warned.append(diagnosis.step)
        return ()

    healer.on_instability(refuse)
    onset = -1 if kind == "healthy" else int(random.integers(EARLIEST, LATEST))
    faults = []
    if kind in RATES:
        size = 10.0 ** random.uniform(*RATES[kind])
        faults = [Fault(kind, at=onset, times=STEPS, size=size)]
    elif kind in INSTANT:
        faults = [Fault(kind, at=onset, size=CORRUPTED if kind == "corrupt_weight" else None)]
    broken = Chaos(healer, faults, seed).wrap(train_step)

    def watched(batch):
        loss = broken(batch)
        losses.append(float(loss.detach()))
        return loss

    healer.run(watched, loader, STEPS, progress=False)
    return np.array(losses, np.float32), warned, onset


def judged(kind, losses, warned, onset):
    """What became of one run, as plain numbers."""
    damage = damaged_at(losses, onset) if kind in RATES else -1
    end = len(losses) if onset < 0 else onset
    useful = [step for step in warned if onset <= step < damage - LAG]
    before = [step for step in warned if onset - 50 <= step < onset - LAG]
    return {
        "damage": damage,
        "warned": bool(useful),
        "lead": damage - LAG - useful[0] if useful else None,
        "warned_before": bool(before),
        "false": sum(step < end for step in warned),
        "healthy_steps": end - FIRST_STEP,
        "doubled": damage >= 0,
    }


def main():
    """Run all, print the table and save it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--save", default=None)
    arguments = parser.parse_args()
    told = {}
    for network in NETWORKS:
        for kind in ("healthy", *RATES, *INSTANT):
            seeds = 2 * arguments.seeds if kind == "healthy" else arguments.seeds
            runs = [judged(kind, *follow(network, kind, seed)) for seed in range(seeds)]
            told[f"{network} {kind}"] = runs
            doubled = [r for r in runs if r["doubled"]]
            leads = [r["lead"] for r in doubled]
            print(network, kind, "warned", leads, "false", [r["false"] for r in runs], flush=True)
    result = summary(told)
    print(json.dumps(result, indent=1))
    if arguments.save:
        path = Path(arguments.save) / "forecast_real.json"
        path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def summary(told):
    """Totals with intervals by network, and the numbers of every kind."""
    by_network = {}
    for name, runs in told.items():
        by_network.setdefault(name.split()[0], []).extend(runs)
    groups = list(by_network.values())
    hits = [sum(r["warned"] for r in runs) for runs in groups]
    failures = [sum(r["doubled"] for r in runs) for runs in groups]
    false = [1e4 * sum(r["false"] for r in runs) for runs in groups]
    steps = [sum(r["healthy_steps"] for r in runs) for runs in groups]
    kinds = {}
    for kind in RATES:
        runs = [r for name, rs in told.items() if name.endswith(f" {kind}") for r in rs]
        doubled = [r for r in runs if r["doubled"]]
        leads = [r["lead"] for r in doubled if r["warned"]]
        kinds[kind] = {
            "runs": len(runs),
            "failures": len(doubled),
            "warned": sum(r["warned"] for r in doubled),
            "median_lead": float(np.median(leads)) if leads else None,
        }
    instant = [r for n, rs in told.items() if n.split()[1] in INSTANT for r in rs]
    return {
        "networks": list(by_network),
        "runs": sum(map(len, told.values())),
        "failures": sum(failures),
        "detection": [sum(hits) / sum(failures), *ratio_interval(hits, failures)],
        "median_lead": float(
            np.median([r["lead"] for runs in groups for r in runs if r["lead"] is not None])
        ),
        "false_warnings": sum(false) / 1e4,
        "healthy_steps": sum(steps),
        "false_per_10k": [sum(false) / sum(steps), *ratio_interval(false, steps)],
        "by_kind": kinds,
        "instant_failures": len(instant),
        "instant_warned_before": sum(r["warned_before"] for r in instant),
        "by_network": {
            name: {"failures": f, "warned": h, "false": round(x / 1e4), "healthy_steps": s}
            for name, f, h, x, s in zip(by_network, failures, hits, false, steps, strict=True)
        },
    }


if __name__ == "__main__":
    main()
