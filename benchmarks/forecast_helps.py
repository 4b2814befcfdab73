"""Does it help? The failure suite with and without each piece, on networks the model never saw.

python benchmarks/forecast_helps.py [--seeds 5] [--save benchmarks/results]

Every run is broken by ``heal.chaos`` or by settings that go bad, for a while, and trained on to its
end by a Healer. Told are: share warned of before the loss had doubled, lead, false warnings, steps
lost to rollbacks, and the final loss over that of the same run without a fault, with bootstrapped
95 % intervals over seeds and faults.
"""

import argparse
import json
import math
import multiprocessing
import statistics
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from heal import Healer, HealingConfig
from heal.actions import CannotHeal
from heal.chaos import Chaos, Fault
from heal.probes import Anchor, AnchoredRecovery

STEPS, ONSET, LAST = 260, 110, 200  # the fault is repaired after LAST: the run must recover
LAG = 2


class Gru(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.GRU(3, 24, batch_first=True)
        self.head = nn.Linear(24, 1)

    def forward(self, x):
        return self.head(self.cell(x)[0][:, -1])


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.lift = nn.Linear(3, 16)
        self.block = nn.TransformerEncoderLayer(
            16, 2, 32, dropout=0.1, batch_first=True, norm_first=True
        )
        self.head = nn.Linear(6 * 16, 1)

    def forward(self, x):
        return self.head(self.block(self.lift(x)).flatten(1))


NETWORKS = {"gru": (Gru, 1e-2), "encoder": (Encoder, 5e-3)}


def setup(network, seed):
    torch.manual_seed(seed)
    make, lr = NETWORKS[network]
    model = make()
    x = torch.randn(1024, 6, 3)
    y = torch.tanh(x.flatten(1) @ torch.randn(18, 1) / 3) + 0.05 * torch.randn(1024, 1)
    loader = DataLoader(TensorDataset(x, y), batch_size=16, shuffle=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=lr, fused=True)

    def train_step(batch):
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    def evaluate():
        model.eval()
        with torch.no_grad():
            return float(train_step((x, y)))

    return model, optimizer, loader, train_step, evaluate


class Broken:
    """A train_step in which the settings of the run go bad, by the count of attempts."""

    def __init__(self, kind, healer, optimizer, train_step, seed):
        self.kind, self.healer, self.optimizer, self.train_step = (
            kind,
            healer,
            optimizer,
            train_step,
        )
        self.random = np.random.default_rng(seed)
        self.rate = float(self.random.uniform(0.02, 0.05))
        self.period = float(self.random.uniform(8, 30))
        self.base = [group["lr"] for group in optimizer.param_groups]
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, batch):
        attempt = self.healer.attempts - 1
        since = attempt - ONSET if ONSET <= attempt < LAST else 0
        factor = 1.0
        if self.kind == "growing_lr":
            factor = (1 + self.rate) ** since
        elif self.kind == "oscillation":
            factor = math.exp(self.rate * since * math.sin(2 * math.pi * since / self.period))
        for group, lr in zip(self.optimizer.param_groups, self.base, strict=True):
            group["lr"] = lr * factor
        if self.kind == "drift" and since:
            with torch.no_grad():
                for p in self.healer.model.parameters():
                    p.mul_(1 + 0.5 * self.rate * min(since / 100, 1.0))
        loss = self.train_step(batch)
        if self.kind == "creeping_noise" and since:
            size = 0.02 * ((1 + 2 * self.rate) ** since - 1)
            noise = [torch.randn(p.shape, generator=self.generator) for p in self.parameters()]
            term = sum((n * p).sum() for n, p in zip(noise, self.parameters(), strict=True))
            loss = loss + size * (term - term.detach())
        return loss

    def parameters(self):
        return list(self.healer.model.parameters())


SLOW = ("growing_lr", "oscillation", "drift", "creeping_noise")
INSTANT = ("nan_batch", "corrupt_weight")
ANCHOR_STRENGTH = 0.1  # of the action: as if the loss were so much more curved at the snapshot
VARIANTS = ("bare healer", "forecast", "EWC, Fisher", "EWC, uniform", "EWC, action")


def train(network, kind, variant, seed):
    """Return losses by attempt, attempts of warnings, steps lost, halted, and the final loss."""
    model, optimizer, loader, train_step, evaluate = setup(network, seed)
    config = HealingConfig(
        forecast="forecast" in variant,
        max_recovery_attempts=20,
        anchor_strength=ANCHOR_STRENGTH if "action" in variant else 0.0,
    )
    healer = Healer(model, optimizer, config=config, sleep=lambda s: None)
    healer.exits.dismiss()
    warnings, lost, losses = [], [0], []

    @healer.on_instability
    def note(diagnosis, plan):
        if diagnosis.cause.value == "instability_ahead":
            warnings.append(healer.attempts - 1)
        for action in plan:
            if type(action).__name__ == "Rollback":
                lost[0] += max(0, healer.last_step + 1 - action.before_step)

    faults = {"nan_batch": ("nan_gradient", 1), "corrupt_weight": ("corrupt_weight", 1)}
    chosen = [Fault(faults[kind][0], ONSET, faults[kind][1])] if kind in faults else []
    chaos = Chaos(healer, chosen, seed)
    step = Broken(kind, healer, optimizer, train_step, seed)
    if "EWC" in variant and "action" not in variant:
        recovery = AnchoredRecovery(healer, strength=10.0, steps=100)
        if "uniform" in variant:
            recovery.make_anchor = uniform_anchor
        step = recovery.wrap(step)

    def noted(batch):
        loss = step(batch)
        losses.append(float(loss.detach()))
        return loss

    halted = False
    try:
        healer.run(chaos.wrap(noted), loader, STEPS, progress=False)
    except CannotHeal:
        halted = True
    return losses, warnings, lost[0], halted, evaluate()


def uniform_anchor(model, fisher, strength):
    """As strong on the whole, but alike for every weight."""
    count = sum(f.numel() for f in fisher.values())
    mean = sum(float(f.sum()) for f in fisher.values()) / count
    return Anchor(model, {n: torch.full_like(f, mean) for n, f in fisher.items()}, strength)


def doubled_at(losses):
    """The first attempt, from the fault on, at which the median of nine losses has doubled."""
    level = statistics.median(losses[ONSET - 32 : ONSET])
    for at in range(ONSET, len(losses)):
        recent = [x if math.isfinite(x) else math.inf for x in losses[max(0, at - 8) : at + 1]]
        if statistics.median(recent) > 2 * level:
            return at
    return None


def interval(values, random, rounds=2000):
    """Mean with a bootstrapped 95 % interval; None if there is nothing."""
    if not values:
        return None
    data = np.array(values, dtype=float)
    means = data[random.integers(0, len(data), (rounds, len(data)))].mean(1)
    low, high = np.quantile(means, [0.025, 0.975])
    return [float(data.mean()), float(low), float(high)]


def summed(variant, done, bare, random):
    """One row of the table."""
    rows = {"warned": [], "lead": [], "lost": [], "ratio": [], "halted": [], "instant": []}
    false, healthy = 0, 0
    for (network, kind, named, seed), (losses, warnings, lost, halted, final) in done.items():
        if named != variant:
            continue
        end = ONSET if kind != "none" else STEPS
        false += sum(at < end for at in warnings)
        healthy += end
        if kind == "none":
            continue
        rows["lost"].append(lost)
        rows["halted"].append(halted)
        rows["ratio"].append(math.log(max(final, 1e-9) / bare[network, seed]))
        if kind in INSTANT:
            rows["instant"].append(any(ONSET - 50 <= at < ONSET for at in warnings))
            continue
        damage = doubled_at(losses)
        if damage is not None and "forecast" in variant:
            useful = [at for at in warnings if ONSET <= at < damage]
            rows["warned"].append(bool(useful))
            rows["lead"] += [damage - useful[0]] if useful else []
    told = {name: interval(values, random) for name, values in rows.items()}
    told["failures"] = len(rows["warned"])
    told["false_per_10k"] = 1e4 * false / max(healthy, 1)
    return told


def one(job):
    torch.set_num_threads(1)
    return job, train(*job)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--save", help="folder for forecast_helps.json")
    arguments = parser.parse_args()
    jobs = [
        (network, kind, variant, seed)
        for seed in range(arguments.seeds)
        for variant in VARIANTS
        for network in NETWORKS
        for kind in ("none", *SLOW, *INSTANT)
        if kind != "none" or "EWC" not in variant
    ]
    with multiprocessing.get_context("spawn").Pool(arguments.processes) as pool:
        done = dict(pool.imap_unordered(one, jobs))
    bare = {
        (network, seed): done[network, "none", "bare healer", seed][-1]
        for network in NETWORKS
        for seed in range(arguments.seeds)
    }
    random = np.random.default_rng(0)
    told = {variant: summed(variant, done, bare, random) for variant in VARIANTS}
    for variant, row in told.items():
        print(variant, json.dumps(row))
    if arguments.save:
        path = Path(arguments.save) / "forecast_helps.json"
        path.write_text(json.dumps({"seeds": arguments.seeds, "variants": told}, indent=1) + "\n")


if __name__ == "__main__":
    main()
