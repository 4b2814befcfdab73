"""A dry run with schedulers that cycle the momentum, for optimizers of every kind that has one."""

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from heal import Healer


class AdafactorWithBetas(torch.optim.Adafactor):
    """Adafactor with a first moment's rate for schedulers to cycle; torch's own has none."""

    def __init__(self, params, betas=(0.9, 0.999)):
        super().__init__(params, lr=1e-2)
        self.defaults["betas"] = betas
        for group in self.param_groups:
            group["betas"] = betas


SCHEDULERS = {
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, 1e-3, 1e-2, cycle_momentum=True),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, 1e-2, total_steps=50),
}
OPTIMIZERS = {
    "Adafactor": AdafactorWithBetas,
    "AdamW": lambda params: torch.optim.AdamW(params, lr=1e-2),
    "SGD": lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9),
}


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("steps_before", [0, 3])
def test_a_dry_run_leaves_momentum_and_rate_as_they_were(optimizer, scheduler, steps_before):
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    inner = OPTIMIZERS[optimizer](model.parameters())
    schedule = SCHEDULERS[scheduler](inner)
    healer = Healer(model, inner, schedule)
    for _ in range(steps_before):
        loss = model(torch.randn(2, 4)).square().mean()
        loss.backward()
        healer.step(loss)
        inner.zero_grad()
    before = repr([{k: v for k, v in g.items() if k != "params"} for g in inner.param_groups])
    report = healer.dry_run(lambda batch: model(batch).square().mean(), [torch.randn(2, 4)] * 4)
    assert report.is_ok, report.problems
    assert before == repr(
        [{k: v for k, v in g.items() if k != "params"} for g in inner.param_groups]
    )
    healer.close()
