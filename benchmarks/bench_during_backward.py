"""Clipping measured during backward beside clipping after it, and memory of optimizer-in-backward.

python benchmarks/bench_during_backward.py [--quick] [--rounds 15] [--threads 1] [--save DIR]

Contenders take turns on the same model and the same batch. Times are seconds of processor time of
this process: on a busy machine they say more than the clock does, and with one thread they are
what the clock would say on an idle one. "clipping" is what a step costs more than the same
optimizer without clipping, as a share of backward and step. The norm that each contender finds is
checked against float64.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import zclip
from zclip.bench.load import LoadMeter
from zclip.optim import AdamW, step_in_backward

LR = 1e-6  # the weights hardly move, so that all rounds are alike
NO_LIMIT = 1e9


class Block(nn.Module):
    """A layer of GPT-2."""

    def __init__(self, width):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        q, k, v = self.qkv(self.norms[0](x))[None].chunk(3, -1)
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)[0])
        return x + self.down(nn.functional.gelu(self.up(self.norms[1](x))))


def gpt(width, layers, words):
    return nn.Sequential(*[Block(width) for _ in range(layers)], nn.Linear(width, words))


def deep(width, layers):
    pairs = [(nn.Linear(width, width), nn.Tanh()) for _ in range(layers)]
    return nn.Sequential(*[module for pair in pairs for module in pair])


MODELS: dict[str, tuple[Callable[[], nn.Module], int, int]] = {
    "GPT-2-small-like, 98 M": (lambda: gpt(768, 12, 17000), 768, 16),
    "400 tensors, 26 M": (lambda: deep(360, 200), 360, 16),
    "2,000 small tensors, 4 M": (lambda: deep(64, 1000), 64, 16),
}
QUICK = {
    "GPT-like, 2 M": (lambda: gpt(128, 4, 5000), 128, 8),
    "200 small tensors": (lambda: deep(32, 100), 32, 8),
}

Step = Callable[[], object]


class Contenders:
    """Ways to step one model. Those with the same optimizer share its state."""

    def __init__(self, model):
        self.model = model
        params = list(model.parameters())
        torchs = torch.optim.AdamW(params, lr=LR, fused=True)
        wrapped = zclip.ClippedOptimizer(torchs, zclip.GlobalNorm(NO_LIMIT))
        fused = AdamW(params, lr=LR, clipper=zclip.GlobalNorm(NO_LIMIT))
        bare = AdamW(params, lr=LR)
        self._norm = None

        def clip_with_torch():
            self._norm = nn.utils.clip_grad_norm_(params, NO_LIMIT)
            torchs.step()

        self.steps: dict[str, tuple[Step, zclip.Clipper | None]] = {
            "torch AdamW, no clipping": (torchs.step, None),
            "torch AdamW, torch clips": (clip_with_torch, None),
            "torch AdamW, zclip.wrap": (wrapped.step, None),
            "torch AdamW, zclip.wrap, during backward": (wrapped.step, wrapped.clipper),
            "zclip AdamW, no clipping": (bare.step, None),
            "zclip AdamW": (fused.step, None),
            "zclip AdamW, during backward": (fused.step, fused.clipper),
        }
        self._norms = {"torch clips": lambda: self._norm, "wrap": lambda: wrapped.result.total_norm}
        self._norms["zclip AdamW"] = lambda: fused.result.clip.total_norm

    def run(self, name, batch):
        """Return seconds of backward and of the step, and the norm that was found."""
        step, attached = self.steps[name]
        handle = None if attached is None else attached.attach(self.model)
        self.model.zero_grad()
        loss = self.model(batch).square().mean()
        start = time.process_time()
        loss.backward()
        middle = time.process_time()
        step()
        end = time.process_time()
        if handle is not None:
            handle.detach()
        return middle - start, end - middle, None if "no clip" in name else self._found(name)

    def _found(self, name):
        return next(float(norm()) for part, norm in self._norms.items() if part in name)


def measure(model, batch, rounds):
    contenders = Contenders(model)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders.steps}
    for turn in range(rounds + 2):
        for name in contenders.steps:
            backward, step, norm = contenders.run(name, batch)
            if turn >= 2:
                times[name].append((backward, step))
            elif norm is not None:
                torch.testing.assert_close(norm, exact_norm(model), rtol=1e-4, atol=0.0)
    return {
        name: [statistics.median(column) * 1e3 for column in zip(*found, strict=True)]
        + [statistics.median(map(sum, found)) * 1e3]
        for name, found in times.items()
    }


def exact_norm(model):
    return sum(float(p.grad.double().square().sum()) for p in model.parameters()) ** 0.5


def table(name, medians):
    lines = []
    for contender, (backward, step, both) in medians.items():
        family = contender.split(",")[0]
        bare, plain = medians[f"{family}, no clipping"], contender.removesuffix(", during backward")
        share = "" if "no clip" in contender else f"{(both - bare[2]) / both:.1%}"
        ratio = "" if plain == contender else f"{medians[plain][1] / step:.2f}x"
        total = "" if plain == contender else f"{medians[plain][2] / both:.3f}x"
        cells = (name, contender, f"{backward:.2f}", f"{step:.2f}", f"{both:.2f}", share, ratio)
        lines.append(f"| {' | '.join((*cells, total))} |")
    return lines


# Memory: a process for each, because a peak is one of a process.

ADAGC = {"warmup_steps": 0}
KEEPERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "AdamW after backward": lambda model: AdamW(
        model.named_parameters(), lr=LR, clipper=zclip.AdaGC(**ADAGC)
    ),
    "AdamW in backward": lambda model: step_in_backward(model, AdamW, zclip.AdaGC(**ADAGC), lr=LR),
}


def peak_of(name, models):
    """Train in this process, and print its peak of memory in MiB."""
    make, width, tokens = next(iter(models.values()))
    model = make()
    optimizer = KEEPERS[name](model)
    batch = torch.randn(tokens, width)
    for _ in range(3):
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
    held = sum(p.numel() * p.element_size() for p in model.parameters()) / 2**20
    status = Path("/proc/self/status").read_text()  # getrusage counts what the parent had, too
    print(json.dumps([int(re.search(r"VmHWM:\s+(\d+)", status)[1]) / 1024, held]))


def peaks(quick):
    found = {}
    for name in KEEPERS:
        words = [sys.executable, __file__, "--peak", name, *(["--quick"] if quick else [])]
        # Freed memory goes back at once, as it does on a GPU to the allocator.
        environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
        done = subprocess.run(words, env=environment, capture_output=True, text=True, check=True)
        found[name] = json.loads(done.stdout)
    return found


def report(quick, rounds, threads):
    models = QUICK if quick else MODELS
    meter = LoadMeter(threads)
    lines = [
        "| model | step | backward, ms | after backward, ms | both, ms | clipping "
        "| after backward, shorter | both, shorter |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for name, (make, width, tokens) in models.items():
        torch.manual_seed(0)
        model = make()
        lines += table(name, measure(model, torch.randn(tokens, width), rounds))
    load = meter.read()
    others = "unknown" if load.others is None else f"{load.others:.0%}"
    head = (
        f"Processor time, medians of {rounds} interleaved rounds, {threads} thread(s), float32; "
        f"load {load.average:.1f}, other processes used {others} of the machine. Made by "
        "`python benchmarks/bench_during_backward.py`."
    )
    lines = [head, "", *lines, "", "| optimizer | peak, MiB | gradients, MiB |", "|---|---:|---:|"]
    for name, (peak, held) in peaks(quick).items():
        lines.append(f"| {name} | {peak:.0f} | {held:.0f} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--save", type=Path)
    parser.add_argument("--peak", choices=list(KEEPERS), help="used by the script itself")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.peak:
        peak_of(arguments.peak, QUICK if arguments.quick else MODELS)
        return
    text = report(arguments.quick, arguments.rounds, arguments.threads)
    print(text)
    if arguments.save:
        (arguments.save / "during_backward.md").write_text(text)


if __name__ == "__main__":
    main()
