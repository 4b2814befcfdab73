"""What healing costs a step, and snapshots per second, and the time of a rollback.

python benchmarks/bench_heal.py [--save benchmarks/results]

Steps alone, on one batch that is there: that is harder than what our goals are for, which are
whole loops, see ``bench_loop.py``. The loops are timed in turns, so that a busy machine disturbs
both alike. Healing clips by ZClip where the loop beside it calls ``clip_grad_norm_``, and not at
all where that does not. What ``clip_grad_norm_`` itself adds to a loop is told beside it: how
little a step does.
"""

import argparse
import math
import os
import statistics
import sys
import time
from collections import Counter, defaultdict
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.tables import publish
from heal import Healer, HealingConfig
from heal.snapshots import SnapshotRing
from heal.training_state import copy_by_kind


def mlp(width, layers, rows):
    """Next to no work per step: the hardest case for whoever adds to it."""
    blocks = [m for _ in range(layers) for m in (nn.Linear(width, width), nn.GELU())]
    return nn.Sequential(*blocks), torch.randn(rows, width)


def cnn(width, images):
    """Convolutions over images of 28 x 28."""
    layers = [nn.Conv2d(1, width, 3, padding=1), nn.ReLU()]
    layers += [nn.Conv2d(width, width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    layers += [nn.Conv2d(width, 2 * width, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(4)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(32 * width, 10)), torch.randn(
        images, 1, 28, 28
    )


def gpt(width, layers, texts, tokens):
    """Transformer blocks over embedded tokens."""
    block = nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True, norm_first=True)
    model = nn.TransformerEncoder(block, layers, enable_nested_tensor=False)
    return model, torch.randn(texts, tokens, width)


WORK = {
    "GPT, 8 texts of 64 tokens": (lambda: gpt(32, 4, 8, 64), 5.0),
    "CNN, 64 images": (lambda: cnn(32, 64), 5.0),
    "MLP, 512 rows": (lambda: mlp(128, 3, 512), 5.0),
    "MLP, 64 rows": (lambda: mlp(128, 3, 64), 5.0),
    "GPT, 8 texts of 128 tokens": (lambda: gpt(224, 4, 8, 128), 2.0),
    "MLP, 512 rows ": (lambda: mlp(640, 6, 512), 2.0),
    "MLP, 64 rows ": (lambda: mlp(640, 6, 64), 2.0),
}
"""What to train, and how much slower healing may make a whole loop, in percent."""


WARM, MOST_SECONDS = 20, 20.0  # steps that are not counted; for one kind of work
QUICK = 5e-3  # seconds: what takes longer depends little on what the caches hold
TRIMMED = 0.05  # share of the differences left out at either end
BLOCK, SETTLING = 12, 4  # quick steps in a row of one loop; of these not counted


def loop(build, clips, heals, measures=False):
    """Return a function that takes one step, one that tells of what kind it was, and the size."""
    torch.manual_seed(0)
    model, inputs = build()
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=True)
    healer = None
    if heals:
        healer = Healer(model, optimizer, config=HealingConfig(zclip_enabled=clips))
        healer.exits.dismiss()

    def step():
        optimizer.zero_grad()
        loss = model(inputs).square().mean()
        loss.backward()
        if healer is not None:
            healer.step(loss)
            return
        if measures:
            torch.ops.zclip.grad_stats.default([p.grad for p in parameters])
        if clips:
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()

    def kind():
        """What healing did in the last step besides judging it."""
        if healer is None:
            return "bare"
        done = healer.last_step + 1
        if healer.training.ring.newest_step() == done:
            return "snapshot"
        return "polled" if healer.monitor.polled_at == done else "usual"

    return step, kind, sum(p.numel() for p in parameters)


def overhead(build, clips, heals=True, measures=False):
    """Take turns; return parameters, bare ms per step, and ms and percent on top.

    Beside the bare loop stands one that heals or, if not, one that only measures the gradients by
    one call of one operator, or one that only clips.

    A turn of quick steps is a block of them, so that each loop finds its own code and data in the
    caches, as it does when it runs alone; its first steps are not counted. Slow steps take turns
    one by one, so that the machine is equally fast for both. Healing does more in some steps than
    in others, so that there is a mean difference for each kind of step (without the largest and the
    smallest, or a busy moment would matter), and each kind counts by how often it comes.
    """
    bare, _, count = loop(build, clips, heals=False)
    others = clips if heals or measures else True
    healed, kind, _ = loop(build, others, heals, measures)
    seconds = {bare: [], healed: []}
    kinds = []
    block, settling = 1, 0
    end = time.perf_counter() + MOST_SECONDS
    while time.perf_counter() < end or len(seconds[bare]) < FEWEST:
        if len(seconds[bare]) == WARM and statistics.median(seconds[bare]) < QUICK:
            block, settling = BLOCK, SETTLING
        turn = len(seconds[bare]) // block
        for step in (bare, healed) if turn % 2 else (healed, bare):
            for _ in range(block):
                began = time.perf_counter()
                step()
                seconds[step].append(time.perf_counter() - began)
                if step is healed:
                    kinds.append(kind())
    by_kind = defaultdict(list)
    for i, pair in enumerate(zip(seconds[healed], seconds[bare], strict=True)):
        if i >= WARM and (i - WARM) % block >= settling:
            by_kind[kinds[i]].append(pair[0] - pair[1])
    counted = kinds[CYCLE : len(kinds) - len(kinds) % CYCLE]  # the first steps are all heard
    shares = Counter(counted)
    added = sum(trimmed_mean(by_kind[kind]) * n / len(counted) for kind, n in shares.items())
    per_step = trimmed_mean(seconds[bare][WARM:])
    return count, per_step * 1e3, added * 1e3, 100 * added / per_step


CYCLE = math.lcm(HealingConfig().snapshot_interval, HealingConfig().check_interval)
FEWEST = 2 * CYCLE  # steps to measure


def trimmed_mean(values):
    """The mean without the largest and the smallest."""
    cut = int(TRIMMED * len(values))
    return statistics.fmean(sorted(values)[cut : len(values) - cut])


def ten_million():
    model, _ = mlp(1024, 10, 1)
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
    tensors = healer.state.tensors()
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
    healer.training.capture()
    healer.training.ring.note_clean(healer.training.step)
    step = healer.snapshots()[0]
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        healer.training.restore(step)
        times.append(time.perf_counter() - began)
    return statistics.median(times) * 1e3


OF_LOOPS = ("within", "above")  # what whole loops are allowed
COPY_GOAL, ROLLBACK_GOAL = 6.0, 50.0  # GB/s of one core, milliseconds


def said(rows, name, value, goal, is_met, more, words=("met", "NOT MET")):
    """Print one number beside its goal, and keep it for the table."""
    verdict = "" if is_met is None else words[0] if is_met else words[1]
    rows.append((name, value, goal, verdict, more))
    print(f"{name:<90} {value:>12}  goal {goal:<11} {rows[-1][3]:<8} {more}", flush=True)


def measure(rounds):
    """Measure everything; return the rows of the table."""
    rows = []
    for name, (build, goal) in WORK.items():
        rival = overhead(build, clips=False, heals=False)
        count, clipping = rival[0], f"overhead of clip_grad_norm_ itself, {name.strip()}"
        more = f"{rival[1]:.2f} ms a step, and {rival[2]:.2f} on top"
        told = f"{clipping}, {count:,} parameters"
        said(rows, told, f"{rival[3]:+.1f} %", "-", None, more)
        for clips in (True, False):
            count, bare, added, percent = overhead(build, clips)
            beside = "a loop that clips" if clips else "a loop that does not"
            told = f"overhead, {name.strip()}, {count:,} parameters, beside {beside}"
            more = f"{bare:.2f} ms a step, and {added:.2f} on top"
            is_within = percent <= goal
            said(rows, told, f"{percent:+.1f} %", f"<= {goal:g} %", is_within, more, OF_LOOPS)
    healer = ten_million()
    size, copied, captured = snapshots(healer, rounds)
    name, goal = f"snapshot of {size / 1e6:.0f} MB", f">= {COPY_GOAL:g} GB/s"
    more = f"a copy alone {copied:.1f} GB/s"
    said(rows, name, f"{captured:.1f} GB/s", goal, captured >= COPY_GOAL, more)
    took = rollback(healer, rounds)
    name, goal = "rollback of 10.5M parameters with AdamW", f"<= {ROLLBACK_GOAL:g} ms"
    said(rows, name, f"{took:.0f} ms", goal, took <= ROLLBACK_GOAL, "verified before")
    return rows


def floors():
    """Print what the least costs that can be done: to measure gradients, and to heed nothing."""
    for name, (build, goal) in WORK.items():
        count, bare, added, percent = overhead(build, clips=False, heals=False, measures=True)
        told = f"one read of the gradients, {name.strip()}, {count:,} parameters"
        more = f"{bare:.2f} ms a step, and {added:.3f} on top"
        said([], told, f"{percent:+.1f} %", f"<= {goal:g} %", percent <= goal, more, OF_LOOPS)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--save", type=Path, help="write heal.md into this folder")
    parser.add_argument("--floor", action="store_true", help="only what measuring costs, unsaved")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.floor:
        return floors()
    before = os.getloadavg()[0]
    rows = measure(arguments.rounds)
    after = os.getloadavg()[0]
    load = f"{arguments.threads} thread(s); load {before:.1f} before, {after:.1f} after"
    if max(before, after) > os.cpu_count():
        load += ". The machine was busy: ratios are rough, and times mean nothing"
    head = "| | measured | goal | | |", "|---|---:|---:|---|---|"
    publish(arguments.save and arguments.save / "heal.md", head, rows, load)


if __name__ == "__main__":
    main()
