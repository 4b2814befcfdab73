"""Set-ups that differ in how they train: schedules, optimizers, batches, what is frozen."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.optim import SGD, Adafactor, Adam, RMSprop
from torch.optim import lr_scheduler as schedulers

from benchmarks.healed_runs import Stream
from benchmarks.healthy.guards import Bare
from benchmarks.healthy.problems import BATCH, CHANGE, STEPS, Classes, F, adam, cross_entropy, mlp

Modules = list[nn.Module]


def plain(
    optimize: Any = adam,
    schedule: Any = None,
    dropout: float = 0.0,
    accumulate: int = 1,
    **problem: Any,
) -> Any:
    """Return a set-up of the five classes with an optimizer and a schedule of its own."""

    def setup(seed: int, guard: Bare) -> Modules:
        classes = Classes(seed, **problem)
        model = mlp(16, 5, dropout=dropout)
        optimizer = optimize(model)
        scheduler = None if schedule is None else schedule(optimizer)
        loss_of = cross_entropy(model)
        guard.train(model, optimizer, classes.stream(), loss_of, scheduler, accumulate)
        return [model]

    return setup


def sgd(lr: float, momentum: float = 0.0) -> Any:
    return lambda model: SGD(model.parameters(), lr=lr, momentum=momentum, fused=True)


def low_then_high(optimizer: Any) -> Any:
    return schedulers.LambdaLR(optimizer, lambda step: 1.0 if step < 500 else 1000.0)


def warm_up(optimizer: Any) -> Any:
    return schedulers.LambdaLR(optimizer, lambda step: 1e-4 + min(step / 300, 1.0))


def by_hand(change: Any) -> Any:
    """Return a set-up whose loop sets the learning rate itself, by ``change(step)``."""

    def setup(seed: int, guard: Bare) -> Modules:
        classes, model = Classes(seed), mlp(16, 5)
        optimizer, loss_of = adam(model), cross_entropy(model)
        healer = guard.watch(model, optimizer)
        for x, y, step in healer.batches(classes.stream(lambda step, g, x, y: (x, y, step))):
            optimizer.param_groups[0]["lr"] = 2e-3 * change(step)
            loss = loss_of((x, y))
            loss.backward()
            healer.step(loss)
            optimizer.zero_grad()
        return [model]

    return setup


def frozen_then_unfrozen(seed: int, guard: Bare) -> Modules:
    classes, model = Classes(seed), mlp(16, 5)
    model[0].requires_grad_(False)
    model[3].requires_grad_(False)
    loss_of = cross_entropy(model)

    def train_step(batch: Any) -> Any:
        x, y, step = batch
        model[3].requires_grad_(step >= 150)
        model[0].requires_grad_(step >= 300)
        return loss_of((x, y))

    stream = classes.stream(lambda step, g, x, y: (x, y, step))
    guard.train(model, adam(model), stream, train_step)
    return [model]


def halves_in_turn(seed: int, guard: Bare) -> Modules:
    classes, model = Classes(seed), mlp(16, 5)
    loss_of = cross_entropy(model)

    def train_step(batch: Any) -> Any:
        x, y, step = batch
        model[0].requires_grad_(step // 20 % 2 == 0)
        model[5].requires_grad_(step // 20 % 2 == 1)
        return loss_of((x, y))

    stream = classes.stream(lambda step, g, x, y: (x, y, step))
    guard.train(model, adam(model), stream, train_step)
    return [model]


def regression(targets: Any, loss: Any, lr: float = 2e-3, **options: Any) -> Any:
    """Return a set-up whose targets are ``targets(x, generator)``."""

    def setup(seed: int, guard: Bare) -> Modules:
        torch.manual_seed(seed)
        model = mlp(8, options.get("outputs", 1))

        def make(step: int, g: Generator) -> Any:
            x = torch.randn(options.get("batch", BATCH), 8, generator=g)
            return x, targets(x, g)

        steps = options.get("steps", STEPS)
        stream = Stream(steps, make, seed)
        guard.train(model, adam(model, lr), stream, lambda b: loss(model(b[0]), b[1]))
        return [model]

    return setup


def student_t(x: Any, g: Generator) -> Any:
    normal = torch.randn(len(x), 1, generator=g)
    return x[:, :1] + 0.3 * normal / torch.rand(len(x), 1, generator=g).clamp_min(1e-3)


def gaussian_nll(output: Any, target: Any) -> Any:
    """Negative once the spread is small."""
    mean, log_spread = output.chunk(2, dim=1)
    return (log_spread + 0.5 * ((target - mean) / log_spread.exp()).square()).mean()


def hinge(output: Any, target: Any) -> Any:
    """Exactly zero for most batches once it is learned."""
    return (1 - output * target).clamp_min(0).mean()


def full_batch_edge(seed: int, guard: Bare) -> Modules:
    """Gradient descent at the edge of stability: the loss goes up and down on its way."""
    classes = Classes(seed, noise=0.0)
    data = classes.draw(torch.Generator().manual_seed(seed), count=128)
    model = mlp(16, 5)
    stream = Stream(STEPS, lambda step, g: data, seed)
    guard.train(model, sgd(0.8)(model), stream, cross_entropy(model))
    return [model]


def norm_of_small_batches(seed: int, guard: Bare) -> Modules:
    classes = Classes(seed, batch=4)
    model = nn.Sequential(nn.Linear(16, 48), nn.BatchNorm1d(48), nn.ReLU(), nn.Linear(48, 5))
    guard.train(model, adam(model), classes.stream(), cross_entropy(model))
    return [model]


class TrackedInstances(nn.Module):
    """InstanceNorm over parts of the features; it writes its statistics with a trace."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.InstanceNorm1d(width // 8, affine=True, track_running_stats=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.unflatten(1, (-1, 8))).flatten(1)


def with_statistics(
    change: Callable[[int, nn.Sequential, Classes], None],
    norm: Callable[[], nn.Module] = lambda: nn.BatchNorm1d(48),
) -> Callable[[int, Bare], Modules]:
    """Train layers that keep running statistics; ``change`` comes after every step."""

    def train(seed: int, guard: Bare) -> Modules:
        classes = Classes(seed)
        layers = (nn.Linear(16, 48), norm(), nn.ReLU(), nn.Linear(48, 48), norm(), nn.ReLU())
        model = nn.Sequential(*layers, nn.Linear(48, 5))
        optimizer, loss_of = adam(model), cross_entropy(model)
        healer = guard.watch(model, optimizer)
        for batch in healer.batches(classes.stream()):
            model.train()
            loss = loss_of(batch)
            loss.backward()
            healer.step(loss)
            optimizer.zero_grad()
            change(healer.last_step, model, classes)
        return [model]

    return train


def norms_of(model: nn.Module) -> list[nn.BatchNorm1d]:
    return [module for module in model.modules() if isinstance(module, nn.BatchNorm1d)]


@torch.no_grad()
def measure_statistics(model: nn.Module, classes: Classes) -> None:
    """Compute running statistics as plain means over 20 batches, as ``update_bn`` does."""
    g = torch.Generator().manual_seed(classes.seed)
    for norm in norms_of(model):
        norm.reset_running_stats()
        norm.momentum = None
    for _ in range(20):
        model(classes.draw(g)[0])
    for norm in norms_of(model):
        norm.momentum = 0.1


def measure_often(step: int, model: nn.Module, classes: Classes) -> None:
    """Precise BatchNorm (Wu and Johnson 2021, arXiv:2105.07576), for an evaluation now and then."""
    if step % 100 == 99:
        measure_statistics(model, classes)


def reset_statistics(step: int, model: nn.Module, classes: Classes) -> None:
    for norm in norms_of(model) if step == CHANGE else ():
        norm.reset_running_stats()


def slow_statistics(step: int, model: nn.Module, classes: Classes) -> None:
    for norm in norms_of(model) if step == CHANGE else ():
        norm.momentum = 0.003


def average_weights(step: int, model: nn.Module, classes: Classes) -> None:
    """Go on from a mean of weights, with statistics of its own; SWA, arXiv:1803.05407."""
    means = vars(model).setdefault("means", [p.detach().clone() for p in model.parameters()])
    with torch.no_grad():
        for mean, param in zip(means, model.parameters(), strict=True):
            mean.lerp_(param, 0.02)
            if step == 2 * CHANGE - 50:
                param.copy_(mean)
    if step == 2 * CHANGE - 50:
        measure_statistics(model, classes)


def own_clipping(seed: int, guard: Bare) -> Modules:
    """A loop that clips to 0.1 before the healer's step."""
    classes, model = Classes(seed), mlp(16, 5)
    optimizer, loss_of = adam(model), cross_entropy(model)
    healer = guard.watch(model, optimizer)
    for batch in healer.batches(classes.stream()):
        loss = loss_of(batch)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        healer.step(loss)
        optimizer.zero_grad()
    return [model]


def without_batches(seed: int, guard: Bare) -> Modules:
    """A loop that never asks the healer for its batches: the task changes in the middle."""
    classes, model = Classes(seed), mlp(16, 5)
    optimizer, loss_of = adam(model), cross_entropy(model)
    healer = guard.watch(model, optimizer)
    for batch in classes.stream(lambda step, g, x, y: classes.draw(g, int(step >= CHANGE))):
        loss = loss_of(batch)
        loss.backward()
        healer.step(loss)
        optimizer.zero_grad()
    return [model]


SETUPS = {
    "LR up 1000 x after 500 low steps": plain(sgd(2e-4), low_then_high, steps=1200),
    "cyclic LR": plain(sgd(0.01), lambda o: schedulers.CyclicLR(o, 0.01, 0.3, 50)),
    "warm restarts": plain(
        schedule=lambda o: schedulers.CosineAnnealingWarmRestarts(o, 60, eta_min=1e-6)
    ),
    "large warm-up": plain(lambda m: adam(m, 1e-2), warm_up),
    "one cycle": plain(schedule=lambda o: schedulers.OneCycleLR(o, 2e-2, total_steps=STEPS + 1)),
    "LR ends at 0": plain(schedule=lambda o: schedulers.LinearLR(o, 1.0, 0.0, STEPS // 2)),
    "LR lowered by hand": by_hand(lambda step: 0.2 ** (step // 150)),
    "LR warmed up by hand": by_hand(lambda step: min((step + 1) / 200, 1.0)),
    "LR x 8 by hand, harmless": by_hand(lambda step: 0.25 if step < CHANGE else 2.0),
    "SGD": plain(sgd(0.05)),
    "SGD with momentum": plain(sgd(0.02, 0.9)),
    "Adam, large LR": plain(lambda m: Adam(m.parameters(), lr=1e-2, fused=True)),
    "RMSprop": plain(lambda m: RMSprop(m.parameters(), lr=1e-3)),
    "Adafactor": plain(lambda m: Adafactor(m.parameters())),
    "large weight decay": plain(lambda m: adam(m, weight_decay=1.0)),
    "dropout 0.5": plain(dropout=0.5),
    "batch of 1": plain(lambda m: adam(m, 5e-4), batch=1),
    "gradient accumulation": plain(accumulate=4, steps=4 * 300),
    "frozen, then unfrozen": frozen_then_unfrozen,
    "halves trained in turn": halves_in_turn,
    "heavy-tailed gradients": regression(student_t, F.mse_loss),
    "loss near zero": regression(lambda x, g: x[:, :1], lambda a, b: 1e-6 * F.mse_loss(a, b)),
    "negative loss": regression(
        lambda x, g: x[:, :1].sin(), gaussian_nll, outputs=2, steps=800, batch=64
    ),
    "hinge loss, mostly zero": regression(lambda x, g: x[:, :1].sign(), hinge, steps=800, batch=4),
    "edge of stability": full_batch_edge,
    "BatchNorm, batch of 4": norm_of_small_batches,
    "precise BatchNorm": with_statistics(measure_often),
    "BatchNorm statistics reset": with_statistics(reset_statistics),
    "BatchNorm momentum lowered": with_statistics(slow_statistics),
    "weights averaged, update_bn": with_statistics(average_weights),
    "InstanceNorm with statistics": with_statistics(
        lambda step, model, classes: None, lambda: TrackedInstances(48)
    ),
    "own clipping": own_clipping,
    "new task, loop without batches()": without_batches,
}
