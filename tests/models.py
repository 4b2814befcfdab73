"""Small models and parameters with gradients of a chosen norm."""

import torch
from torch import nn


def parameters_with_norms(norms, size=4, dtype=torch.float32):
    """One parameter for each norm, its gradient of equal elements."""
    params = [nn.Parameter(torch.zeros(size, dtype=dtype)) for _ in norms]
    set_norms(params, norms)
    return params


def set_norms(params, norms):
    for param, norm in zip(params, norms, strict=True):
        param.grad = torch.full_like(param, norm / param.numel() ** 0.5)


def norms_of(params):
    return [p.grad.double().norm().item() for p in params]


def make_model(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def backward(model, seed, scale=1.0):
    """Fill the gradients of the model with something that depends only on the seed."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(6, 5, generator=generator)
    model.zero_grad()
    (model(inputs).square().mean() * scale).backward()
