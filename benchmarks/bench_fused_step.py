"""A fused step of ours beside torch's clipping and its own fused optimizer.

python benchmarks/bench_fused_step.py [--quick] [--rounds 15] [--threads 2] [--cpu-time]
                                      [--only MLP] [--save benchmarks/results]

--cpu-time counts the time of this process, not that of the wall: for a machine with other work on
it, together with --threads 1 (threads that wait for others count too).
Contenders take turns, so that a busy moment hits all alike; the table has medians and ratios to
the first. "bound" is the time of a pass that reads and writes as many bytes as a float32 AdamW step
must: 32 per element. "healed" is ``healer.step`` beside bare clipping and stepping: as many steps
as lie between two snapshots, with records, checks and the snapshot. --save measures twice, with two
threads by the wall and with one by CPU time, and writes fused_step.md, which docs/optimizers.md
shows. The first is left out on a busy machine, where threads that wait for a core measure nothing.
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from torch.nn import Parameter

sys.path.insert(0, str(Path(__file__).parents[1]))

import zclip
from heal import Healer, HealingConfig
from zclip.optim import SGD, AdamW, Lion

HUGE = 1e9  # a limit that nothing reaches
Run = Callable[[], object]

SHAPES = {
    "98 M in 150 tensors": [(808, 808)] * 150,
    "20 M in 30 tensors": [(808, 808)] * 30,
    "2,000 tensors of 64": [(64,)] * 2000,
    "10,000 tensors of 1,024": [(1024,)] * 10000,
    "50 K MLP": [(64, 256), (256,), (256, 128), (128,), (128, 10), (10,)],
}


def parameters(shapes, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    params = [Parameter((torch.randn(s, generator=generator) * 0.02).to(dtype)) for s in shapes]
    for p in params:
        p.grad = (torch.randn(p.shape, generator=generator) * 1e-3).to(dtype)
    return params


def torch_step(shapes, max_norm, make, dtype=torch.float32) -> Run:
    params = parameters(shapes, dtype)
    optimizer = make(params)

    def run():
        torch.nn.utils.clip_grad_norm_(params, max_norm)
        optimizer.step()

    return run


def our_step(shapes, max_norm, make, dtype=torch.float32, size=1.0, **more) -> Run:
    params = parameters(shapes, dtype)
    for p in params:
        p.grad.mul_(size)
    return make(params, clipper=zclip.GlobalNorm(max_norm), **more).step


def healed_step(make, is_healed=True) -> Run:
    """Steps of a 50 K MLP, healed or only clipped."""
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 10))
    )
    optimizer = make(model.parameters())
    config = HealingConfig()
    healer = Healer(model, optimizer, config=config) if is_healed else None
    losses = (1.0 + 0.1 * torch.rand(config.snapshot_interval)).unbind()
    for p in model.parameters():
        p.grad = torch.randn_like(p) * 1e-3

    def run():
        for loss in losses:
            if healer is not None:
                healer.step(loss)
            else:
                torch.nn.utils.clip_grad_norm_(model.parameters(), HUGE)
                optimizer.step()

    return run


def lion_in_torch(params):
    """The plain re-statement, over lists of tensors."""
    moments = [torch.zeros_like(p) for p in params]

    class Plain:
        @staticmethod
        @torch.no_grad()
        def step():
            grads = [p.grad for p in params]
            signs = torch._foreach_lerp(moments, grads, 0.1)
            torch._foreach_sign_(signs)
            torch._foreach_mul_(params, 1 - 1e-5 * 0.01)
            torch._foreach_add_(params, signs, alpha=-1e-5)
            torch._foreach_lerp_(moments, grads, 0.01)

    return Plain


def bound(shapes) -> Run:
    """Read 16 bytes and write 12 for every element, and read 4 more: one stream each."""
    count = sum(torch.Size(s).numel() for s in shapes)
    p, g, m, v = (torch.zeros(count) for _ in range(4))

    def run():
        g.sum()
        p.add_(g)
        m.add_(1.0)
        v.add_(1.0)

    return run


def work(quick: bool) -> dict[str, dict[str, Run]]:
    def fused(params):
        return torch.optim.AdamW(params, lr=1e-5, fused=True)

    def ours(params, **more):
        return AdamW(params, lr=1e-5, **more)

    def adamw(shapes, limit=HUGE, dtype=torch.float32):
        return {
            "torch": torch_step(shapes, limit, fused, dtype),
            "zclip": our_step(shapes, limit, ours, dtype),
            "zclip, no telemetry": our_step(shapes, limit, ours, dtype, telemetry=False),
        }

    size = "20 M" if quick else "98 M"
    large = SHAPES["20 M in 30 tensors" if quick else "98 M in 150 tensors"]
    middle = SHAPES["20 M in 30 tensors"]
    tables = {
        f"AdamW, {size}": lambda: {**adamw(large), "bound": bound(large)},
        f"AdamW, {size}, clipped": lambda: adamw(large, 1e-3),
        "AdamW, 20 M bfloat16": lambda: adamw(middle, dtype=torch.bfloat16),
        "SGD with momentum, 20 M": lambda: {
            "torch": torch_step(
                middle, HUGE, lambda p: torch.optim.SGD(p, 1e-5, momentum=0.9, fused=True)
            ),
            "zclip": our_step(middle, HUGE, lambda p, **k: SGD(p, 1e-5, momentum=0.9, **k)),
        },
        "Lion, 20 M, beside foreach operators": lambda: {
            "torch": torch_step(middle, HUGE, lion_in_torch),
            "zclip": our_step(middle, HUGE, lambda p, **k: Lion(p, 1e-5, weight_decay=0.01, **k)),
        },
    }
    tables["SGD, gradients of another size"] = lambda: {
        f"{1e-3 * size:g}": our_step(middle, HUGE, lambda p, **k: SGD(p, 1e-5, **k), size=size)
        for size in (1.0, 0.0, 1e-22, 1e-39)
    }
    for name in ("2,000 tensors of 64", "10,000 tensors of 1,024", "50 K MLP"):
        tables[f"AdamW, {name}"] = lambda name=name: adamw(SHAPES[name])
    tables["AdamW, 50 K MLP, healed"] = lambda: {
        "torch": healed_step(fused, is_healed=False),
        "heal, torch": healed_step(fused),
        "heal, zclip": healed_step(ours),
    }
    return tables


def measure(
    contenders: dict[str, Run], rounds: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, float]:
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for run in contenders.values():
        run()
        run()
    for _ in range(rounds):
        for name, run in contenders.items():
            start = clock()
            run()
            times[name].append(clock() - start)
    return {name: statistics.median(found) for name, found in times.items()}


def page_of(found: dict[str, dict[str, float]]) -> list[str]:
    """Return the part of the page about one measurement: a table, and what does not fit there."""
    lines = [
        "| step | torch, ms | zclip, ms | torch / zclip | zclip without telemetry, ms | "
        "telemetry adds |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    sentences = []
    for name, medians in found.items():
        if "torch" not in medians:
            slowest = max(medians.values()) / next(iter(medians.values()))
            sizes = ", ".join(medians)
            sentences.append(f"{name} ({sizes}): the slowest takes {slowest:.2f} times the first.")
            continue
        theirs, ours = medians["torch"], medians.get("zclip", medians.get("heal, zclip"))
        cells = [name, f"{theirs * 1e3:.3f}", f"{ours * 1e3:.3f}", f"{theirs / ours:.2f}"]
        bare = medians.get("zclip, no telemetry")
        cells += ["", ""] if bare is None else [f"{bare * 1e3:.3f}", f"{ours / bare - 1:+.0%}"]
        lines.append("| " + " | ".join(cells) + " |")
        if "bound" in medians:
            share = medians["bound"] / ours
            sentences.append(
                f"{name}: a pass that moves 32 bytes per element takes "
                f"{medians['bound'] * 1e3:.3f} ms, {share:.0%} of ours."
            )
        if "heal, torch" in medians:
            milliseconds = medians["heal, torch"] * 1e3
            sentences.append(f"{name}: {milliseconds:.3f} ms with torch's fused AdamW inside.")
    return [*lines, "", *sentences]


def measured(threads: int, cpu_time: bool, arguments: argparse.Namespace) -> list[str]:
    """Measure all rows with one setting; return its part of the page."""
    clock = time.process_time if cpu_time else time.perf_counter
    torch.set_num_threads(threads)
    clock_name = "CPU time" if cpu_time else "wall time"
    head = (
        f"{threads} thread{'s' if threads > 1 else ''}, {clock_name}, load average "
        f"{os.getloadavg()[0]:.0f} at the start, medians of {arguments.rounds} interleaved rounds:"
    )
    print(f"{head}\n\n| step | contender | median, ms | first / contender |\n|---|---|---:|---:|")
    found = {}
    for name, make in work(arguments.quick).items():
        if arguments.only not in name:
            continue
        medians = found[name] = measure(make(), arguments.rounds, clock)
        first = next(iter(medians.values()))
        for contender, seconds in medians.items():
            ratio = first / seconds
            print(f"| {name} | {contender} | {seconds * 1e3:.3f} | {ratio:.2f} |", flush=True)
    return [head, "", *page_of(found), ""]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cpu-time", action="store_true")
    parser.add_argument("--only", default="", help="rows whose name has this in it")
    parser.add_argument("--save", type=Path)
    arguments = parser.parse_args()
    if not arguments.save:
        measured(arguments.threads, arguments.cpu_time, arguments)
        return
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if load > cores:
        parts = [f"Wall time was not measured: load average {load:.0f} on {cores} cores.", ""]
    else:
        parts = measured(2, False, arguments)
    parts += measured(1, True, arguments)
    (arguments.save / "fused_step.md").write_text("\n".join(parts))


if __name__ == "__main__":
    main()
