"""Which batches come after a rollback: the very same with replay, none twice without."""

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from heal import Healer
from heal.actions import Rollback
from tests.heal.runs import quick

NUM_SAMPLES, BATCH = 48, 4
PER_EPOCH = NUM_SAMPLES // BATCH


def make_healer(model, **config):
    """A healer that rolls back and does nothing else, so that a replay has all batches."""
    healer = Healer(
        model,
        torch.optim.AdamW(model.parameters(), 1e-3),
        config=quick(
            snapshot_interval=5,
            quarantine_steps=2,
            check_interval=1,
            disabled_detectors="loss",  # no experiment: each batch is to be given out once
            **config,
        ),
    )
    healer.on_instability(
        lambda diagnosis, plan: tuple(a for a in plan if isinstance(a, Rollback)) or None
    )
    healer.exits.dismiss()
    return healer


def rolled_back_to(healer):
    return [a.before_step for _, _, plan in healer.history for a in plan if type(a) is Rollback]


def trained(epochs, spoil_at, is_over=lambda epoch, step: False):
    """Train by hand with replay; return the batch of every step as it stood in the end."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.2), torch.nn.Linear(4, 1))
    healer, seen, drawn = make_healer(model, after_rollback="replay_data"), {}, 0
    for epoch, loader in enumerate(epochs()):
        for (batch,) in healer.batches(loader):
            drawn += 1
            if drawn == spoil_at:
                with torch.no_grad():
                    model[0].weight[0, 0] = float("nan")
            seen[healer.last_step + 1] = batch.tolist()
            loss = model(batch.float().view(-1, 4)).square().mean() * 1e-5
            loss.backward()
            healer.step(loss)
            healer.guarded.optimizers[0].zero_grad()
            if is_over(epoch, healer.last_step + 1):
                break
    return seen, list(model.parameters()), healer


def same_loader():
    data = TensorDataset(torch.arange(4 * NUM_SAMPLES))
    return [DataLoader(data, batch_size=BATCH, shuffle=True)] * 4


def other_loaders():
    halves = torch.arange(2 * NUM_SAMPLES).split(NUM_SAMPLES)
    return [
        DataLoader(TensorDataset(h), batch_size=BATCH, shuffle=True) for h in (*halves, *halves)
    ]


class ToldBatches:
    """A batch sampler whose order depends on the epoch that was set, and on nothing else."""

    def __init__(self):
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.epoch)
        return iter(torch.randperm(NUM_SAMPLES, generator=generator).view(-1, BATCH).tolist())


class ToldDataset(TensorDataset):
    """Adds the epoch that was set to every sample."""

    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __getitem__(self, i):
        return (super().__getitem__(i)[0] + 10 * self.epoch,)


def with_epochs(place):
    data = (ToldDataset if place == "dataset" else TensorDataset)(torch.arange(NUM_SAMPLES))
    if place == "batch_sampler":
        loader = DataLoader(data, batch_sampler=ToldBatches())
    elif place == "sampler":
        sampler = DistributedSampler(data, num_replicas=1, rank=0)
        loader = DataLoader(data, batch_size=BATCH, sampler=sampler)
    else:
        loader = DataLoader(data, batch_size=BATCH, shuffle=True)
    return loader, getattr(loader, place)


def set_before_each_epoch(place):
    loader, owner = with_epochs(place)
    for epoch in range(4):
        owner.set_epoch(2 * epoch)
        yield loader


def own_generator(batch_size=16, **options):
    """Ten batches an epoch: there are snapshots of the very end of one, and of the middle."""
    data, generator = TensorDataset(torch.arange(160)), torch.Generator().manual_seed(3)
    return [DataLoader(data, batch_size, shuffle=True, generator=generator, **options)] * 4


def to_the_end(epoch, step):
    return False


CASES = {
    "batch sampler set": (lambda: set_before_each_epoch("batch_sampler"), to_the_end),
    "dataset set": (lambda: set_before_each_epoch("dataset"), to_the_end),
    "sampler set": (lambda: set_before_each_epoch("sampler"), to_the_end),
    "sampler never set": (lambda: [with_epochs("sampler")[0]] * 4, to_the_end),
    "another loader in each epoch": (other_loaders, to_the_end),
    "epochs left by break": (same_loader, lambda epoch, step: step >= 13 * (epoch + 1)),
    "a generator of the loader's own": (own_generator, to_the_end),
    "its own generator and workers": (lambda: own_generator(num_workers=2), to_the_end),
    "its own generator, left by break at a snapshot": (
        lambda: own_generator(batch_size=8),
        lambda epoch, step: step >= 10 * (epoch + 1),
    ),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("spoil_at", [14, 17, 29])
def test_a_replay_is_the_run_that_never_failed(case, spoil_at):
    epochs, is_over = CASES[case]
    expected, weights, _ = trained(epochs, None, is_over)
    seen, replayed, healer = trained(epochs, spoil_at, is_over)
    assert rolled_back_to(healer)
    assert seen == expected
    assert all(torch.equal(a, b) for a, b in zip(weights, replayed, strict=True))


def test_a_replay_begins_before_a_loop_that_was_left_by_count():
    """The loop is left with batches still to be drawn again: they open the next one."""
    from tests.heal.data.test_data import drawn, make_stream

    loader = [(torch.tensor([i]),) for i in range(10)]
    stream, _ = make_stream()
    batches = stream.epoch(loader)
    assert drawn([next(batches) for _ in range(3)]) == [(0,), (1,), (2,)]
    position = stream.position()
    assert drawn([next(batches) for _ in range(2)]) == [(3,), (4,)]
    stream.rewind(position)
    state = torch.get_rng_state()
    again = stream.epoch(loader)
    assert drawn([next(again), next(again)]) == [(3,), (4,)]
    assert torch.equal(torch.get_rng_state(), state)
    assert drawn(again) == [(i,) for i in range(10)]


def stateful_loader(data):
    stateful = pytest.importorskip("torchdata.stateful_dataloader")
    return stateful.StatefulDataLoader(data, batch_size=BATCH, shuffle=True)


NUMBERS = TensorDataset(torch.arange(NUM_SAMPLES))
LOADERS = {
    "plain": lambda: DataLoader(NUMBERS, batch_size=BATCH, shuffle=True),
    "workers": lambda: DataLoader(NUMBERS, batch_size=BATCH, shuffle=True, num_workers=2),
    "stateful": lambda: stateful_loader(NUMBERS),
    "list": lambda: [(torch.arange(i, i + BATCH),) for i in range(0, NUM_SAMPLES, BATCH)],
}


@pytest.mark.parametrize("data", ["skip_data", "replay_data"])
@pytest.mark.parametrize("kind", LOADERS)
def test_after_a_rollback_no_sample_comes_twice_in_an_epoch_and_no_shuffle_repeats(kind, data):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)  # no dropout: only shuffles draw from the generators
    loader, healer = LOADERS[kind](), make_healer(model, after_rollback=data)
    epochs, drawn = [], 0
    for _ in range(5):
        epochs.append([])
        for (batch,) in healer.batches(loader):
            drawn += 1
            if drawn == 2 * PER_EPOCH + 1:
                with torch.no_grad():
                    model.weight[0, 0] = float("nan")
            epochs[-1] += batch.tolist()
            loss = model(torch.ones(1, 4)).square().mean()  # whatever comes, in whatever order
            loss.backward()
            healer.step(loss)
            healer.guarded.optimizers[0].zero_grad()
    target, *more = rolled_back_to(healer)
    assert not more
    assert target < 2 * PER_EPOCH  # before the shuffle of the third epoch
    twice = [i for i, samples in enumerate(epochs) if len(samples) != len(set(samples))]
    if data == "replay_data":
        assert twice == [2]  # the epoch of the rollback has the steps that were undone twice
        return
    assert twice == []
    assert [sorted(samples) for samples in epochs] == [list(range(NUM_SAMPLES))] * 5
    assert len(set(map(tuple, epochs))) == (1 if kind == "list" else 5)
