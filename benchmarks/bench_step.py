"""What a whole step costs: adaptive clippers beside their published form, and clip plus AdamW.

python benchmarks/bench_step.py [--quick] [--save benchmarks/results]

Contenders take turns in one run, so that a busy moment hits all alike; the numbers to look at are
the ratios. Every norm is checked against float64.
"""

import argparse
import json
from pathlib import Path

import torch
import upstream
from torch import nn

import zclip
from zclip.bench.measure import interleaved, load_average
from zclip.bench.shapes import MODELS

LARGE, SMALL = "98M in 150 tensors", "2,000 tensors of 64"
NO_LIMIT = 1e30


def make_model(shapes):
    generator = torch.Generator().manual_seed(0)
    model = nn.ParameterList(nn.Parameter(torch.empty(shape).normal_()) for shape in shapes)
    for param in model.parameters():
        param.grad = torch.randn(param.shape, generator=generator) * 1e-4
    return model


def zclip_case(model):
    ours = zclip.ZClip(max_grad_norm=None, warmup_steps=1)
    theirs = upstream.ZClip(max_grad_norm=None, warmup_steps=1)
    return {"zclip": lambda: ours.step(model), "upstream": lambda: theirs.step(model)}


def adagc_case(model):
    ours = zclip.AdaGC(lambda_abs=NO_LIMIT, warmup_steps=1)
    theirs = upstream.AdaGC(lambda_abs=NO_LIMIT, warmup_steps=1)
    return {"zclip": lambda: ours.step(model), "upstream": lambda: theirs.step(model)}


def adamw_case(model):
    inner = torch.optim.AdamW(model.parameters(), fused=True)
    clipped = zclip.ClippedOptimizer(inner, zclip.GlobalNorm(NO_LIMIT))
    adaptive = zclip.ClippedOptimizer(inner, zclip.ZClip(max_grad_norm=None, warmup_steps=1))

    def with_torch():
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), NO_LIMIT)
        inner.step()
        return norm

    def wrapped(optimizer):
        optimizer.step()
        return optimizer.result.total_norm

    return {
        "zclip": lambda: wrapped(clipped),
        "zclip with ZClip": lambda: wrapped(adaptive),
        "upstream": with_torch,
        "AdamW alone": lambda: inner.step(),
    }


# Name: (model, contenders, how many times faster than upstream we mean to be).
CASES = {
    "ZClip, 98M floats": (LARGE, zclip_case, 1.9),
    "ZClip, 2,000 tensors": (SMALL, zclip_case, 10.0),
    "AdaGC, 98M floats": (LARGE, adagc_case, 3.0),
    "AdaGC, 2,000 tensors": (SMALL, adagc_case, 3.0),
    "clip + fused AdamW, 98M floats": (LARGE, adamw_case, 1.35),
}
TOLERANCE = 1e-4  # torch's own float32 norm of 98M elements is that far off; ours is within 1e-6


def run_case(name, rounds, seconds):
    shapes, make, wanted = CASES[name]
    model = make_model(MODELS[shapes])
    exact = sum(float(p.grad.double().square().sum()) for p in model.parameters()) ** 0.5
    contenders = make(model)
    for contender, step in contenders.items():
        norm = step()
        if norm is not None and abs(float(norm) / exact - 1) > TOLERANCE:
            raise AssertionError(f"{name}, {contender}: norm {float(norm)}, exactly {exact}")
    timings = interleaved(contenders, rounds, seconds)
    milliseconds = {n: t.median_seconds * 1e3 for n, t in timings.items()}
    return {
        "case": name,
        "milliseconds": milliseconds,
        "ratio": milliseconds["upstream"] / milliseconds["zclip"],
        "wanted": wanted,
        "spread": {n: t.spread for n, t in timings.items()},
        "load": load_average(),
    }


def as_markdown(results):
    lines = [
        f"Medians of one interleaved run, {torch.get_num_threads()} threads. Made by "
        "`python benchmarks/bench_step.py`; upstream is `benchmarks/upstream.py`, for AdamW "
        "torch's own clipping.",
        "",
        "| case | ours, ms | upstream, ms | ratio | wanted | also | load |",
        "|---|---|---|---|---|---|---|",
    ]
    for result in results:
        times = result["milliseconds"]
        others = [n for n in times if n not in ("zclip", "upstream")]
        also = ", ".join(f"{n} {times[n]:.1f}" for n in others)
        lines.append(
            f"| {result['case']} | {times['zclip']:.2f} | {times['upstream']:.2f} | "
            f"{result['ratio']:.2f}x | {result['wanted']:g}x | {also} | {result['load']:.1f} |"
        )
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a few rounds")
    parser.add_argument("--only", nargs="+", choices=CASES, metavar="CASE")
    parser.add_argument("--save", type=Path, help="write step.json and step.md into this folder")
    options = parser.parse_args()
    rounds, seconds = (7, 5.0) if options.quick else (40, 20.0)
    results = [run_case(name, rounds, seconds) for name in options.only or CASES]
    print(as_markdown(results))
    if options.save:
        options.save.mkdir(parents=True, exist_ok=True)
        (options.save / "step.json").write_text(json.dumps(results, indent=1) + "\n")
        (options.save / "step.md").write_text(as_markdown(results))


if __name__ == "__main__":
    main()
