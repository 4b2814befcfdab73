"""Set-ups whose objective is not a plain supervised loss."""

import math
from typing import Any

import torch
from torch import Generator, Tensor, nn

from benchmarks.healed_runs import Stream
from benchmarks.healthy.guards import Bare
from benchmarks.healthy.problems import CHANGE, STEPS, Classes, F, adam, cross_entropy, mlp

Modules = list[nn.Module]


def ring(count: int, g: Generator) -> Tensor:
    """Return points near eight places on a circle."""
    angle = torch.randint(8, (count,), generator=g) * (math.pi / 4)
    noise = torch.randn(count, 2, generator=g)
    return 2 * torch.stack([angle.cos(), angle.sin()], dim=1) + 0.05 * noise


def diffusion(seed: int, guard: Bare) -> Modules:
    torch.manual_seed(seed)
    model = mlp(3, 2)

    def loss_of(points: Tensor) -> Tensor:
        time, noise = torch.rand(len(points), 1), torch.randn_like(points)
        noisy = (1 - time).sqrt() * points + time.sqrt() * noise
        return F.mse_loss(model(torch.cat([noisy, time], dim=1)), noise)

    guard.train(model, adam(model), Stream(STEPS, lambda s, g: ring(64, g), seed), loss_of)
    return [model]


class Vae(nn.Module):
    """Codes of three numbers for inputs of sixteen."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = mlp(16, 6), mlp(3, 16)

    def forward(self, x: Tensor, weight: float) -> Tensor:
        mean, log_variance = self.encoder(x).chunk(2, dim=1)
        code = mean + (0.5 * log_variance).exp() * torch.randn_like(mean)
        divergence = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).sum(1).mean()
        return (self.decoder(code) - x).square().sum(1).mean() + weight * divergence


def vae(weight: Any) -> Any:
    """Return a VAE whose divergence counts by ``weight(step)``."""

    def setup(seed: int, guard: Bare) -> Modules:
        torch.manual_seed(seed)
        model, mix = Vae(), torch.randn(3, 16, generator=torch.Generator().manual_seed(seed))

        def make(step: int, g: Generator) -> Any:
            return torch.randn(32, 3, generator=g) @ mix, weight(step)

        guard.train(model, adam(model), Stream(STEPS, make, seed), lambda b: model(*b))
        return [model]

    return setup


class ModularSum(nn.Module):
    """Adds two numbers modulo a prime."""

    def __init__(self, prime: int = 23) -> None:
        super().__init__()
        self.embed, self.dense = nn.Embedding(prime, 24), mlp(48, prime, width=96)

    def forward(self, pairs: Tensor) -> Tensor:
        return self.dense(self.embed(pairs).flatten(1))


def grokking(lr: float, steps: int) -> Any:
    """Return a set-up of full batches and no decay; large rates make Adam leap now and then."""

    def setup(seed: int, guard: Bare) -> Modules:
        torch.manual_seed(seed)
        model, prime = ModularSum(), 23
        pairs = torch.cartesian_prod(torch.arange(prime), torch.arange(prime))
        chosen = pairs[torch.randperm(len(pairs))[: len(pairs) // 2]]
        data = chosen, chosen.sum(1) % prime
        optimizer = torch.optim.Adam(
            model.parameters(), lr=lr, betas=(0.9, 0.95), eps=1e-12, fused=True
        )
        stream = Stream(steps, lambda step, g: data, seed)
        guard.train(model, optimizer, stream, cross_entropy(model))
        return [model]

    return setup


def contrastive(seed: int, guard: Bare) -> Modules:
    classes = Classes(seed)
    model = mlp(16, 8)

    def loss_of(batch: Any) -> Tensor:
        x = batch[0]
        one, other = (F.normalize(model(x + 0.3 * torch.randn_like(x)), dim=1) for _ in range(2))
        return F.cross_entropy(one @ other.T / 0.1, torch.arange(len(x)))

    guard.train(model, adam(model), classes.stream(), loss_of)
    return [model]


class Experts(nn.Module):
    """Each sample goes to the best of four experts; most experts get none of some batches."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(16, 4)
        self.experts = nn.ModuleList(mlp(16, 5, width=24) for _ in range(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        share = self.gate(x).softmax(1)
        chosen = share.argmax(1)
        output = torch.zeros(len(x), 5)
        for number, expert in enumerate(self.experts):
            mine = (chosen == number).nonzero().squeeze(1)
            if len(mine):
                output = output.index_add(0, mine, expert(x[mine]) * share[mine, number, None])
        load = F.one_hot(chosen, 4).float().mean(0)
        return output, 4 * (load * share.mean(0)).sum()


def mixture_of_experts(seed: int, guard: Bare) -> Modules:
    classes = Classes(seed, batch=16)
    model = Experts()

    def loss_of(batch: Any) -> Tensor:
        output, balance = model(batch[0])
        return F.cross_entropy(output, batch[1]) + 0.01 * balance

    guard.train(model, adam(model), classes.stream(), loss_of)
    return [model]


def distillation(seed: int, guard: Bare) -> Modules:
    classes = Classes(seed)
    teacher, student = mlp(16, 5, width=96).requires_grad_(False), mlp(16, 5)

    def loss_of(batch: Any) -> Tensor:
        aims = (4 * teacher(batch[0])).softmax(1)
        return F.kl_div(student(batch[0]).log_softmax(1), aims, reduction="batchmean")

    guard.train(student, adam(student), classes.stream(), loss_of)
    return [student, teacher]


class Bootstrap(nn.Module):
    """A student that predicts what a slow copy of itself says of another view."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.predictor = mlp(16, 8), mlp(8, 8)
        self.teacher = mlp(16, 8).requires_grad_(False)
        self.teacher.load_state_dict(self.student.state_dict())

    def forward(self, x: Tensor) -> Tensor:
        views = [x + 0.3 * torch.randn_like(x) for _ in range(2)]
        aim = F.normalize(self.teacher(views[1]), dim=1)
        return (
            2 - 2 * (F.normalize(self.predictor(self.student(views[0])), dim=1) * aim).sum(1).mean()
        )

    @torch.no_grad()
    def follow(self) -> None:
        """Move the teacher a little towards the student."""
        for mean, now in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
            mean.lerp_(now, 0.02)


def slow_teacher(seed: int, guard: Bare) -> Modules:
    """The teacher follows after every step, and belongs to the model."""
    classes, model = Classes(seed), None
    model = Bootstrap()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=2e-3, fused=True)
    healer = guard.watch(model, optimizer)
    for x, _ in healer.batches(classes.stream()):
        loss = model(x)
        loss.backward()
        healer.step(loss)
        optimizer.zero_grad()
        model.follow()
    return [model]


def average_of_weights(change: bool) -> Any:
    """Return a set-up that keeps a mean of the weights which the healer knows nothing of.

    Args:
        change: whether the task changes in the middle, which a healer may want to look into.
    """

    def setup(seed: int, guard: Bare) -> Modules:
        classes, model = Classes(seed), mlp(16, 5)
        average = torch.optim.swa_utils.AveragedModel(
            model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.98)
        )
        optimizer, loss_of = adam(model), cross_entropy(model)
        healer = guard.watch(model, optimizer)
        stream = classes.stream(
            lambda step, g, x, y: classes.draw(g, int(change and step >= CHANGE))
        )
        for batch in healer.batches(stream):
            loss = loss_of(batch)
            loss.backward()
            healer.step(loss)
            optimizer.zero_grad()
            average.update_parameters(model)
        return [model, average]

    return setup


def bandit(seed: int, guard: Bare) -> Modules:
    """Policy gradients with a baseline: the loss is noise about zero and says nothing."""
    classes, model = Classes(seed), mlp(16, 5)

    def loss_of(batch: Any) -> Tensor:
        x, y = batch
        policy = torch.distributions.Categorical(logits=model(x))
        action = policy.sample()
        reward = (action == y).float()
        return -(policy.log_prob(action) * (reward - reward.mean())).mean()

    guard.train(model, adam(model), classes.stream(), loss_of)
    return [model]


def preferences(seed: int, guard: Bare) -> Modules:
    """As DPO: a loss that starts at ln 2, against a frozen reference."""
    classes = Classes(seed)
    model, reference = mlp(16, 5), mlp(16, 5).requires_grad_(False)
    reference.load_state_dict(model.state_dict())

    def loss_of(batch: Any) -> Tensor:
        x, y = batch
        gain = model(x).log_softmax(1) - reference(x).log_softmax(1)
        rows = torch.arange(len(x))
        return -F.logsigmoid(0.5 * (gain[rows, y] - gain[rows, (y + 1) % 5])).mean()

    guard.train(model, adam(model), classes.stream(), loss_of)
    return [model]


SETUPS = {
    "diffusion": diffusion,
    "VAE, KL annealed": vae(lambda step: min(step / 300, 1.0)),
    "VAE, KL annealed in cycles": vae(lambda step: step % 125 / 125),
    "VAE, KL switched on": vae(lambda step: float(step >= CHANGE)),
    "grokking": grokking(2e-3, 600),
    "grokking with slingshots": grokking(2e-2, 1000),
    "contrastive": contrastive,
    "mixture of experts": mixture_of_experts,
    "distillation": distillation,
    "EMA teacher in the model": slow_teacher,
    "EMA of the weights in the loop": average_of_weights(False),
    "EMA in the loop, new task": average_of_weights(True),
    "policy gradient, loss about zero": bandit,
    "preferences (DPO)": preferences,
}
