"""Set-ups in which data, labels, loss or model change on purpose while they train."""

from typing import Any

import torch
from torch import Generator, Tensor, nn

from benchmarks.healed_runs import Stream
from benchmarks.healthy.guards import Bare
from benchmarks.healthy.problems import (
    BATCH,
    CHANGE,
    STEPS,
    Classes,
    F,
    adam,
    cross_entropy,
    mlp,
    ramp,
)

Modules = list[nn.Module]


def with_data(change: Any, loss: Any = cross_entropy, **options: Any) -> Any:
    """Return a set-up of five classes whose batches ``change(problem, step, g, x, y)`` makes."""

    def setup(seed: int, guard: Bare) -> Modules:
        problem = Classes(seed, **options)
        model = mlp(16, 5)
        stream = problem.stream(lambda step, g, x, y: change(problem, step, g, x, y))
        guard.train(model, adam(model), stream, loss(model))
        return [model]

    return setup


def noisier_labels(problem: Classes, step: int, g: Generator, x: Tensor, y: Tensor) -> Any:
    flips = torch.rand(len(y), generator=g) < 0.8 * ramp(step, 500)
    return x, torch.where(flips, torch.randint(5, y.shape, generator=g), y)


def label_flips_by_epoch(problem: Classes, step: int, g: Generator, x: Tensor, y: Tensor) -> Any:
    return x, (y + step // 100) % 5


def other_task(problem: Classes, step: int, g: Generator, x: Tensor, y: Tensor) -> Any:
    return problem.draw(g, teacher=int(step >= CHANGE))


def four_tasks(problem: Classes, step: int, g: Generator, x: Tensor, y: Tensor) -> Any:
    return problem.draw(g, teacher=4 * step // STEPS)


def old_task_returns(seed: int, guard: Bare) -> Modules:
    """Learn a task, another one for a few steps at a large rate, and the first one again."""
    problem, model = Classes(seed, steps=360), mlp(16, 5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    stream = problem.stream(lambda step, g, x, y: problem.draw(g, teacher=int(250 <= step < 260)))
    guard.train(model, optimizer, stream, cross_entropy(model))
    return [model]


def alternating_tasks(problem: Classes, step: int, g: Generator, x: Tensor, y: Tensor) -> Any:
    return problem.draw(g, teacher=step % 2)


def permuted_labels(problem: Classes, step: int, g: Generator, x: Tensor, y: Tensor) -> Any:
    return x, (y + (step >= CHANGE)) % 5


def inputs_times_5(problem: Classes, step: int, g: Generator, x: Tensor, y: Tensor) -> Any:
    return x * (5 if step >= CHANGE else 1), y


def harder_at_once(problem: Classes, step: int, g: Generator, x: Tensor, y: Tensor) -> Any:
    return x + 1.5 * (step >= CHANGE) * torch.randn(x.shape, generator=g), y


def harder_gradually(problem: Classes, step: int, g: Generator, x: Tensor, y: Tensor) -> Any:
    return x + 2.0 * (step / STEPS) * torch.randn(x.shape, generator=g), y


def easiest_first(problem: Classes, step: int, g: Generator, x: Tensor, y: Tensor) -> Any:
    """Keep the samples of which the teacher is surest, then fewer and fewer of those."""
    x, y = problem.draw(g, count=4 * BATCH)
    margin = (x @ problem.teachers[0]).topk(2, dim=1).values.diff(dim=1).abs().squeeze(1)
    kept = margin.argsort(descending=True)[: int(BATCH * (1 + 3 * ramp(step, 200)))]
    return x[kept], y[kept]


def sorted_by_class(problem: Classes, step: int, g: Generator, x: Tensor, y: Tensor) -> Any:
    """Data that nobody shuffled: fifty batches of one class, then of the next."""
    x, y = problem.draw(g, count=12 * BATCH)
    kept = (y == step // 50 % 5).nonzero().squeeze(1)[:BATCH]
    return x[kept], y[kept]


def rare_hard_batches(problem: Classes, step: int, g: Generator, x: Tensor, y: Tensor) -> Any:
    return (4 * x, torch.randint(5, y.shape, generator=g)) if step % 50 == 49 else (x, y)


def smoothing_switched_on(model: nn.Module) -> Any:
    def loss_of(batch: Any) -> Tensor:
        x, y, step = batch
        return F.cross_entropy(model(x), y, label_smoothing=0.3 * (step >= CHANGE))

    return loss_of


def with_step(problem: Classes, step: int, g: Generator, x: Tensor, y: Tensor) -> Any:
    return x, y, step


def penalty_turned_up(model: nn.Module) -> Any:
    def loss_of(batch: Any) -> Tensor:
        x, y, step = batch
        logits = model(x)
        return F.cross_entropy(logits, y) + 0.2 * ramp(step) * logits.square().mean()

    return loss_of


def adversarial(model: nn.Module) -> Any:
    """Attack the inputs by the sign of their gradient, a little more with every step."""

    def loss_of(batch: Any) -> Tensor:
        x, y, step = batch
        attacked = x.clone().requires_grad_(True)
        (slope,) = torch.autograd.grad(F.cross_entropy(model(attacked), y), attacked)
        return F.cross_entropy(model(x + ramp(step, 200) * slope.sign()), y)

    return loss_of


def targets_times_10(seed: int, guard: Bare) -> Modules:
    torch.manual_seed(seed)
    model = mlp(8, 1)

    def make(step: int, g: Generator) -> Any:
        x = torch.randn(BATCH, 8, generator=g)
        return x, x[:, :3].sin().sum(1, keepdim=True) * (10 if step >= CHANGE else 1)

    stream = Stream(STEPS, make, seed)
    guard.train(model, adam(model), stream, lambda b: F.mse_loss(model(b[0]), b[1]))
    return [model]


class TinyLm(nn.Module):
    """A recurrent network over a small alphabet."""

    def __init__(self, alphabet: int = 12, width: int = 24) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(alphabet, width), nn.Linear(width, alphabet)
        self.cell = nn.GRU(width, width, batch_first=True)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.cell(self.embed(tokens))[0])


def longer_sequences_summed(seed: int, guard: Bare) -> Modules:
    torch.manual_seed(seed)
    model = TinyLm()

    def make(step: int, g: Generator) -> Any:
        length = 4 + int(12 * ramp(step, 200))
        starts = torch.randint(12, (16, 1), generator=g)
        text = (starts + 5 * torch.arange(length + 1)) % 12
        strays = torch.rand(text.shape, generator=g) < 0.1
        return torch.where(strays, torch.randint(12, text.shape, generator=g), text)

    def loss_of(text: Tensor) -> Tensor:
        logits = model(text[:, :-1]).flatten(0, 1)
        return F.cross_entropy(logits, text[:, 1:].flatten(), reduction="sum") / len(text)

    guard.train(model, adam(model), Stream(STEPS, make, seed), loss_of)
    return [model]


class LowRank(nn.Module):
    """A frozen layer with a trained product of low rank beside it."""

    def __init__(self, inputs: int, outputs: int, rank: int = 4) -> None:
        super().__init__()
        self.frozen = nn.Linear(inputs, outputs)
        self.frozen.weight.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, inputs) / inputs**0.5)
        self.up = nn.Parameter(torch.zeros(outputs, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(x) + x @ self.down.T @ self.up.T

    @torch.no_grad()
    def merge(self) -> None:
        """Add the product to the frozen weights and begin another."""
        self.frozen.weight += self.up @ self.down
        self.up.zero_()
        self.down.copy_(torch.randn(self.down.shape) / self.down.shape[1] ** 0.5)


def relora(seed: int, guard: Bare) -> Modules:
    """Merge the low-rank product every 100 steps, and clear the moments of its factors."""
    problem = Classes(seed)
    model = nn.Sequential(LowRank(16, 48), nn.ReLU(), LowRank(48, 48), nn.ReLU(), nn.Linear(48, 5))
    optimizer, loss_of = adam(model), cross_entropy(model)
    healer, merged = guard.watch(model, optimizer), 0
    for x, y, step in healer.batches(problem.stream(lambda step, g, x, y: (x, y, step))):
        if step >= 100 * (merged + 1):
            merged += 1
            for layer in (layer for layer in model if isinstance(layer, LowRank)):
                layer.merge()
                for factor in (layer.down, layer.up):
                    optimizer.state.pop(factor, None)
        loss = loss_of((x, y))
        loss.backward()
        healer.step(loss)
        optimizer.zero_grad()
    return [model]


def layer_inserted(seed: int, guard: Bare) -> Modules:
    problem, model = Classes(seed), mlp(16, 5)
    optimizer, loss_of = adam(model), cross_entropy(model)
    healer = guard.watch(model, optimizer)
    for x, y, step in healer.batches(problem.stream(lambda step, g, x, y: (x, y, step))):
        if step >= CHANGE and len(model) == 6:
            layer = nn.Linear(48, 48)
            nn.init.eye_(layer.weight)
            model.insert(2, nn.ReLU())
            model.insert(2, layer)  # the names of all layers behind it now mean others
            optimizer.add_param_group({"params": list(layer.parameters())})
        loss = loss_of((x, y))
        loss.backward()
        healer.step(loss)
        optimizer.zero_grad()
    return [model]


def head_replaced(seed: int, guard: Bare) -> Modules:
    problem, model = Classes(seed), mlp(16, 5)
    optimizer, loss_of, first_head = adam(model), cross_entropy(model), model[5]
    healer = guard.watch(model, optimizer)
    stream = problem.stream(lambda step, g, x, y: (*other_task(problem, step, g, x, y), step))
    for x, y, step in healer.batches(stream):
        if step >= CHANGE and model[5] is first_head:
            model[5] = nn.Linear(48, 5)
            optimizer.add_param_group({"params": list(model[5].parameters())})
        loss = loss_of((x, y))
        loss.backward()
        healer.step(loss)
        optimizer.zero_grad()
    return [model]


def optimizer_cleared(seed: int, guard: Bare) -> Modules:
    """A new stage of training every 150 steps, with a fresh optimizer state."""
    problem, model = Classes(seed), mlp(16, 5)
    optimizer, loss_of, cleared = adam(model), cross_entropy(model), 0
    healer = guard.watch(model, optimizer)
    for x, y, step in healer.batches(problem.stream(lambda step, g, x, y: (x, y, step))):
        if step >= 150 * (cleared + 1):
            cleared += 1
            optimizer.state.clear()
        loss = loss_of((x, y))
        loss.backward()
        healer.step(loss)
        optimizer.zero_grad()
    return [model]


SETUPS = {
    "nothing changes": with_data(lambda problem, step, g, x, y: (x, y)),
    "labels get noisier": with_data(noisier_labels, steps=900),
    "labels flip by epoch": with_data(label_flips_by_epoch),
    "labels permuted at once": with_data(permuted_labels),
    "new task at once": with_data(other_task),
    "continual learning, four tasks": with_data(four_tasks),
    "old task returns": old_task_returns,
    "two tasks in turn": with_data(alternating_tasks),
    "inputs x 5": with_data(inputs_times_5),
    "targets x 10": targets_times_10,
    "curriculum at once": with_data(harder_at_once),
    "curriculum gradual": with_data(harder_gradually),
    "easiest samples first": with_data(easiest_first),
    "data sorted by class": with_data(sorted_by_class),
    "rare hard batches": with_data(rare_hard_batches),
    "label smoothing switched on": with_data(with_step, smoothing_switched_on),
    "penalty turned up": with_data(with_step, penalty_turned_up),
    "adversarial, epsilon grows": with_data(with_step, adversarial),
    "summed LM loss, longer sequences": longer_sequences_summed,
    "ReLoRA": relora,
    "layer inserted": layer_inserted,
    "head replaced": head_replaced,
    "optimizer cleared on purpose": optimizer_cleared,
}
