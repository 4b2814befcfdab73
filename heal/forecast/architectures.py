"""Tiny networks of many kinds, each trained a hundred times at once.

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


def _weights(runs: int, generator: torch.Generator, *sizes: int) -> Params:
    """Weights w0, b0, w1 … of layers between these sizes, scaled to keep the variance."""
    params = {}
    for i, (before, after) in enumerate(pairwise(sizes)):
        scale = before**-0.5
        params[f"w{i}"] = scale * torch.randn(runs, before, after, generator=generator)
        params[f"b{i}"] = torch.zeros(runs, 1, after)
    return params


def _dense(params: Params, i: int, x: Tensor) -> Tensor:
    return torch.baddbmm(params[f"b{i}"], x, params[f"w{i}"])


def _linear_tasks(outputs: int) -> Callable[[int, torch.Generator], Tensor]:
    def tasks(runs: int, generator: torch.Generator) -> Tensor:
        return torch.randn(runs, 2, FEATURES, outputs, generator=generator)

    return tasks


def _mixed(tasks: Tensor, shift: Tensor) -> Tensor:
    return torch.lerp(tasks[:, 0], tasks[:, 1], shift.view(-1, 1, 1))


def _regression(noise: float) -> Callable[..., Batch]:
    def batch(tasks: Tensor, shift: Tensor, size: int, generator: torch.Generator) -> Batch:
        x = torch.randn(len(tasks), size, FEATURES, generator=generator)
        y = torch.tanh(x @ _mixed(tasks, shift)) if noise < 0.2 else x @ _mixed(tasks, shift)
        return x, y + noise * torch.randn(y.shape, generator=generator)

    return batch


def _classes(tasks: Tensor, shift: Tensor, size: int, generator: torch.Generator) -> Batch:
    x = torch.randn(len(tasks), size, FEATURES, generator=generator)
    scores = x @ _mixed(tasks, shift)
    scores = scores + 0.5 * torch.randn(scores.shape, generator=generator)
    return x, scores.argmax(-1)


def _squared(prediction: Tensor, y: Tensor) -> Tensor:
    return (prediction - y).square().mean((1, 2))


def _cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
    picked = logits.log_softmax(-1).gather(-1, y.unsqueeze(-1))
    return -picked.flatten(1).mean(1)


def _linear_loss(params: Params, batch: Batch) -> Tensor:
    return _squared(_dense(params, 0, batch[0]), batch[1])


def _mlp_loss(params: Params, batch: Batch) -> Tensor:
    return _cross_entropy(_dense(params, 1, _dense(params, 0, batch[0]).relu()), batch[1])


def _deep_loss(params: Params, batch: Batch) -> Tensor:
    x = batch[0]
    for i in range(5):
        x = _dense(params, i, x).tanh()
    return _squared(_dense(params, 5, x), batch[1])


def _residual_loss(params: Params, batch: Batch) -> Tensor:
    x = _dense(params, 0, batch[0])
    for i in (1, 3):
        inner = functional.layer_norm(x, x.shape[-1:])
        x = x + _dense(params, i + 1, functional.gelu(_dense(params, i, inner)))
    return _cross_entropy(_dense(params, 5, functional.layer_norm(x, x.shape[-1:])), batch[1])


def _autoencoder_loss(params: Params, batch: Batch) -> Tensor:
    code = _dense(params, 0, batch[0]).tanh()
    return _squared(_dense(params, 2, _dense(params, 1, code).tanh()), batch[0])


def _low_rank(tasks: Tensor, shift: Tensor, size: int, generator: torch.Generator) -> Batch:
    hidden = torch.randn(len(tasks), size, 3, generator=generator)
    x = hidden @ _mixed(tasks, shift).transpose(1, 2)
    return x + 0.1 * torch.randn(x.shape, generator=generator), x


def _likelihood_loss(params: Params, batch: Batch) -> Tensor:
    """Gaussian negative log-likelihood: the mean and the log-variance are learned; goes below 0."""
    mean, log_variance = _dense(params, 1, _dense(params, 0, batch[0]).tanh()).chunk(2, -1)
    log_variance = log_variance.clamp(-8.0, 8.0)
    squares = (batch[1] - mean).square() * (-log_variance).exp()
    return 0.5 * (squares + log_variance).mean((1, 2))


def _convolution_loss(params: Params, batch: Batch) -> Tensor:
    windows = batch[0].unfold(2, 3, 1)  # [runs, samples, positions, 3]
    runs, samples, positions, _ = windows.shape
    hidden = _dense(params, 0, windows.reshape(runs, samples * positions, 3)).relu()
    pooled = hidden.view(runs, samples, positions, -1).flatten(2)
    return _cross_entropy(_dense(params, 1, pooled), batch[1])


def _recurrent_init(runs: int, generator: torch.Generator) -> Params:
    params = _weights(runs, generator, 2 + 12, 12, 1)
    params["w0"][:, 2:] *= 0.9
    return params


def _recurrent_tasks(runs: int, generator: torch.Generator) -> Tensor:
    return torch.randn(runs, 2, 2, LENGTH, generator=generator) / math.sqrt(LENGTH)


def _series(tasks: Tensor, shift: Tensor, size: int, generator: torch.Generator) -> Batch:
    x = torch.randn(len(tasks), size, 2, LENGTH, generator=generator)
    y = (x * _mixed(tasks, shift).unsqueeze(1)).sum((2, 3)).tanh()
    return x, (y + 0.05 * torch.randn(y.shape, generator=generator)).unsqueeze(-1)


def _recurrent_loss(params: Params, batch: Batch) -> Tensor:
    x = batch[0]
    state = x.new_zeros(x.shape[0], x.shape[1], 12)
    for t in range(LENGTH):
        state = _dense(params, 0, torch.cat([x[..., t], state], -1)).tanh()
    return _squared(_dense(params, 1, state), batch[1])


def _attention_init(runs: int, generator: torch.Generator) -> Params:
    params = _weights(runs, generator, 12, 36, 24, 12, ALPHABET)
    params["w1"] = params["w1"][:, :12].contiguous()  # after attention: width 12 to 24
    params["embed"] = 0.5 * torch.randn(runs, ALPHABET, 12, generator=generator)
    params["place"] = 0.5 * torch.randn(runs, LENGTH, 12, generator=generator)
    return params


def _strides(runs: int, generator: torch.Generator) -> Tensor:
    return torch.randint(1, ALPHABET, (runs, 2), generator=generator)


def _sequences(tasks: Tensor, shift: Tensor, size: int, generator: torch.Generator) -> Batch:
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


def _attention_loss(params: Params, batch: Batch) -> Tensor:
    runs, samples, _ = batch[0].shape
    one_hot = functional.one_hot(batch[0], ALPHABET).float()
    x = (one_hot.flatten(1, 2) @ params["embed"]).view(runs, samples, LENGTH, 12)
    x = x + params["place"].unsqueeze(1)
    flat = functional.layer_norm(x, (12,)).flatten(1, 2)
    query, key, value = _dense(params, 0, flat).view(runs, samples, LENGTH, 36).chunk(3, -1)
    weights = (query @ key.transpose(-1, -2) * 12**-0.5 + _MASK).softmax(-1)
    x = x + weights @ value
    flat = functional.layer_norm(x, (12,)).flatten(1, 2)
    inner = functional.gelu(_dense(params, 1, flat))
    out = x.flatten(1, 2) + _dense(params, 2, inner)
    logits = _dense(params, 3, out).view(runs, samples, LENGTH, ALPHABET)
    return _cross_entropy(logits.flatten(1, 2), batch[1].flatten(1, 2))


def _policy_loss(params: Params, batch: Batch) -> Tensor:
    """REINFORCE on a contextual bandit: the loss hovers around 0 and says little of learning."""
    log_probs = _dense(params, 1, _dense(params, 0, batch[0]).tanh()).log_softmax(-1)
    with torch.no_grad():
        actions = (log_probs.exp().cumsum(-1) < batch[0][..., :1].frac().abs()).sum(-1)
        actions = actions.clamp(max=CLASSES - 1)
        reward = (actions == batch[1]).float()
        advantage = reward - reward.mean(1, keepdim=True)
    picked = log_probs.gather(-1, actions.unsqueeze(-1)).squeeze(-1)
    return -(advantage * picked).mean(1)


def _init(*sizes: int) -> Callable[[int, torch.Generator], Params]:
    return lambda runs, generator: _weights(runs, generator, *sizes)


ARCHITECTURES: dict[str, Architecture] = {
    made.name: made
    for made in (
        Architecture("linear", _init(8, 1), _linear_tasks(1), _regression(0.3), _linear_loss),
        Architecture("mlp", _init(8, 16, 4), _linear_tasks(4), _classes, _mlp_loss),
        Architecture(
            "deep",
            _init(8, 12, 12, 12, 12, 12, 2),
            _linear_tasks(2),
            _regression(0.1),
            _deep_loss,
        ),
        Architecture(
            "residual", _init(8, 12, 24, 12, 24, 12, 4), _linear_tasks(4), _classes, _residual_loss
        ),
        Architecture(
            "autoencoder", _init(8, 4, 12, 8), _linear_tasks(3), _low_rank, _autoencoder_loss
        ),
        Architecture(
            "likelihood", _init(8, 16, 2), _linear_tasks(1), _regression(0.05), _likelihood_loss
        ),
        Architecture(
            "convolution",
            lambda runs, g: _weights(runs, g, 3, 6) | _second(runs, g),
            _linear_tasks(4),
            _classes,
            _convolution_loss,
        ),
        Architecture("recurrent", _recurrent_init, _recurrent_tasks, _series, _recurrent_loss),
        Architecture("attention", _attention_init, _strides, _sequences, _attention_loss),
        Architecture("policy", _init(8, 16, 4), _linear_tasks(4), _classes, _policy_loss),
    )
}
"""By name. The losses of ``likelihood`` go below zero; those of ``policy`` hover around it."""


def _second(runs: int, generator: torch.Generator) -> Params:
    params = _weights(runs, generator, 36, 4)
    return {"w1": params["w0"], "b1": params["b0"]}
