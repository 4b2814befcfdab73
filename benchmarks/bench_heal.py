"""What healing costs: whole-loop overhead, snapshots per second, and the time of a rollback.

python benchmarks/bench_heal.py

The loops are timed in turns, a few steps of each, so that a busy machine disturbs both alike.
"""

import argparse
import os
import statistics
import time

import torch
from torch import nn

from heal import Healer, HealingConfig
from heal.snapshots import SnapshotRing
from heal.training_state import copy_by_kind

SIZES = {"50K": (128, 3, 64), "2.5M": (640, 6, 64)}  # width, layers, batch


def network(width, layers):
    return nn.Sequential(*[m for _ in range(layers) for m in (nn.Linear(width, width), nn.GELU())])


def loop(width, layers, batch, healed):
    """Return a function that takes one step, and the number of parameters."""
    torch.manual_seed(0)
    model = network(width, layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    inputs, targets = torch.randn(batch, width), torch.randn(batch, width)
    healer = None
    if healed:
        healer = Healer(model, optimizer, config=HealingConfig(zclip_enabled=False))
        healer.exits.dismiss()

    def step():
        optimizer.zero_grad()
        loss = (model(inputs) - targets).square().mean()
        loss.backward()
        if healer is None:
            optimizer.step()
        else:
            healer.step(loss)

    return step, sum(p.numel() for p in model.parameters())


def overhead(size, rounds, steps):
    """Interleave both loops; return parameters, bare ms per step and the overhead in percent.

    A round has as many steps as there are between two snapshots, so that each pays for one.
    """
    bare, count = loop(*SIZES[size], healed=False)
    healed, _ = loop(*SIZES[size], healed=True)
    for step in (bare, healed):
        for _ in range(steps):
            step()
    seconds = {bare: [], healed: []}
    for i in range(rounds):
        for step in (bare, healed) if i % 2 else (healed, bare):
            began = time.perf_counter()
            for _ in range(steps):
                step()
            seconds[step].append(time.perf_counter() - began)
    ratios = [h / b for h, b in zip(seconds[healed], seconds[bare], strict=True)]
    per_step = statistics.median(seconds[bare]) / steps * 1e3
    return (
        count,
        per_step,
        (statistics.median(ratios) - 1) * 100,
        min(seconds[healed]) / min(seconds[bare]),
    )


def ten_million():
    model = network(1024, 10)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    healer = Healer(model, optimizer, config=HealingConfig(zclip_enabled=False, quarantine_steps=0))
    healer.exits.dismiss()
    for _ in range(4):
        optimizer.zero_grad()
        loss = model(torch.randn(4, 1024)).square().mean()
        loss.backward()
        healer.step(loss)
    return healer


def snapshots(healer, rounds):
    """Return bytes, GB/s of the copy alone and of the whole capture with hash and check."""
    tensors = healer._state.tensors()
    size = sum(t.nbytes for t in tensors.values())
    ring = SnapshotRing(1, 2, 2.0, 0)
    host = [torch.empty_like(t) for t in tensors.values()]
    copies, captures = [], []
    for i in range(rounds):
        began = time.perf_counter()
        copy_by_kind(host, list(tensors.values()), non_blocking=False)
        copies.append(time.perf_counter() - began)
        began = time.perf_counter()
        ring.capture(i, tensors, {})
        captures.append(time.perf_counter() - began)
        ring.note_clean(i)
    fastest = statistics.median(copies[2:]), statistics.median(captures[2:])
    return size, size / fastest[0] / 1e9, size / fastest[1] / 1e9


def rollback(healer, rounds):
    """Return the median milliseconds of a rollback, verified before and after."""
    healer._run.capture()
    healer._run.ring.note_clean(healer._run.step)
    step = healer.snapshots()[0]
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        healer._run.restore(step)
        times.append(time.perf_counter() - began)
    return statistics.median(times) * 1e3


GOALS = {"50K": 5.0, "2.5M": 2.0}  # percent
COPY_GOAL, ROLLBACK_GOAL = 6.0, 50.0  # GB/s of one core, milliseconds


def said(name, value, goal, unit, is_met):
    """Print one number beside its goal."""
    print(f"{name:<44} {value:>8} {unit:<5} goal {goal:<10} {'met' if is_met else 'NOT MET'}")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    before = os.getloadavg()[0]
    for size in SIZES:
        count, bare, percent, best = overhead(size, arguments.rounds, steps=50)
        name = f"overhead at {count:,} parameters"
        said(name, f"{percent:+.1f}", f"<= {GOALS[size]:g}", "%", percent <= GOALS[size])
        print(f"    bare step {bare:.2f} ms; best rounds {100 * best - 100:+.1f} %")
    healer = ten_million()
    size, copied, captured = snapshots(healer, arguments.rounds)
    name = f"snapshot of {size / 1e6:.0f} MB, copy"
    said(name, f"{copied:.1f}", f">= {COPY_GOAL:g}", "GB/s", copied >= COPY_GOAL)
    print(f"    with hash and check for NaN {captured:.1f} GB/s")
    took = rollback(healer, arguments.rounds)
    name = "rollback of 10.5M parameters with AdamW, verified"
    said(name, f"{took:.0f}", f"<= {ROLLBACK_GOAL:g}", "ms", took <= ROLLBACK_GOAL)
    load = f"{before:.1f} before, {os.getloadavg()[0]:.1f} after, {os.cpu_count()} cores"
    print(f"load {load}; {arguments.threads} thread(s), medians of {arguments.rounds} rounds")
    if max(before, os.getloadavg()[0]) > os.cpu_count():
        print("the machine was busy: ratios are rough, and times mean nothing")


if __name__ == "__main__":
    main()
