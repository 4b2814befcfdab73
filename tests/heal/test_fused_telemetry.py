"""What a fused optimizer measures while it updates reaches the healer in that very step."""

import math

import pytest
import torch

import zclip
from heal import Healer, HealingConfig
from heal.record import Flag

QUIET = 1000  # no periodic check in these runs: what is found is found by telemetry


class Run:
    def __init__(self, optimizer=zclip.optim.AdamW, **settings):
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1)
        )
        self.optimizer = optimizer(self.model.parameters(), lr=3e-3, **settings)
        config = HealingConfig(snapshot_interval=20, check_interval=QUIET)
        self.healer = Healer(self.model, self.optimizer, config=config)
        self.records = []
        self.healer.on_record(self.records.append)
        self.data = torch.Generator().manual_seed(1)

    def forward(self, x):
        return (self.model(x) - x[:, :1].sin()).square().mean()

    def train(self, count):
        batches = [torch.randn(64, 8, generator=self.data) for _ in range(count)]
        loss = torch.tensor(math.nan)  # after a rollback all of these batches may be dropped
        for x in self.healer.batches(batches):
            loss = self.forward(x)
            loss.backward()
            self.healer.step(loss.detach())
            self.optimizer.zero_grad()
        return float(loss.detach())

    @property
    def weight(self):
        return self.model[0].weight

    def actions(self):
        return {type(action).__name__ for _, _, plan in self.healer.history for action in plan}


def test_a_healthy_run_has_no_foreign_write_and_is_that_of_the_bare_loop():
    run, bare = Run(), Run()
    run.train(150)
    healer, bare.healer = bare.healer, None
    healer.close()
    torch.manual_seed(0)
    for x in [torch.randn(64, 8, generator=bare.data) for _ in range(150)]:
        bare.forward(x).backward()
        bare.optimizer.step()
        bare.optimizer.zero_grad()
    assert not run.healer.history
    assert all(
        torch.equal(a, b)
        for a, b in zip(run.model.parameters(), bare.model.parameters(), strict=True)
    )


def test_a_weight_that_something_else_wrote_is_healed():
    run = Run()
    run.train(150)
    before = run.train(20)
    with torch.no_grad():
        run.weight.mul_(30.0)
    run.train(120)
    assert "Rollback" in run.actions()
    assert run.train(20) < 3 * before + 0.05
    assert next(r.step for r in run.records if r.has(Flag.FOREIGN_WRITE)) == 170


def test_a_write_that_does_no_harm_is_left_alone():
    run = Run()
    run.train(150)
    with torch.no_grad():
        run.weight.mul_(1.0001)
    kept = run.weight.detach().clone()
    run.train(60)
    assert "Rollback" not in run.actions()
    assert (run.weight - kept).abs().max() < 1.0


def test_an_infinite_moment_is_found_without_waiting_for_the_periodic_check():
    run = Run()
    run.train(100)
    run.optimizer.state[run.weight]["exp_avg_sq"][0, 0] = math.inf
    run.train(20)
    causes = [diagnosis.cause.value for _, diagnosis, _ in run.healer.history]
    assert "optimizer_corruption" in causes
    assert "Rollback" in run.actions()
    assert run.optimizer.state[run.weight]["exp_avg_sq"].isfinite().all()


def test_writes_that_are_a_habit_are_no_suspicion():
    run = Run()
    for _ in range(200):
        run.train(1)
        with torch.no_grad():
            run.weight.clamp_(-0.3, 0.3)
    assert run.healer.experiment.settled <= 1
    assert "Rollback" not in run.actions()


@pytest.mark.parametrize("clipper", ["zclip", None])
def test_gradients_are_clipped_once(clipper):
    settings = {} if clipper is None else {"clipper": clipper}
    run = Run(**settings)
    run.train(30)
    assert run.optimizer.clipper is None
    assert run.healer.optimizers[0].clipper is not None
    assert run.healer.optimizers[0].steps == 30


def test_what_a_rollback_wrote_is_no_suspicion():
    run = Run()
    run.train(150)
    run.healer.training.restore(run.healer.snapshots()[0])
    run.train(30)
    assert any(record.has(Flag.FOREIGN_WRITE) for record in run.records)
    assert run.healer.experiment.forwards == 0


def test_an_infinite_moment_is_found_where_foreign_writes_are_a_habit():
    run = Run()
    for step in range(125):  # checks come at powers of two
        run.train(1)
        with torch.no_grad():
            run.weight.clamp_(-0.3, 0.3)
        if step == 110:
            run.optimizer.state[run.weight]["exp_avg_sq"][0, 0] = math.inf
    causes = [diagnosis.cause.value for _, diagnosis, _ in run.healer.history]
    assert "optimizer_corruption" in causes
