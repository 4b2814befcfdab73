"""State beside the model: what is added is exact in rollbacks and checkpoints."""

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

from heal import Healer, HealingConfig

STEPS = 80
QUICK = {
    "snapshot_interval": 10,
    "check_interval": 10,
    "quarantine_steps": 4,
    "after_rollback": "replay_data",
}


class Run:
    """A run with a moving average of its weights that is updated after ``step``."""

    def __init__(self, checkpoint_dir=None, adds=True, **settings):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.ema = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        inputs = torch.randn(160, 8)
        self.loader = DataLoader(TensorDataset(inputs, inputs[:, :1].sin()), 8, shuffle=True)
        config = HealingConfig(**{**QUICK, **settings})
        self.healer = Healer(
            self.model, self.optimizer, config=config, checkpoint_dir=checkpoint_dir
        )
        if adds:
            self.healer.add_state("ema", self.ema.state_dict, self.ema.load_state_dict)

    def train(self, steps=STEPS, corrupt_at=None):
        call = 0
        while self.healer.last_step < steps - 1:
            for x, y in self.healer.batches(self.loader):
                if call == corrupt_at:
                    self.model[0].weight.data[0, 0] = float("nan")
                loss = nn.functional.mse_loss(self.model(x), y)
                loss.backward()
                self.healer.step(loss)
                self.optimizer.zero_grad()
                self.ema.update_parameters(self.model)
                call += 1
                if self.healer.last_step >= steps - 1:
                    break
        return self

    def weights(self):
        return [t.clone() for t in (*self.model.state_dict().values(), *self.average())]

    def average(self):
        return [t.clone() for t in self.ema.state_dict().values()]


def same(first, second):
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("corrupt_at", [23, 45, 49, 50, 51])
def test_a_moving_average_is_that_of_the_run_that_never_failed(corrupt_at):
    sound = Run().train()
    healed = Run().train(corrupt_at=corrupt_at)
    assert len(healed.healer.recoveries) == 1
    assert same(healed.weights(), sound.weights())


def test_what_is_not_added_stays_as_it_is():
    healed = Run(adds=False).train(corrupt_at=45)
    assert not same(healed.average(), Run().train().average())


@pytest.mark.parametrize("adds_late", [False, True])
def test_a_checkpoint_holds_it_exactly(tmp_path, adds_late):
    settings = {"checkpoint_interval": 20, "checkpoint_async": False}
    sound = Run().train()
    Run(tmp_path, **settings).train(steps=45).healer.close()
    resumed = Run(tmp_path, adds=not adds_late, **settings)
    assert resumed.healer.resume() == 40
    if adds_late:
        resumed.healer.add_state("ema", resumed.ema.state_dict, resumed.ema.load_state_dict)
    resumed.train()
    assert same(resumed.weights(), sound.weights())
    resumed.healer.close()


def test_run_with_a_moving_average_in_on_step():
    def train(corrupt_at=None):
        run = Run()
        calls = iter(range(10_000))

        def train_step(batch):
            if next(calls) == corrupt_at:
                run.model[0].weight.data[0, 0] = float("nan")
            return nn.functional.mse_loss(run.model(batch[0]), batch[1])

        run.healer.run(
            train_step,
            run.loader,
            STEPS,
            progress=False,
            on_step=lambda step: run.ema.update_parameters(run.model),
        )
        return run

    assert same(train(45).weights(), train().weights())


def test_a_state_that_cannot_be_saved_is_named_and_costs_no_snapshot():
    run = Run()
    run.healer.add_state("odd", lambda: 1 / 0, lambda state: None)
    run.train(steps=30)
    assert any("odd could not be saved" in note for note in run.healer.notes)
    assert run.healer.snapshots()


def test_a_wrong_argument_is_refused():
    healer = Run().healer
    with pytest.raises(TypeError, match="expected a function"):
        healer.add_state("teacher", {}, lambda state: None)
    with pytest.raises(ValueError, match="added before"):
        healer.add_state("ema", dict, lambda state: None)


def test_an_optimizer_that_rewrites_the_weights_is_named_once():
    class ScheduleFree(torch.optim.SGD):
        def train(self):
            pass

        def eval(self):
            pass

    model = nn.Linear(2, 1)
    healer = Healer(model, ScheduleFree(model.parameters(), lr=0.1))
    (note,) = healer.notes
    assert "ScheduleFree rewrites the weights" in note
    healer.close()
