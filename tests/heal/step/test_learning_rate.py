"""The learning rate is what the schedule says, or is put back; it is never read off a device."""

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


def run(make, steps=60):
    setup = regression()
    setup.scheduler = make(setup.optimizer)
    healer = setup.healer()
    seen = []

    def train_step(batch):
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


def by_hand(make, changes, expects=False, steps=60):
    """Train with a schedule while the loop itself sets the rate: factors by step."""
    setup = regression(zclip_enabled=False)
    setup.scheduler = make(setup.optimizer)
    healer, used, group = setup.healer(), [], setup.optimizer.param_groups[0]
    setup.optimizer.register_step_pre_hook(lambda o, args, kwargs: used.append(group["lr"]))

    def train_step(batch):
        if (step := healer.last_step + 1) in changes:
            group["lr"] *= changes[step]
            if expects:
                healer.expect_change("lower rate")
        return setup.train_step(batch)

    healer.run(train_step, setup.loader, steps, progress=False)
    return setup, healer, used


@pytest.mark.parametrize("factor", [0.0, 0.1, 8.0, 1000.0, -1.0])
@pytest.mark.parametrize("name", ["constant", "cosine", "exponential", "lambda", "sequential"])
def test_a_rate_that_leaves_its_schedule_is_put_back_before_the_step(name, factor):
    calm, _, as_scheduled = by_hand(SCHEDULES[name], {})
    setup, healer, used = by_hand(SCHEDULES[name], {35: factor})
    assert used == as_scheduled
    assert all(map(torch.equal, setup.model.parameters(), calm.model.parameters()))
    ((_, diagnosis, plan),) = healer.history
    assert (diagnosis.cause.value, plan) == ("lr_spike" if factor > 1 else "lr_drop", ())
    assert "is put back before the step" in diagnosis.evidence["advice"]


def test_a_rate_that_is_a_tensor_is_put_back_in_place():
    setup = regression()
    group, lr = setup.optimizer.param_groups[0], torch.tensor(0.3)  # 0.3 is no float32
    group["lr"] = lr
    setup.scheduler = schedules.LambdaLR(setup.optimizer, lambda step: 1.0)
    healer = setup.healer()
    healer.monitor.facts()
    lr.fill_(0.0)
    assert healer.monitor.facts().lr == 0.0
    assert group["lr"] is lr
    assert float(lr) == pytest.approx(0.3)
    healer.exits.dismiss()


def test_a_rate_that_the_loop_sets_again_is_left_alone():
    _, healer, used = by_hand(SCHEDULES["exponential"], {20: 0.5, 30: 0.5, 40: 0.5})
    expected = [3e-3 * 0.95**step * 0.5 ** (step >= 30) * 0.5 ** (step >= 40) for step in range(60)]
    assert used == pytest.approx(expected)
    assert [d.cause.value for _, d, _ in healer.history] == ["lr_drop"] * 3


def test_a_warm_up_of_the_loops_own_beside_a_schedule_is_left_alone():
    factors = [(step + 1) / 20 for step in range(20)]
    changes = {0: factors[0], **{s: factors[s] / factors[s - 1] for s in range(1, 20)}}
    used = by_hand(SCHEDULES["exponential"], changes)[2]
    assert used[:20] == pytest.approx([3e-3 * 0.95**s * factors[s] for s in range(20)])


def test_a_change_that_was_announced_stays():
    _, healer, used = by_hand(SCHEDULES["exponential"], {30: 0.1}, expects=True)
    assert used[30] == pytest.approx(3e-4 * 0.95**30)
    assert not healer.history


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


@pytest.mark.parametrize("lr", [0.0, 0.02, 20.0])
def test_the_group_furthest_off_its_schedule_is_reported(lr):
    setup = regression()
    params = list(setup.model.parameters())
    optimizer = torch.optim.SGD([{"params": params[:2], "lr": 1.0}, {"params": params[2:]}], lr=0.1)
    setup.optimizer, setup.scheduler = optimizer, schedules.ConstantLR(optimizer, 1.0)
    healer = setup.healer()
    optimizer.param_groups[1]["lr"] = lr
    assert healer.schedules.rates() == (lr, 0.1)
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
