"""Twenty healthy runs, none of which is touched: four architectures, five ways to train each."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from heal import Healer, HealingConfig
from heal.actions import changes_training
from tests.heal.runs import Setup, TinyGpt, mlp, quick, seeded

STEPS = 160
lr = torch.optim.lr_scheduler


class TinyVit(nn.Module):
    """Patches of a small image through one attention block."""

    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(1, 16, 4, stride=4)
        self.block = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
        self.head = nn.Linear(16, 4)

    def forward(self, images):
        tokens = self.patches(images).flatten(2).transpose(1, 2)
        return self.head(self.block(tokens).mean(dim=1))


def cnn():
    layers = [nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(8 * 16, 4))


def images():
    pictures = torch.randn(256, 1, 8, 8)
    corners = [pictures[..., :4, :4], pictures[..., 4:, :4], pictures[..., :4, 4:]]
    sums = torch.stack([c.sum(dim=(1, 2, 3)) for c in [*corners, pictures[..., 4:, 4:]]], dim=1)
    return pictures, sums.argmax(dim=1)


def numbers():
    inputs = torch.randn(256, 8)
    return inputs, inputs[:, :1].sin()


def tokens():
    rows = (torch.randint(0, 16, (256, 1)) + 3 * torch.arange(9)) % 16
    return rows[:, :-1], rows[:, 1:]


def classes(output, target):
    return nn.functional.cross_entropy(output.reshape(-1, output.shape[-1]), target.reshape(-1))


MODELS = {
    "mlp": (mlp, numbers, nn.functional.mse_loss),
    "cnn": (cnn, images, classes),
    "gpt": (TinyGpt, tokens, classes),
    "vit": (TinyVit, images, classes),
}
WAYS = {
    "AdamW, warm-up and cosine": (
        lambda p: torch.optim.AdamW(p, lr=3e-3, fused=True),
        lambda o: lr.SequentialLR(
            o, [lr.LinearLR(o, 0.01, 1.0, 30), lr.CosineAnnealingLR(o, STEPS - 30)], [30]
        ),
    ),
    "AdamW, warm restarts": (
        lambda p: torch.optim.AdamW(p, lr=3e-3, fused=True),
        lambda o: lr.CosineAnnealingWarmRestarts(o, 40),
    ),
    "SGD momentum, steps": (
        lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9, nesterov=True, fused=True),
        lambda o: lr.StepLR(o, 50, 0.3),
    ),
    "Adam, one cycle": (
        lambda p: torch.optim.Adam(p, lr=1e-3, fused=True),
        lambda o: lr.OneCycleLR(o, 5e-3, total_steps=STEPS + 1),
    ),
    "Adagrad, constant": (lambda p: torch.optim.Adagrad(p, lr=0.02, fused=True), lambda o: None),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("model", MODELS)
def test_a_healthy_run_is_left_alone(model, way):
    seeded(1)
    make, data, loss = MODELS[model]
    network = make()
    loader = DataLoader(TensorDataset(*data()), batch_size=16, shuffle=True)
    optimizer = WAYS[way][0](network.parameters())
    setup = Setup(
        network,
        optimizer,
        loader,
        lambda batch: loss(network(batch[0]), batch[1]),
        WAYS[way][1](optimizer),
        quick(zclip_enabled=True),
    )
    healer = setup.run(STEPS)
    changed = [(d.cause, d.step) for _, d, plan in healer.history if changes_training(plan)]
    assert changed == []
    assert healer.notes == []
    assert healer.snapshots()[0] >= STEPS - 30


@pytest.mark.parametrize("zclip_enabled", [True, False], ids=["zclip", "unclipped"])
@pytest.mark.parametrize("change", ["other labels", "targets x 10"])
def test_a_curriculum_that_changes_at_once_is_left_alone(change, zclip_enabled):
    """Default settings: a model that is sure of itself is far worse than an untrained one then."""
    torch.manual_seed(0)
    centres, other = 3 * torch.randn(10, 16), torch.randperm(10)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    healer = Healer(model, optimizer, config=HealingConfig(zclip_enabled=zclip_enabled))
    for step in range(900):
        label, is_other = torch.randint(0, 10, (64,)), step >= 400
        inputs = centres[label] + torch.randn(64, 16)
        if change == "other labels":
            loss = classes(model(inputs), other[label] if is_other else label)
        else:
            scale = 10.0 if is_other else 1.0
            loss = (model(inputs) - scale * centres[label, :10]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        healer.step(loss)
    assert [plan for _, _, plan in healer.recovery.log if changes_training(plan)] == []
