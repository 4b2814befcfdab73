"""Whatever number a loss is, the step is taken; what cannot be judged is said once."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from heal import Healer
from tests.heal.runs import quick


def stepped(make_loss):
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    healer = Healer(model, optimizer, config=quick(lag=0))
    before = model.weight.detach().clone()
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(torch.randn(3, 4)).square().mean()
        loss.backward()
        healer.step(make_loss(loss.detach()))
    healer.exits.dismiss()
    return healer, not torch.equal(before, model.weight)


@pytest.mark.parametrize(
    ("make", "value"),
    [
        (lambda loss: torch.tensor(2), 2.0),
        (lambda loss: torch.tensor(True), 1.0),
        (lambda loss: torch.tensor([2, 4]), 3.0),
        (lambda loss: torch.tensor(1.5).to(torch.float8_e4m3fn), 1.5),
        (lambda loss: torch.tensor(1.5).half(), 1.5),
        (lambda loss: torch.tensor([1.0, 2.0]).double(), 1.5),
        (lambda loss: 3, 3.0),
        (lambda loss: np.float32(1.5), 1.5),
        (lambda loss: np.ones(1), 1.0),
    ],
    ids=["int", "bool", "ints", "float8", "float16", "vector", "number", "numpy", "array"],
)
def test_every_real_number_is_judged(make, value):
    healer, has_moved = stepped(make)
    assert has_moved
    assert healer.latest.loss == value
    assert healer.notes == []


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda loss: torch.complex(loss, loss), "complex64"),
        (lambda loss: torch.zeros(0), "an empty tensor"),
        (lambda loss: torch.zeros(0, dtype=torch.int64), "an empty tensor"),
    ],
)
def test_one_that_cannot_be_judged_is_noted_and_the_step_is_taken(make, what):
    healer, has_moved = stepped(make)
    assert has_moved
    assert math.isnan(healer.latest.loss)
    (note,) = healer.notes
    assert note == f"loss: expected one real number, got {what}; this loss is not watched"


def test_what_is_no_number_is_refused_by_name():
    with pytest.raises(TypeError, match="loss: expected a tensor, a number or None, got dict"):
        stepped(lambda loss: {"loss": loss})
