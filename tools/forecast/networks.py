"""The parts of tiny networks of many kinds, each trained a hundred times at once.

Every tensor has a leading axis of runs, and no run sees another: the gradient of the summed losses
is the gradient of each. ``batch`` draws fresh data from a task of the run's own; ``shift`` moves
each run from its first task to its second, as a curriculum does.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional

Params = dict[str, Tensor]
Batch = tuple[Tensor, Tensor]

FEATURES, CLASSES, LENGTH, ALPHABET = 8, 4, 8, 8


@dataclass(frozen=True)
class Architecture:
    """A network and the task that it learns.

    ``init(runs, generator)`` makes weights, ``tasks(runs, generator)`` two tasks of each run,
    ``batch(tasks, shift, size, generator)`` data, and ``loss(params, batch)`` one loss per run.
    """

    name: str
    init: Callable[[int, torch.Generator], Params]
    tasks: Callable[[int, torch.Generator], Tensor]
    batch: Callable[[Tensor, Tensor, int, torch.Generator], Batch]
    loss: Callable[[Params, Batch], Tensor]


def weights(runs: int, generator: torch.Generator, *sizes: int) -> Params:
    """Weights w0, b0, w1 … of layers between these sizes, scaled to keep the variance."""
    params = {}
    for i, (before, after) in enumerate(pairwise(sizes)):
        scale = before**-0.5
        params[f"w{i}"] = scale * torch.randn(runs, before, after, generator=generator)
        params[f"b{i}"] = torch.zeros(runs, 1, after)
    return params


def dense(params: Params, i: int, x: Tensor) -> Tensor:
    """One layer of every run."""
    return torch.baddbmm(params[f"b{i}"], x, params[f"w{i}"])


def linear_tasks(outputs: int) -> Callable[[int, torch.Generator], Tensor]:
    """Tasks that are matrices, from the features to so many outputs."""

    def tasks(runs: int, generator: torch.Generator) -> Tensor:
        return torch.randn(runs, 2, FEATURES, outputs, generator=generator)

    return tasks


def mixed(tasks: Tensor, shift: Tensor) -> Tensor:
    """The task of each run, on its way from the first to the second."""
    return torch.lerp(tasks[:, 0], tasks[:, 1], shift.view(-1, 1, 1))


def regression(noise: float) -> Callable[..., Batch]:
    """Targets with noise of this deviation; bounded where that is small."""

    def batch(tasks: Tensor, shift: Tensor, size: int, generator: torch.Generator) -> Batch:
        x = torch.randn(len(tasks), size, FEATURES, generator=generator)
        y = torch.tanh(x @ mixed(tasks, shift)) if noise < 0.2 else x @ mixed(tasks, shift)
        return x, y + noise * torch.randn(y.shape, generator=generator)

    return batch


def classes(tasks: Tensor, shift: Tensor, size: int, generator: torch.Generator) -> Batch:
    """Which of the outputs is highest, with a little noise."""
    x = torch.randn(len(tasks), size, FEATURES, generator=generator)
    scores = x @ mixed(tasks, shift)
    scores = scores + 0.5 * torch.randn(scores.shape, generator=generator)
    return x, scores.argmax(-1)


def squared(prediction: Tensor, y: Tensor) -> Tensor:
    """Mean squared error of each run."""
    return (prediction - y).square().mean((1, 2))


def cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
    """Mean negative log-likelihood of the classes, of each run."""
    picked = logits.log_softmax(-1).gather(-1, y.unsqueeze(-1))
    return -picked.flatten(1).mean(1)


def linear_loss(params: Params, batch: Batch) -> Tensor:
    """Linear regression."""
    return squared(dense(params, 0, batch[0]), batch[1])


def mlp_loss(params: Params, batch: Batch) -> Tensor:
    """One hidden layer, classes."""
    return cross_entropy(dense(params, 1, dense(params, 0, batch[0]).relu()), batch[1])


def deep_loss(params: Params, batch: Batch) -> Tensor:
    """Six layers with tanh, regression."""
    x = batch[0]
    for i in range(5):
        x = dense(params, i, x).tanh()
    return squared(dense(params, 5, x), batch[1])


def residual_loss(params: Params, batch: Batch) -> Tensor:
    """Two residual blocks with layer norms, classes."""
    x = dense(params, 0, batch[0])
    for i in (1, 3):
        inner = functional.layer_norm(x, x.shape[-1:])
        x = x + dense(params, i + 1, functional.gelu(dense(params, i, inner)))
    return cross_entropy(dense(params, 5, functional.layer_norm(x, x.shape[-1:])), batch[1])


def autoencoder_loss(params: Params, batch: Batch) -> Tensor:
    """Through four numbers and back."""
    code = dense(params, 0, batch[0]).tanh()
    return squared(dense(params, 2, dense(params, 1, code).tanh()), batch[0])


def low_rank(tasks: Tensor, shift: Tensor, size: int, generator: torch.Generator) -> Batch:
    """Noisy data that three hidden numbers make, and the same without noise."""
    hidden = torch.randn(len(tasks), size, 3, generator=generator)
    x = hidden @ mixed(tasks, shift).transpose(1, 2)
    return x + 0.1 * torch.randn(x.shape, generator=generator), x


def likelihood_loss(params: Params, batch: Batch) -> Tensor:
    """Gaussian negative log-likelihood: the mean and the log-variance are learned; goes below 0."""
    mean, log_variance = dense(params, 1, dense(params, 0, batch[0]).tanh()).chunk(2, -1)
    log_variance = log_variance.clamp(-8.0, 8.0)
    squares = (batch[1] - mean).square() * (-log_variance).exp()
    return 0.5 * (squares + log_variance).mean((1, 2))


def convolution_loss(params: Params, batch: Batch) -> Tensor:
    """Filters of three features over all eight, classes."""
    windows = batch[0].unfold(2, 3, 1)  # [runs, samples, positions, 3]
    runs, samples, positions, _ = windows.shape
    hidden = dense(params, 0, windows.reshape(runs, samples * positions, 3)).relu()
    pooled = hidden.view(runs, samples, positions, -1).flatten(2)
    return cross_entropy(dense(params, 1, pooled), batch[1])


def recurrent_init(runs: int, generator: torch.Generator) -> Params:
    """Weights of a state of twelve numbers, and a head."""
    params = weights(runs, generator, 2 + 12, 12, 1)
    params["w0"][:, 2:] *= 0.9
    return params


def recurrent_tasks(runs: int, generator: torch.Generator) -> Tensor:
    """Weights of two series over time."""
    return torch.randn(runs, 2, 2, LENGTH, generator=generator) / math.sqrt(LENGTH)


def series(tasks: Tensor, shift: Tensor, size: int, generator: torch.Generator) -> Batch:
    """Two random series, and a weighted sum of them."""
    x = torch.randn(len(tasks), size, 2, LENGTH, generator=generator)
    y = (x * mixed(tasks, shift).unsqueeze(1)).sum((2, 3)).tanh()
    return x, (y + 0.05 * torch.randn(y.shape, generator=generator)).unsqueeze(-1)


def recurrent_loss(params: Params, batch: Batch) -> Tensor:
    """A plain recurrent network, regression."""
    x = batch[0]
    state = x.new_zeros(x.shape[0], x.shape[1], 12)
    for t in range(LENGTH):
        state = dense(params, 0, torch.cat([x[..., t], state], -1)).tanh()
    return squared(dense(params, 1, state), batch[1])


def attention_init(runs: int, generator: torch.Generator) -> Params:
    """Weights of one block of attention, with embeddings."""
    params = weights(runs, generator, 12, 36, 24, 12, ALPHABET)
    params["w1"] = params["w1"][:, :12].contiguous()  # after attention: width 12 to 24
    params["embed"] = 0.5 * torch.randn(runs, ALPHABET, 12, generator=generator)
    params["place"] = 0.5 * torch.randn(runs, LENGTH, 12, generator=generator)
    return params


def strides(runs: int, generator: torch.Generator) -> Tensor:
    """How far to count, for each run."""
    return torch.randint(1, ALPHABET, (runs, 2), generator=generator)


def sequences(tasks: Tensor, shift: Tensor, size: int, generator: torch.Generator) -> Batch:
    """Counting modulo the alphabet, by a stride of the run's own; some samples of its second."""
    runs = len(tasks)
    later = torch.rand(runs, size, generator=generator) < shift.unsqueeze(1)
    stride = torch.where(later, tasks[:, 1:], tasks[:, :1]).unsqueeze(-1)
    start = torch.randint(ALPHABET, (runs, size, 1), generator=generator)
    tokens = (start + stride * torch.arange(LENGTH + 1)) % ALPHABET
    wrong = torch.rand(tokens.shape, generator=generator) < 0.05
    other = torch.randint(ALPHABET, tokens.shape, generator=generator)
    tokens = torch.where(wrong, other, tokens)
    return tokens[..., :-1], tokens[..., 1:]


_MASK = torch.full((LENGTH, LENGTH), -1e9).triu(1)


def attention_loss(params: Params, batch: Batch) -> Tensor:
    """One block of causal attention, next token."""
    runs, samples, _ = batch[0].shape
    one_hot = functional.one_hot(batch[0], ALPHABET).float()
    x = (one_hot.flatten(1, 2) @ params["embed"]).view(runs, samples, LENGTH, 12)
    x = x + params["place"].unsqueeze(1)
    flat = functional.layer_norm(x, (12,)).flatten(1, 2)
    query, key, value = dense(params, 0, flat).view(runs, samples, LENGTH, 36).chunk(3, -1)
    looks = (query @ key.transpose(-1, -2) * 12**-0.5 + _MASK).softmax(-1)
    x = x + looks @ value
    flat = functional.layer_norm(x, (12,)).flatten(1, 2)
    inner = functional.gelu(dense(params, 1, flat))
    out = x.flatten(1, 2) + dense(params, 2, inner)
    logits = dense(params, 3, out).view(runs, samples, LENGTH, ALPHABET)
    return cross_entropy(logits.flatten(1, 2), batch[1].flatten(1, 2))


def policy_loss(params: Params, batch: Batch) -> Tensor:
    """REINFORCE on a contextual bandit: the loss hovers around 0 and says little of learning."""
    log_probs = dense(params, 1, dense(params, 0, batch[0]).tanh()).log_softmax(-1)
    with torch.no_grad():
        actions = (log_probs.exp().cumsum(-1) < batch[0][..., :1].frac().abs()).sum(-1)
        actions = actions.clamp(max=CLASSES - 1)
        reward = (actions == batch[1]).float()
        advantage = reward - reward.mean(1, keepdim=True)
    picked = log_probs.gather(-1, actions.unsqueeze(-1)).squeeze(-1)
    return -(advantage * picked).mean(1)
