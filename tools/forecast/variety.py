"""More tiny networks, for variety of losses: robust, counting, contrastive, variational and others.

As those of :mod:`tools.forecast.architectures`: every tensor has a leading axis of runs.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional

from tools.forecast.networks import (
    ALPHABET,
    FEATURES,
    Batch,
    Params,
    cross_entropy,
    dense,
    mixed,
    squared,
)

DEGREES = 3.0  # of freedom: outliers, but a finite variance


def outliers(tasks: Tensor, shift: Tensor, size: int, generator: torch.Generator) -> Batch:
    """Regression whose targets have heavy tails."""
    x = torch.randn(len(tasks), size, FEATURES, generator=generator)
    y = torch.tanh(x @ mixed(tasks, shift))
    normal = torch.randn(y.shape, generator=generator)
    squares = torch.randn((*y.shape, int(DEGREES)), generator=generator).square().mean(-1)
    return x, y + 0.1 * normal / squares.sqrt().clamp(min=0.05)


def counts(tasks: Tensor, shift: Tensor, size: int, generator: torch.Generator) -> Batch:
    """Counts with a mean that depends on the features."""
    x = torch.randn(len(tasks), size, FEATURES, generator=generator)
    mean = torch.exp(0.5 + (x @ mixed(tasks, shift)).tanh())
    return x, torch.poisson(mean, generator=generator)


def views(tasks: Tensor, shift: Tensor, size: int, generator: torch.Generator) -> Batch:
    """Two noisy views of the same thing, mixed by the task."""
    hidden = torch.randn(len(tasks), size, tasks.shape[-1], generator=generator)
    mixing = mixed(tasks, shift).transpose(1, 2)
    noise = 0.3 * torch.randn(2, len(tasks), size, FEATURES, generator=generator)
    return hidden @ mixing + noise[0], hidden @ mixing + noise[1]


def ratings(tasks: Tensor, shift: Tensor, size: int, generator: torch.Generator) -> Batch:
    """Pairs of a user and an item, and how much one likes the other."""
    runs = len(tasks)
    pairs = torch.randint(ALPHABET, (runs, size, 2), generator=generator)
    taste = mixed(tasks, shift)
    liked = torch.tanh(taste @ taste.transpose(1, 2) / 2)
    rows = torch.arange(runs).view(-1, 1)
    y = liked[rows, pairs[..., 0], pairs[..., 1]]
    return pairs, (y + 0.1 * torch.randn(y.shape, generator=generator)).unsqueeze(-1)


def modes(tasks: Tensor, shift: Tensor, size: int, generator: torch.Generator) -> Batch:
    """Regression with two answers, one at random."""
    x = torch.randn(len(tasks), size, FEATURES, generator=generator)
    sign = torch.randint(2, (len(tasks), size, 1), generator=generator) * 2.0 - 1.0
    y = sign * torch.tanh(x @ mixed(tasks, shift))
    return x, y + 0.1 * torch.randn(y.shape, generator=generator)


def softmax_loss(params: Params, batch: Batch) -> Tensor:
    """Linear classifier."""
    return cross_entropy(dense(params, 0, batch[0]), batch[1])


def huber_loss(params: Params, batch: Batch) -> Tensor:
    """One hidden layer, an error that grows linearly from 1 on."""
    off = dense(params, 1, dense(params, 0, batch[0]).relu()) - batch[1]
    return functional.smooth_l1_loss(off, torch.zeros_like(off), reduction="none").mean((1, 2))


def poisson_loss(params: Params, batch: Batch) -> Tensor:
    """Log-likelihood of counts, up to what does not depend on the model; may be below zero."""
    rate = dense(params, 1, dense(params, 0, batch[0]).tanh()).clamp(-8.0, 8.0)
    return (rate.exp() - batch[1] * rate).mean((1, 2))


def contrastive_loss(params: Params, batch: Batch) -> Tensor:
    """Find the other view of the same thing among those of the batch."""
    codes = [
        functional.normalize(dense(params, 1, dense(params, 0, view).relu()), dim=-1, eps=1e-6)
        for view in batch
    ]
    alike = codes[0] @ codes[1].transpose(1, 2) / 0.3
    own = torch.arange(alike.shape[1]).expand(alike.shape[:2])
    return cross_entropy(alike, own)


def gated_loss(params: Params, batch: Batch) -> Tensor:
    """A gated unit and a yes or no."""
    gated = dense(params, 0, batch[0]) * dense(params, 1, batch[0]).sigmoid()
    logits = dense(params, 2, gated)[..., 0]
    return functional.softplus(torch.where(batch[1] > 1, -logits, logits)).mean(1)


def factors_loss(params: Params, batch: Batch) -> Tensor:
    """A rating is the product of two embeddings."""
    one_hot = functional.one_hot(batch[0], ALPHABET).float()
    user = one_hot[..., 0, :] @ params["users"]
    item = one_hot[..., 1, :] @ params["items"]
    return squared((user * item).sum(-1, keepdim=True), batch[1])


def factors_init(runs: int, generator: torch.Generator) -> Params:
    """Embeddings of users and items."""
    made = torch.randn(2, runs, ALPHABET, 6, generator=generator) * 6**-0.25
    return {"users": made[0].clone(), "items": made[1].clone()}


def variational_loss(params: Params, batch: Batch) -> Tensor:
    """Reconstruction and divergence of a small variational autoencoder; its noise is a hash of
    the data, so that the loss is a function of the batch."""
    mean, log_variance = dense(params, 1, dense(params, 0, batch[0]).tanh()).chunk(2, -1)
    log_variance = log_variance.clamp(-6.0, 6.0)
    noise = torch.erfinv(1.998 * (batch[0][..., : mean.shape[-1]] * 997.0).frac().abs() - 0.999)
    code = mean + (0.5 * log_variance).exp() * noise * math.sqrt(2.0)
    made = dense(params, 3, dense(params, 2, code).tanh())
    divergence = (mean.square() + log_variance.exp() - 1.0 - log_variance).sum(-1).mean(1)
    return _per_sample(made, batch[1]) + 0.05 * divergence


def _per_sample(made: Tensor, wanted: Tensor) -> Tensor:
    return (made - wanted).square().sum(-1).mean(1)


def margin_loss(params: Params, batch: Batch) -> Tensor:
    """Hinge: correct by a margin costs nothing."""
    scores = dense(params, 1, dense(params, 0, batch[0]).relu())
    right = scores.gather(-1, batch[1].unsqueeze(-1))
    short = (1.0 + scores - right).relu()
    return (short.sum(-1) - 1.0).mean(1)


def mixture_loss(params: Params, batch: Batch) -> Tensor:
    """A mixture of normal densities; below zero once it is narrow."""
    made = dense(params, 1, dense(params, 0, batch[0]).tanh())
    share, mean, log_deviation = made.chunk(3, -1)
    log_deviation = log_deviation.clamp(-4.0, 4.0)
    off = (batch[1] - mean) * (-log_deviation).exp()
    density = share.log_softmax(-1) - 0.5 * off.square() - log_deviation
    return -density.logsumexp(-1).mean(1)


def normalised_loss(params: Params, batch: Batch) -> Tensor:
    """Every layer's outputs are normalised over the batch."""
    x = batch[0]
    for i in (0, 1):
        x = dense(params, i, x)
        x = (x - x.mean(1, keepdim=True)) / (x.var(1, keepdim=True, unbiased=False) + 1e-3).sqrt()
        x = x.relu()
    return cross_entropy(dense(params, 2, x), batch[1])


def preference_loss(params: Params, batch: Batch) -> Tensor:
    """Which of two is better, by the difference of their scores: starts at log 2."""
    first, second = batch[0].chunk(2, 1)
    scores = [dense(params, 1, dense(params, 0, x).tanh())[..., 0] for x in (first, second)]
    worth = batch[1][..., 0].chunk(2, 1)
    off = scores[0] - scores[1]
    return functional.softplus(torch.where(worth[0] > worth[1], -off, off)).mean(1)


def gru_loss(params: Params, batch: Batch) -> Tensor:
    """A recurrent unit that decides how much to keep."""
    x = batch[0]
    state = x.new_zeros(x.shape[0], x.shape[1], 8)
    for t in range(x.shape[-1]):
        seen = torch.cat([x[..., t], state], -1)
        keep = dense(params, 0, seen).sigmoid()
        state = keep * state + (1.0 - keep) * dense(params, 1, seen).tanh()
    return squared(dense(params, 2, state), batch[1])


def experts_loss(params: Params, batch: Batch) -> Tensor:
    """Three small experts, and a gate that weighs what they say."""
    said = [dense(params, 2 * i + 1, dense(params, 2 * i, batch[0]).relu()) for i in range(3)]
    gate = dense(params, 6, batch[0]).softmax(-1).unsqueeze(-2)
    return cross_entropy((torch.stack(said, -1) * gate).sum(-1), batch[1])


def quantile_loss(params: Params, batch: Batch) -> Tensor:
    """The value that nine of ten lie below."""
    off = batch[1] - dense(params, 1, dense(params, 0, batch[0]).tanh())
    return torch.maximum(0.9 * off, -0.1 * off).mean((1, 2))


def ranking_loss(params: Params, batch: Batch) -> Tensor:
    """Which sample of the batch is the best one."""
    scores = dense(params, 1, dense(params, 0, batch[0]).relu())[..., 0]
    return cross_entropy(scores.unsqueeze(1), batch[1][..., 0].argmax(-1, keepdim=True))
