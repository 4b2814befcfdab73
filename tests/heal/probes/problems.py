"""Problems whose answer is known in closed form."""

import torch
from torch import nn


class Quadratic(nn.Module):
    """0.5 * sum(spectrum * (w - centre) ** 2), turned so that no axis is special."""

    def __init__(self, spectrum, centre=0.0, seed=0):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        size = len(spectrum)
        turn, _ = torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64))
        self.hessian = turn @ torch.diag(torch.tensor(spectrum, dtype=torch.float64)) @ turn.T
        self.centre = torch.full((size,), centre, dtype=torch.float64)
        self.w = nn.Parameter(torch.randn(size, generator=generator, dtype=torch.float64))

    def forward(self, batch=None):
        off = self.w - self.centre
        return 0.5 * off @ self.hessian @ off


class Diagonal(nn.Module):
    """0.5 * sum(spectrum * w ** 2), for spectra too long for a matrix."""

    def __init__(self, spectrum, dtype=torch.float64):
        super().__init__()
        self.spectrum = torch.tensor(spectrum, dtype=dtype)
        self.w = nn.Parameter(torch.ones(len(spectrum), dtype=dtype))

    def forward(self, batch=None):
        return 0.5 * (self.spectrum * self.w.square()).sum()


class Line(nn.Module):
    """Linear regression with a half squared error: the gradient of a sample is residual * x."""

    def __init__(self, weights):
        super().__init__()
        self.w = nn.Parameter(torch.tensor(weights, dtype=torch.float64))

    def loss(self, batch):
        x, y = batch
        return 0.5 * (x @ self.w - y).square().mean()


class Noisy(nn.Module):
    """Everything that a probe could disturb: dropout, batch norm, an unused weight."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 1)
        )
        self.unused = nn.Parameter(torch.ones(3))

    def loss(self, batch):
        return (self.layers(batch) - batch.sum(1, keepdim=True)).square().mean()
