"""A state with all that makes snapshots hard, and a ring to take it into."""

import torch
from torch import nn

import zclip
from heal.snapshots import SnapshotRing
from heal.training_state import RngState, TrainingState


class Net(nn.Module):
    """Tied weights, BatchNorm, dropout, a mask of -inf and a buffer that is a view."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(6, 6, bias=False)
        self.norm = nn.BatchNorm1d(6)
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(6, 6)
        self.head.weight = self.embed.weight
        self.register_buffer("mask", torch.full((3, 3), -torch.inf), persistent=False)
        self.register_buffer("row", self.mask[0])
        self.register_buffer("wide", torch.ones(1).expand(4))

    def forward(self, x):
        return self.head(self.drop(self.norm(self.embed(x)).relu()))


torch.set_num_threads(1)  # tiny tensors: threads cost more than they bring

OPTIMIZERS = {
    "AdamW-fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "AdamW-amsgrad": lambda p: torch.optim.AdamW(p, lr=1e-2, amsgrad=True),
    "Adam-tensor-lr": lambda p: torch.optim.Adam(p, lr=torch.tensor(1e-2), fused=True),
    "SGD-momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, fused=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-2),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
    "LBFGS": lambda p: torch.optim.LBFGS(p, lr=1e-2, max_iter=2),
}


def build(optimizer="AdamW-fused", **settings):
    torch.manual_seed(0)
    model = Net()
    inner = OPTIMIZERS[optimizer](model.parameters())
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(inner, T_max=50)
    wrapped = zclip.wrap(inner, "zclip", warmup_steps=3)
    state = TrainingState(model, [wrapped], [scheduler])
    ring = SnapshotRing(
        **{"interval": 5, "count": 4, "memory_fraction": 2.0, "quarantine_steps": 2, **settings}
    )
    return state, ring


def train(state, steps):
    optimizer = state.optimizers[0]
    for _ in range(steps):

        def closure():
            optimizer.zero_grad()
            loss = state.model(torch.randn(8, 6)).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)
        state.schedulers[0].step()


def take(state, ring, step, **options):
    values = state.values() | {"rng": RngState.now()}
    return ring.capture(step, state.tensors(), values, **options)


def bytes_of(state):
    values = state.values()
    tensors = {key: t.clone() for key, t in state.tensors().items()}
    clips = values.pop("clip")
    return tensors, values, clips


def assert_same(first, second):
    assert first[0].keys() == second[0].keys()
    for key, tensor in first[0].items():
        assert torch.equal(tensor.nan_to_num(7), second[0][key].nan_to_num(7)), key
    assert str(first[1:]) == str(second[1:])
