"""Several schedules on one optimizer: a healthy rate is no leap, a leap is found, rates return."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as schedules

from heal import Healer
from heal.integrations.lightning import LightningSchedule
from tests.heal.runs import quick, roll_back_after_skipped

EPOCH, EPOCHS = 30, 4
BAD = range(63, 68)  # soon after the second epoch, of whose end no good snapshot is


def warm_up(optimizer):
    return schedules.LinearLR(optimizer, 1e-3, 1.0, total_iters=80)


def plateau(optimizer):
    return schedules.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)


def per_epoch(optimizer):
    return schedules.StepLR(optimizer, 2, 0.5)


class Counting:
    """A schedule that says neither whose it is nor where."""

    def __init__(self, optimizer):
        self.group, self.taken = optimizer.param_groups[0], 0

    def step(self):
        self.taken += 1
        self.group["lr"] = min(0.01, 1e-5 * 1.2**self.taken)

    def state_dict(self):
        return {"taken": self.taken}

    def load_state_dict(self, state):
        self.taken = state["taken"]


class Loop:
    """A hand-written loop: the healer steps ``given``, the loop steps ``own`` after each epoch."""

    def __init__(self, make_given, make_own, own_as="own_schedulers", bad=(), leap_at=None, **how):
        torch.manual_seed(0)
        self.model = nn.Linear(4, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=how.pop("lr", 0.01))
        self.given, self.own = make_given(self.optimizer), make_own(self.optimizer)
        given = [self.given, self.own] if own_as == "scheduler" else self.given
        own = [self.own] if own_as == "own_schedulers" else None
        config = quick(lr_factor=1.0, **how)
        self.healer = Healer(self.model, self.optimizer, given, config, own_schedulers=own)
        self.healer.exits.dismiss()
        roll_back_after_skipped(self.healer)
        self.bad, self.leap_at, self.taken = bad, leap_at, 0
        self.used, self.wanted = {}, []
        self.optimizer.register_step_pre_hook(self._note)

    def _note(self, optimizer, *_):
        self.used[self.healer.last_step + 1] = float(optimizer.param_groups[0]["lr"])

    def train(self):
        for _ in range(EPOCHS):
            for batch in self.healer.batches([torch.randn(8, 4) for _ in range(EPOCH)]):
                loss = self.model(batch).square().mean()
                if self.taken == self.leap_at:
                    self.optimizer.param_groups[0]["lr"] *= 1000
                (loss * float("nan") if self.taken in self.bad else loss).backward()
                self.healer.step(loss.detach())
                self.optimizer.zero_grad()
                self.taken += 1
            self.own.step(*([1.0] if isinstance(self.own, schedules.ReduceLROnPlateau) else []))
        return self

    @property
    def causes(self):
        return [diagnosis.cause.value for _, diagnosis, _ in self.healer.history]


@pytest.mark.parametrize("own_as", ["own_schedulers", "scheduler"])
@pytest.mark.parametrize("lr", [0.01, torch.tensor(0.01)], ids=["number", "tensor"])
def test_a_warm_up_beside_a_plateau_is_left_alone(own_as, lr):
    causes = Loop(warm_up, plateau, own_as, lr=lr).train().causes
    assert set(causes) <= {"not_learning"}  # which is true, and changes nothing


@pytest.mark.parametrize("given", [warm_up, Counting], ids=["torch", "other"])
def test_a_warm_up_beside_a_schedule_that_counts_epochs_is_left_alone(given):
    assert Loop(given, per_epoch).train().causes == []


def test_a_warm_up_that_was_not_given_is_left_alone_beside_a_plateau_that_was():
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    warm, slow = warm_up(optimizer), plateau(optimizer)
    healer = Healer(model, optimizer, config=quick(), own_schedulers=slow)
    for batch in healer.batches([torch.randn(8, 4) for _ in range(EPOCH)]):
        loss = model(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        healer.step(loss)
        warm.step()
    assert all(plan == () for _, _, plan in healer.history)
    assert not any(diagnosis.evidence["measured"] for _, diagnosis, _ in healer.history)
    assert optimizer.param_groups[0]["lr"] == warm.get_last_lr()[0]
    healer.exits.dismiss()


@pytest.mark.parametrize("own", [plateau, per_epoch])
@pytest.mark.parametrize("leap_at", [45, EPOCH], ids=["between", "right after an own turn"])
def test_a_leap_is_found_beside_two_schedules_and_healed(own, leap_at):
    calm, hurt = Loop(warm_up, own).train(), Loop(warm_up, own, leap_at=leap_at, lag=0).train()
    assert hurt.causes[0] == "lr_spike"
    assert hurt.optimizer.param_groups[0]["lr"] <= calm.optimizer.param_groups[0]["lr"]


@pytest.mark.parametrize("own", [plateau, per_epoch])
def test_after_a_rollback_own_schedules_go_on_and_the_others_return(own):
    hurt = Loop(warm_up, own, bad=BAD).train()
    calm = Loop(warm_up, lambda optimizer: schedules.ConstantLR(optimizer, 1.0)).train()
    assert len(hurt.causes) > 1
    halvings = {plateau: [0, 1, 2], per_epoch: [0, 1]}[own]
    for step, lr in hurt.used.items():
        assert any(lr == pytest.approx(calm.used[step] * 0.5**n) for n in halvings), step
    end = {plateau: 0.5**3, per_epoch: 0.5**2}[own]
    assert hurt.optimizer.param_groups[0]["lr"] == pytest.approx(0.01 * end, rel=1e-6)


@pytest.mark.parametrize("has_warm_up", [False, True])
def test_lightnings_schedule_of_epochs_does_not_take_back_the_turns_of_another(has_warm_up):
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    warm = warm_up(optimizer) if has_warm_up else None
    config = SimpleNamespace(scheduler=plateau(optimizer), interval="epoch", reduce_on_plateau=True)
    schedule = LightningSchedule(config, lambda: False)
    (group,) = optimizer.param_groups
    for _ in range(20 if has_warm_up else 0):
        optimizer.step()
        warm.step()
    saved, rate = schedule.state_dict(), group["lr"]
    if not has_warm_up:
        for _ in range(2):
            config.scheduler.step(1.0)
        group["lr"] = 0.01  # as the snapshot has it
        rate = 0.005
    schedule.load_state_dict(saved)
    assert group["lr"] == rate


@pytest.mark.parametrize("own", [plateau, per_epoch])
def test_with_replay_both_return_and_every_step_has_the_rate_that_it_had(own):
    calm = Loop(warm_up, own, after_rollback="replay_data").train()
    hurt = Loop(warm_up, own, after_rollback="replay_data", bad=BAD).train()
    assert len(hurt.causes) > 1
    # The epoch that failed is shorter by the batches left out, and so the next begins sooner.
    for step in range(BAD.stop):
        assert hurt.used[step] == pytest.approx(calm.used[step], rel=1e-9), step
