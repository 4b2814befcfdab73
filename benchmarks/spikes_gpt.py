"""Does it help? A small GPT, trained on the sources of Python's library, with bad batches injected.

python benchmarks/spikes_gpt.py [--save benchmarks/results]

Now and then the labels of a batch are noise and its loss is multiplied, as a corrupt shard of data
would do it. Plain clipping cuts every such gradient to its fixed limit, which is several times the
ordinary norm; ZClip, with the same limit besides, cuts it to the ordinary. Same model, data, order
and seeds; what differs is the clipper. The loss reported is on clean text that was not trained on.
"""

import argparse
import json
import statistics
import sysconfig
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

import zclip

SOURCES = ("argparse", "ast", "difflib", "doctest", "inspect", "pickle", "subprocess", "tarfile")
WIDTH, LAYERS, HEADS, CONTEXT, BATCH, BYTES = 64, 2, 4, 64, 16, 256
STEPS, EVAL_EVERY, EVAL_BATCHES = 400, 20, 8
LR, MAX_NORM = 3e-3, 1.0
FIRST_SPIKE, SPIKE_EVERY, SPIKE_LENGTH, SPIKE_FACTOR = 60, 20, 2, 30.0

CLIPPERS = {
    "plain clipping": lambda: zclip.GlobalNorm(MAX_NORM),
    "ZClip": lambda: zclip.ZClip(max_grad_norm=MAX_NORM),
}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        batch, length, _ = x.shape
        heads = self.qkv(self.norm1(x)).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class Gpt(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(BYTES, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*[Block() for _ in range(LAYERS)])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, BYTES)

    def forward(self, tokens):
        places = torch.arange(tokens.shape[1], device=tokens.device)
        return self.head(self.norm(self.blocks(self.tokens(tokens) + self.places(places))))


def library_text():
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = b"".join((folder / f"{name}.py").read_bytes() for name in SOURCES)
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


def batch_of(text, generator):
    starts = torch.randint(len(text) - CONTEXT - 1, (BATCH,), generator=generator)
    rows = torch.stack([text[s : s + CONTEXT + 1] for s in starts.tolist()])
    return rows[:, :-1], rows[:, 1:]


def loss_of(model, inputs, labels):
    return functional.cross_entropy(model(inputs).flatten(0, 1), labels.flatten())


def is_spike(step):
    return step >= FIRST_SPIKE and step % SPIKE_EVERY < SPIKE_LENGTH


@torch.no_grad()
def evaluate(model, text):
    generator = torch.Generator().manual_seed(0)
    losses = [loss_of(model, *batch_of(text, generator)) for _ in range(EVAL_BATCHES)]
    return float(torch.stack(losses).mean())


def train(clipper, seed, text, steps, spikes=True):
    """Return the clean losses on held-out text, one every EVAL_EVERY steps."""
    torch.manual_seed(seed)
    training, held_out = text[: len(text) * 9 // 10], text[len(text) * 9 // 10 :]
    model = Gpt()
    inner = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
    optimizer = zclip.ClippedOptimizer(inner, clipper)
    generator = torch.Generator().manual_seed(seed)
    losses = []
    for step in range(steps):
        inputs, labels = batch_of(training, generator)
        factor = 1.0
        if spikes and is_spike(step):
            labels = torch.randint(BYTES, labels.shape, generator=generator)
            factor = SPIKE_FACTOR
        optimizer.zero_grad()
        (loss_of(model, inputs, labels) * factor).backward()
        optimizer.step()
        if (step + 1) % EVAL_EVERY == 0:
            losses.append(evaluate(model, held_out))
    return losses


def as_markdown(curves, seeds, steps):
    names = list(curves)
    lines = [
        f"Loss on clean held-out text after {steps} steps (mean of the last three evaluations), "
        f"{SPIKE_LENGTH} bad batches in every {SPIKE_EVERY} from step {FIRST_SPIKE} on. "
        "Made by `python benchmarks/spikes_gpt.py`.",
        "",
        f"| seed | {' | '.join(names)} |",
        f"|---|{'---|' * len(names)}",
    ]
    final = {n: [statistics.mean(run[-3:]) for run in runs] for n, runs in curves.items()}
    for i, seed in enumerate(seeds):
        lines.append(f"| {seed} | {' | '.join(f'{final[n][i]:.3f}' for n in names)} |")
    means = " | ".join(f"**{statistics.mean(final[n]):.3f}**" for n in names)
    return "\n".join([*lines, f"| mean | {means} |", "", "![losses](spikes_gpt.png)"]) + "\n"


def plot(curves, path):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for name, runs in curves.items():
        steps = [EVAL_EVERY * (i + 1) for i in range(len(runs[0]))]
        mean = [statistics.mean(values) for values in zip(*runs, strict=True)]
        (line,) = axes.plot(steps, mean, label=name)
        low = [min(values) for values in zip(*runs, strict=True)]
        high = [max(values) for values in zip(*runs, strict=True)]
        axes.fill_between(steps, low, high, color=line.get_color(), alpha=0.2, linewidth=0)
    axes.set(xlabel="step", ylabel="loss on clean held-out text")
    axes.legend(title="mean and range of the seeds")
    figure.savefig(path, dpi=110)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--quick", action="store_true", help="one seed, few steps: does it work?")
    parser.add_argument("--save", type=Path, help="write table, curves and plot into this folder")
    options = parser.parse_args()
    if options.quick:
        options.seeds, options.steps = 1, 4 * EVAL_EVERY
    text, seeds = library_text(), range(options.seeds)
    curves = {
        name: [train(make(), seed, text, options.steps) for seed in seeds]
        for name, make in CLIPPERS.items()
    }
    curves["no bad batches"] = [
        train(CLIPPERS["plain clipping"](), seed, text, options.steps, spikes=False)
        for seed in seeds
    ]
    print(as_markdown(curves, seeds, options.steps))
    if options.save:
        options.save.mkdir(parents=True, exist_ok=True)
        (options.save / "spikes_gpt.md").write_text(as_markdown(curves, seeds, options.steps))
        (options.save / "spikes_gpt.json").write_text(json.dumps(curves) + "\n")
        plot(curves, options.save / "spikes_gpt.png")


if __name__ == "__main__":
    main()
