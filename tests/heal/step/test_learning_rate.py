"""The learning rate is what the schedule says, or it is healed; it is never read off a device."""

import pytest
import torch
from torch.optim import lr_scheduler as schedules

from tests.fake_cuda import fake_cuda
from tests.heal.runs import regression

SCHEDULES = {
    "constant": lambda o: schedules.ConstantLR(o, 0.5, 5),
    "cosine": lambda o: schedules.CosineAnnealingLR(o, 40),
    "restarts": lambda o: schedules.CosineAnnealingWarmRestarts(o, 10),
    "cyclic": lambda o: schedules.CyclicLR(o, 1e-4, 1e-2, 10, cycle_momentum=False),
    "exponential": lambda o: schedules.ExponentialLR(o, 0.95),
    "lambda": lambda o: schedules.LambdaLR(o, lambda step: min(1.0, step / 10)),
    "linear": lambda o: schedules.LinearLR(o, 0.01, 1.0, 10),
    "multi step": lambda o: schedules.MultiStepLR(o, [10, 30]),
    "one cycle": lambda o: schedules.OneCycleLR(o, 1e-1, 90),
    "chained": lambda o: schedules.ChainedScheduler(
        [schedules.ConstantLR(o, 0.1, 5), schedules.ExponentialLR(o, 0.9)]
    ),
    "sequential": lambda o: schedules.SequentialLR(
        o, [schedules.LinearLR(o, 0.01, 1.0, 10), schedules.ExponentialLR(o, 0.9)], [10]
    ),
}


def run(make, steps=60, leap_at=None, group=0):
    setup = regression()
    setup.scheduler = make(setup.optimizer)
    healer = setup.healer()
    seen = []

    def train_step(batch):
        if healer.attempts - 1 == leap_at:
            setup.optimizer.param_groups[group]["lr"] *= 100
        seen.append(healer.latest)
        return setup.train_step(batch)

    healer.run(train_step, setup.loader, steps, progress=False)
    return setup, healer, seen


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_is_known_and_none_is_taken_for_a_leap(name):
    _, healer, seen = run(SCHEDULES[name])
    records = [record for record in seen if record is not None]
    assert all(record.lr == record.scheduled_lr for record in records)
    assert not healer.history


@pytest.mark.parametrize("name", ["constant", "cosine", "exponential", "sequential"])
def test_a_leap_is_healed_by_a_rollback_and_the_schedule_goes_on(name):
    calm, _, _ = run(SCHEDULES[name])
    setup, healer, _ = run(SCHEDULES[name], leap_at=35)
    first = healer.history[0]
    assert first[1].cause.value == "lr_spike"
    assert [type(action).__name__ for action in first[2]] == ["Rollback", "SkipBatches"]
    assert healer.lr_scale == 1.0
    ours, theirs = (s.optimizer.param_groups[0]["lr"] for s in (setup, calm))
    assert ours == pytest.approx(theirs)


def test_without_a_schedule_a_leap_is_only_reported():
    setup = regression()
    healer = setup.healer()
    assert healer.schedules.rates()[0] == 3e-3
    assert healer.schedules.rates()[1] != healer.schedules.rates()[1]
    params = setup.optimizer.param_groups[0]["params"]
    setup.optimizer.param_groups.append({"params": [params.pop()], "lr": 0.5})
    assert healer.schedules.rates()[0] == 3e-3
    setup.optimizer.param_groups[0]["lr"] = float("nan")
    assert healer.schedules.rates()[0] == 0.5
    healer.exits.dismiss()


def test_a_held_rate_is_held_though_it_rises_only_after_the_first_step():
    setup = regression(incident_steps=20)
    healer, seen = setup.healer(), []
    usual = setup.optimizer.param_groups[0]["lr"]
    setup.optimizer.register_step_pre_hook(
        lambda o, args, kwargs: seen.append(o.param_groups[0]["lr"])
    )

    def on_step(step):
        if step == 9:
            healer.training.hold_lr(usual)
        raised = 12 <= step < 40 or step >= 50
        setup.optimizer.param_groups[0]["lr"] = usual * (8.0 if raised else 1.0)

    healer.run(setup.train_step, setup.loader, 60, progress=False, on_step=on_step)
    assert seen[:51] == pytest.approx([usual] * 51)
    assert seen[51:] == pytest.approx([8.0 * usual] * 9)  # it came down by itself in between


def test_the_group_furthest_above_its_schedule_is_reported():
    setup = regression()
    params = list(setup.model.parameters())
    optimizer = torch.optim.SGD([{"params": params[:2], "lr": 1.0}, {"params": params[2:]}], lr=0.1)
    setup.optimizer, setup.scheduler = optimizer, schedules.ConstantLR(optimizer, 1.0)
    healer = setup.healer()
    optimizer.param_groups[1]["lr"] = 20.0
    assert healer.schedules.rates() == (20.0, 0.1)
    healer.exits.dismiss()


def test_a_rate_on_a_device_is_not_read_and_that_is_noted():
    setup = regression()
    healer = setup.healer()
    with fake_cuda():
        setup.optimizer.param_groups[0]["lr"] = torch.empty((), device="cuda")
        lr, _ = healer.schedules.rates()
    assert lr != lr
    assert "tensor on a device" in healer.notes[0]
    healer.exits.dismiss()
