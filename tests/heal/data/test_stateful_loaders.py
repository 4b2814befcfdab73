"""A loader that keeps its own position: returned to in memory and from disk, generators and all."""

import pytest
import torch
from torch.utils.data import RandomSampler

from heal import Healer
from heal.actions import Rollback
from tests.heal.runs import quick

stateful = pytest.importorskip("torchdata.stateful_dataloader")

BATCH, PER_EPOCH, STEPS = 4, 10, 40
DATA = list(range(BATCH * PER_EPOCH))


def loader(**options):
    return stateful.StatefulDataLoader(DATA, BATCH, **options)


def generator():
    return torch.Generator().manual_seed(3)


LOADERS = {
    "shuffled": lambda: loader(shuffle=True),
    "own generator": lambda: loader(shuffle=True, generator=generator()),
    "workers": lambda: loader(shuffle=True, generator=generator(), num_workers=1),
    "a sampler without a state": lambda: loader(sampler=RandomSampler(DATA, generator=generator())),
    "such a sampler, and the loader's generator": lambda: loader(
        sampler=RandomSampler(DATA, generator=(own := generator())), generator=own
    ),
}
KINDS = pytest.mark.parametrize("kind", [kind for kind in LOADERS if kind != "workers"])


class Run:
    """Steps of which every one notes its batch and draws a random number, as dropout would."""

    def __init__(self, kind, folder=None):
        torch.manual_seed(0)
        self.model, self.seen = torch.nn.Linear(4, 1), {}
        self.loader = LOADERS[kind]()
        settings = {"quarantine_steps": 2, "check_interval": 1, "after_rollback": "replay_data"}
        self.healer = Healer(
            self.model,
            torch.optim.SGD(self.model.parameters(), 1e-3, fused=True),
            config=quick(snapshot_interval=5, checkpoint_async=False, **settings),
            checkpoint_dir=folder,
        )
        self.healer.on_instability(
            lambda _, plan: tuple(a for a in plan if isinstance(a, Rollback)) or None
        )
        self.healer.exits.dismiss()

    def step(self, batch):
        self.seen[self.healer.last_step + 1] = batch.tolist(), torch.rand(()).item()
        return self.model(torch.ones(4)).square().mean()

    def train(self, steps=STEPS):
        self.healer.run(self.step, self.loader, steps, progress=False)
        return self.seen


@KINDS
@pytest.mark.parametrize(
    ("spoilt_at", "returns_to"), [(23, 20), (18, 15)], ids=["to an end", "to within"]
)
def test_a_rollback_is_exact(kind, spoilt_at, returns_to):
    run, times = Run(kind), []

    def step(batch):
        if run.healer.last_step + 1 == spoilt_at and not times:
            times.append(spoilt_at)
            with torch.no_grad():
                run.model.weight[0, 0] = float("nan")
        return run.step(batch)

    run.healer.run(step, run.loader, STEPS, progress=False)
    found = [a.before_step for _, _, plan in run.healer.history for a in plan]
    assert found == [returns_to]
    assert run.seen == Run(kind).train()


def test_a_rollback_with_workers_is_exact():
    test_a_rollback_is_exact("workers", 18, 15)  # once: they take seconds to go


@KINDS
@pytest.mark.parametrize("stopped_at", [10, 13])
def test_a_run_resumed_from_disk_has_the_same_batches(tmp_path, kind, stopped_at):
    expected = Run(kind).train()
    Run(kind, tmp_path).train(stopped_at)
    again = Run(kind, tmp_path)
    torch.rand(3)  # whatever the new process does first
    assert again.healer.resume() == stopped_at
    assert again.train() == {step: expected[step] for step in range(stopped_at, STEPS)}


@KINDS
def test_a_checkpoint_between_two_epochs_is_exact_too(tmp_path, kind):
    def epochs(run, number):
        for _ in range(number):
            for batch in run.healer.batches(run.loader):
                loss = run.step(batch)
                loss.backward()
                run.healer.step(loss)
                run.healer.optimizers[0].zero_grad()

    first = Run(kind, tmp_path)
    epochs(first, 2)
    first.healer.save_checkpoint()
    epochs(first, 1)
    again = Run(kind, tmp_path)
    assert again.healer.resume() == 2 * PER_EPOCH
    epochs(again, 2)  # the first is over where it is resumed
    assert again.seen == {s: first.seen[s] for s in range(2 * PER_EPOCH, 3 * PER_EPOCH)}
