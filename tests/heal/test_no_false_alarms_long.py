"""Twenty healthy runs of 1,200 steps under the settings that everybody begins with."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from heal import Healer, HealingConfig
from heal.actions import changes_training
from tests.heal.runs import seeded
from tests.heal.test_no_false_alarms import MODELS, classes, tokens

STEPS = 1200
WARMUP = 100
lr = torch.optim.lr_scheduler


class TinyLstm(nn.Module):
    """Predicts the next token from the last hidden state."""

    def __init__(self, alphabet=16, width=24):
        super().__init__()
        self.embed = nn.Embedding(alphabet, width)
        self.lstm = nn.LSTM(width, width, batch_first=True)
        self.head = nn.Linear(width, alphabet)

    def forward(self, rows):
        return self.head(self.lstm(self.embed(rows))[0])


def warm(optimizer, then):
    return lr.SequentialLR(optimizer, [lr.LinearLR(optimizer, 0.01, 1.0, WARMUP), then], [WARMUP])


ARCHITECTURES = {**MODELS, "lstm": (TinyLstm, tokens, classes)}
WAYS = {
    "AdamW, warm-up and cosine": (
        lambda p: torch.optim.AdamW(p, lr=3e-3, fused=True),
        lambda o: warm(o, lr.CosineAnnealingLR(o, STEPS - WARMUP)),
    ),
    "AdamW, warm-up and restarts": (
        lambda p: torch.optim.AdamW(p, lr=3e-3, weight_decay=0.1),
        lambda o: warm(o, lr.CosineAnnealingWarmRestarts(o, 100, 2)),
    ),
    "SGD momentum, one cycle": (
        lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, nesterov=True),
        lambda o: lr.OneCycleLR(o, 0.05, total_steps=STEPS + 1),
    ),
    "RMSprop, steps": (
        lambda p: torch.optim.RMSprop(p, lr=1e-3),
        lambda o: lr.StepLR(o, 300, 0.3),
    ),
}
RUNS = [(model, way) for model in ARCHITECTURES for way in WAYS]


@pytest.mark.slow
@pytest.mark.parametrize(("model", "way"), RUNS, ids=[f"{m}-{w}" for m, w in RUNS])
def test_a_long_healthy_run_under_the_defaults_is_left_alone(model, way):
    seeded(100 + RUNS.index((model, way)))
    make, data, loss = ARCHITECTURES[model]
    network = make()
    loader = DataLoader(TensorDataset(*data()), batch_size=16, shuffle=True)
    optimizer = WAYS[way][0](network.parameters())
    scheduler = WAYS[way][1](optimizer)
    healer = Healer(network, optimizer, scheduler, HealingConfig())
    healer.run(lambda b: loss(network(b[0]), b[1]), loader, STEPS, progress=False)
    changed = [(d.cause, d.step) for _, d, plan in healer.history if changes_training(plan)]
    assert changed == []
    assert healer.notes == []
    assert healer.last_step == STEPS - 1
