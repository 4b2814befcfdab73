"""Two networks over short sequences, to try the forecast with: a GRU and a transformer encoder."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Gru(nn.Module):
    """A recurrent network with one layer."""

    def __init__(self):
        super().__init__()
        self.cell = nn.GRU(3, 24, batch_first=True)
        self.head = nn.Linear(24, 1)

    def forward(self, x):
        return self.head(self.cell(x)[0][:, -1])


class Encoder(nn.Module):
    """A transformer block over six vectors."""

    def __init__(self):
        super().__init__()
        self.lift = nn.Linear(3, 16)
        self.block = nn.TransformerEncoderLayer(
            16, 2, 32, dropout=0.1, batch_first=True, norm_first=True
        )
        self.head = nn.Linear(6 * 16, 1)

    def forward(self, x):
        return self.head(self.block(self.lift(x)).flatten(1))


NETWORKS = {"gru": (Gru, 1e-2), "encoder": (Encoder, 5e-3)}


def setup(network, seed):
    """Return model, optimizer, loader and train_step; all that is random follows from the seed."""
    torch.manual_seed(seed)
    make, lr = NETWORKS[network]
    model = make()
    x = torch.randn(1024, 6, 3)
    y = torch.tanh(x.flatten(1) @ torch.randn(18, 1) / 3) + 0.05 * torch.randn(1024, 1)
    loader = DataLoader(TensorDataset(x, y), batch_size=16, shuffle=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=lr, fused=True)

    def train_step(batch):
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    return model, optimizer, loader, train_step
