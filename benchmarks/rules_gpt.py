"""Which rule cuts what: one small GPT, bad batches injected, the same run under several rules.

python benchmarks/rules_gpt.py [--save docs/images]

Each panel shows the gradient norms of a run before clipping, and after it. Model, data and bad
batches are those of spikes_gpt.py.
"""

import argparse
import math
from pathlib import Path

import torch
from spikes_gpt import (
    BYTES,
    LR,
    MAX_NORM,
    SPIKE_FACTOR,
    Gpt,
    batch_of,
    evaluate,
    is_spike,
    library_text,
    loss_of,
)

import zclip
from zclip.layout import BLOCKED, CLIPPED_NORM, NORM

STEPS = 240
RULES = {
    "GlobalNorm(1.0): one fixed limit": lambda: zclip.GlobalNorm(MAX_NORM),
    "ZClip(): what stands out, to the ordinary": lambda: zclip.ZClip(max_grad_norm=None),
    "AdaGC(): every tensor by its own past": zclip.AdaGC,
    "SpikeSkip(window=64): refuses, clips nothing": lambda: zclip.SpikeSkip(window=64),
}


def train(clipper, text, steps, seed=0):
    """Return norms before and after clipping (0 where a step was refused), and the last loss."""
    torch.manual_seed(seed)
    model = Gpt()
    inner = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
    optimizer = zclip.ClippedOptimizer(inner, clipper)
    generator = torch.Generator().manual_seed(seed)
    training, held_out = text[: len(text) * 9 // 10], text[len(text) * 9 // 10 :]
    before, after = [], []
    for step in range(steps):
        inputs, labels = batch_of(training, generator)
        factor = 1.0
        if is_spike(step):
            labels = torch.randint(BYTES, labels.shape, generator=generator)
            factor = SPIKE_FACTOR
        optimizer.zero_grad()
        (loss_of(model, inputs, labels) * factor).backward()
        optimizer.step()
        verdict = optimizer.result.verdict.tolist()
        before.append(verdict[NORM])
        after.append(0.0 if verdict[BLOCKED] else verdict[CLIPPED_NORM])
    return before, after, evaluate(model, held_out)


def plot(runs, path):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6), layout="constrained")
    panels = figure.subplots(2, 2, sharex=True, sharey=True).flatten()
    for axes, (name, (before, after, loss)) in zip(panels, runs.items(), strict=True):
        axes.plot(before, color="#d2691e", linewidth=0.8, label="before clipping")
        passed = [math.nan if norm == 0 else norm for norm in after]
        axes.plot(passed, color="#00796b", linewidth=1.1, label="after")
        refused = [step for step, norm in enumerate(after) if norm == 0]
        if refused:
            shown = [before[step] for step in refused]
            axes.plot(refused, shown, "x", color="black", markersize=4, label="refused")
        axes.set_title(f"{name}\nloss on clean text {loss:.2f}", fontsize=9)
        axes.set_yscale("log")
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(fontsize=7, frameon=False)
    for axes in panels[2:]:
        axes.set_xlabel("step")
    for axes in panels[::2]:
        axes.set_ylabel("gradient norm")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--save", type=Path, help="write rules.png into this folder")
    options = parser.parse_args()
    text = library_text()
    runs = {name: train(make(), text, options.steps) for name, make in RULES.items()}
    for name, (before, after, loss) in runs.items():
        cut = sum(b > a * (1 + 1e-6) for b, a in zip(before, after, strict=True))
        print(f"{name}: {cut} of {len(before)} steps cut or refused, loss {loss:.3f}")
    if options.save:
        plot(runs, options.save / "rules.png")


if __name__ == "__main__":
    main()
