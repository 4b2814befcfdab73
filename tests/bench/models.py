"""Models as a user's factory would make them."""

import torch
from torch import nn


def small():
    """One tensor of it is frozen; most of it is bfloat16."""
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)).bfloat16()
    model[1].bias.requires_grad_(False)
    return model


def frozen():
    return nn.Linear(2, 2).requires_grad_(False)


def complex_():
    return nn.ParameterList([nn.Parameter(torch.zeros(2, dtype=torch.complex64))])
