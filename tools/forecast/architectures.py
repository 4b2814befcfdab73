"""The tiny networks of the corpus, by name: weights, tasks, data and loss of each."""

from collections.abc import Callable

import torch

from tools.forecast import networks as net
from tools.forecast import variety as more
from tools.forecast.networks import Architecture, Params


def _init(*sizes: int) -> Callable[[int, torch.Generator], Params]:
    return lambda runs, generator: net.weights(runs, generator, *sizes)


def _stacked(*sizes: tuple[int, ...]) -> Callable[[int, torch.Generator], Params]:
    """Weights of several chains of layers, numbered through."""

    def init(runs: int, generator: torch.Generator) -> Params:
        made: Params = {}
        for chain in sizes:
            layers, number = net.weights(runs, generator, *chain), len(made) // 2
            made |= {f"{name[0]}{int(name[1:]) + number}": w for name, w in layers.items()}
        return made

    return init


_to = net.linear_tasks

_MADE = (
    Architecture("linear", _init(8, 1), _to(1), net.regression(0.3), net.linear_loss),
    Architecture("mlp", _init(8, 16, 4), _to(4), net.classes, net.mlp_loss),
    Architecture(
        "deep", _init(8, 12, 12, 12, 12, 12, 2), _to(2), net.regression(0.1), net.deep_loss
    ),
    Architecture(
        "residual", _init(8, 12, 24, 12, 24, 12, 4), _to(4), net.classes, net.residual_loss
    ),
    Architecture("autoencoder", _init(8, 4, 12, 8), _to(3), net.low_rank, net.autoencoder_loss),
    Architecture("likelihood", _init(8, 16, 2), _to(1), net.regression(0.05), net.likelihood_loss),
    Architecture(
        "convolution", _stacked((3, 6), (36, 4)), _to(4), net.classes, net.convolution_loss
    ),
    Architecture(
        "recurrent", net.recurrent_init, net.recurrent_tasks, net.series, net.recurrent_loss
    ),
    Architecture("attention", net.attention_init, net.strides, net.sequences, net.attention_loss),
    Architecture("policy", _init(8, 16, 4), _to(4), net.classes, net.policy_loss),
    Architecture("softmax", _init(8, 4), _to(4), net.classes, more.softmax_loss),
    Architecture("huber", _init(8, 16, 2), _to(2), more.outliers, more.huber_loss),
    Architecture("poisson", _init(8, 12, 1), _to(1), more.counts, more.poisson_loss),
    Architecture("contrastive", _init(8, 12, 4), _to(4), more.views, more.contrastive_loss),
    Architecture(
        "gated", _stacked((8, 12), (8, 12), (12, 1)), _to(4), net.classes, more.gated_loss
    ),
    Architecture("factors", more.factors_init, _to(2), more.ratings, more.factors_loss),
    Architecture(
        "variational", _stacked((8, 12, 4), (2, 12, 8)), _to(3), net.low_rank, more.variational_loss
    ),
    Architecture("margin", _init(8, 16, 4), _to(4), net.classes, more.margin_loss),
    Architecture("mixture", _init(8, 16, 9), _to(1), more.modes, more.mixture_loss),
    Architecture("normalised", _init(8, 16, 12, 4), _to(4), net.classes, more.normalised_loss),
    Architecture("preference", _init(8, 12, 1), _to(1), net.regression(0.1), more.preference_loss),
    Architecture(
        "gru", _stacked((10, 8), (10, 8), (8, 1)), net.recurrent_tasks, net.series, more.gru_loss
    ),
    Architecture(
        "experts", _stacked(*[(8, 8, 4)] * 3, (8, 3)), _to(4), net.classes, more.experts_loss
    ),
    Architecture("quantile", _init(8, 16, 1), _to(1), more.outliers, more.quantile_loss),
    Architecture("ranking", _init(8, 12, 1), _to(1), net.regression(0.1), more.ranking_loss),
)

ARCHITECTURES: dict[str, Architecture] = {made.name: made for made in _MADE}
"""By name. The losses of ``likelihood``, ``poisson`` and ``mixture`` go below zero; those of
``policy`` hover around it. The last four were written when all else was chosen: an exam."""

EXAM = ("gru", "experts", "quantile", "ranking")
