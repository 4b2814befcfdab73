"""Loaders that fail: what comes back with time is waited for, what is lost is noted."""

import errno
import json
import random

import pytest
import torch
from torch import nn
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    Subset,
)

from heal import Healer
from heal.actions import HealingError
from heal.causes import Cause
from heal.exit_codes import ExitCode
from tests.heal.runs import quick


class Failing:
    """Raises an error at one number, the first time or always."""

    def __init__(self, at, error, times=1):
        self.at, self.error, self.left = at, error, times

    def check(self, number):
        if number == self.at and self.left:
            self.left -= 1
            raise self.error


class Stream(IterableDataset):
    """A generator, which an error ends for good."""

    def __init__(self, failing):
        self.failing = failing

    def __iter__(self):
        for i in range(40):
            self.failing.check(i)
            yield torch.tensor(float(i))


class Map(Dataset):
    def __init__(self, failing):
        self.failing = failing

    def __len__(self):
        return 40

    def __getitem__(self, i):
        self.failing.check(i)
        return torch.tensor(float(i))


def train(loader, tmp_path, epochs=1):
    """Return the samples seen in each epoch, the waits, and the healer."""
    torch.manual_seed(0)
    model, waits = nn.Linear(1, 1), []
    optimizer = torch.optim.SGD(model.parameters(), 1e-6)
    healer = Healer(model, optimizer, config=quick(), sleep=waits.append, run_dir=tmp_path)
    seen = []
    for _ in range(epochs):
        seen.append([])
        for batch in healer.batches(loader):
            seen[-1] += batch.tolist()
            loss = model(batch[:, None]).square().mean()
            loss.backward()
            healer.step(loss)
            optimizer.zero_grad()
    healer.close()
    return seen, waits, healer


def events(tmp_path, kind):
    lines = (tmp_path / "events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == kind]


NETWORK = ConnectionError("connection reset by peer")
TORN = ValueError("torn sample")


@pytest.mark.parametrize("dataset", [Stream, Map])
@pytest.mark.parametrize("times", [1, 2])
def test_a_batch_that_the_network_refused_is_read_again(dataset, times, tmp_path):
    loader = DataLoader(dataset(Failing(21, NETWORK, times)), batch_size=4)
    seen, waits, healer = train(loader, tmp_path)
    assert seen == [[float(i) for i in range(40)]]
    assert waits == [30.0, 60.0][:times]
    assert healer.notes == []


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_loader_that_keeps_its_own_position_is_read_again_too(shuffle, tmp_path):
    stateful = pytest.importorskip("torchdata.stateful_dataloader")
    data = Map(Failing(21, NETWORK))
    loader = stateful.StatefulDataLoader(data, batch_size=4, shuffle=shuffle)
    seen, waits, _ = train(loader, tmp_path, epochs=2)
    assert [sorted(epoch) for epoch in seen] == [[float(i) for i in range(40)]] * 2
    assert waits == [30.0]


def test_a_batch_of_a_worker_is_read_again_in_this_process(tmp_path):
    loader = DataLoader(Map(Failing(21, NETWORK)), batch_size=4, shuffle=True, num_workers=1)
    seen, waits, _ = train(loader, tmp_path)
    assert sorted(seen[0]) == [float(i) for i in range(40)]
    assert waits == [30.0, 60.0]  # the worker has its own copy of what fails once


def test_the_shuffle_of_an_epoch_survives_a_wait(tmp_path):
    torch.manual_seed(1)
    loader = DataLoader(Map(Failing(21, NETWORK)), batch_size=4, shuffle=True)
    seen, waits, _ = train(loader, tmp_path, epochs=2)
    assert [sorted(epoch) for epoch in seen] == [[float(i) for i in range(40)]] * 2
    torch.manual_seed(0)
    bare = DataLoader(Map(Failing(-1, NETWORK)), batch_size=4, shuffle=True)
    nn.Linear(1, 1)
    assert seen == [[n for batch in bare for n in batch.tolist()] for _ in range(2)]
    assert waits == [30.0]


class OwnGenerator(Sampler):
    """Shuffles with a generator of its own."""

    def __init__(self):
        self.generator_of_mine, self.asked = random.Random(0), 0

    def __iter__(self):
        self.asked += 1
        order = list(range(40))
        self.generator_of_mine.shuffle(order)
        return iter(order)

    def __len__(self):
        return 40


class InPlace(OwnGenerator):
    """Shuffles what it has, so that every order follows from the one before."""

    def __init__(self):
        self.order, self.asked = list(range(40)), 0

    def __iter__(self):
        self.asked += 1
        random.shuffle(self.order)
        return iter(list(self.order))


@pytest.mark.parametrize("kind", [OwnGenerator, InPlace])
@pytest.mark.parametrize("error", [NETWORK, TORN])
@pytest.mark.parametrize("workers", [0, 1])
def test_an_order_that_only_its_sampler_knows_is_left_as_it_is(kind, error, workers, tmp_path):
    random.seed(3)
    bare = DataLoader(Map(Failing(-1, error)), batch_size=4, sampler=kind())
    expected = [[batch.tolist() for batch in bare] for _ in range(2)]
    lost = next(batch for batch in expected[0] if 21 in batch)
    random.seed(3)
    failing = Map(Failing(21, error))
    loader = DataLoader(failing, batch_size=4, sampler=kind(), num_workers=workers)
    seen, waits, healer = train(loader, tmp_path)
    assert seen[0] == [n for batch in expected[0] if batch != lost for n in batch]
    assert loader.sampler.asked == 1
    assert list(loader.sampler) == [n for batch in expected[1] for n in batch]
    assert [d.evidence["samples"] for _, d, _ in healer.history] == [None]
    if error is NETWORK:
        assert waits == [30.0]
        assert "its sampler gives another order each time" in healer.notes[0]


def test_samples_are_named_without_a_copy_of_the_data(tmp_path):
    class Large(Map):
        def __deepcopy__(self, memo):
            raise MemoryError("no room for two")

    data = Large(Failing(21, TORN))
    loader = DataLoader(Subset(data, range(40)), batch_size=4, sampler=RandomSampler(data))
    _, _, healer = train(loader, tmp_path)
    ((_, diagnosis, _),) = healer.history
    assert 21 in diagnosis.evidence["samples"]


@pytest.mark.parametrize("dataset", [Stream, Map])
def test_a_network_that_stays_away_ends_the_run_within_its_budget(dataset, tmp_path):
    loader = DataLoader(dataset(Failing(21, NETWORK, times=1000)), batch_size=4)
    with pytest.raises(HealingError) as halted:
        train(loader, tmp_path)
    assert halted.value.exit_code == ExitCode.NETWORK
    assert len(events(tmp_path, "recovery")) < 20


def torn_file(number):
    return OSError(errno.EIO, "Input/output error", f"/data/{number}.jpg")


class Files(Dataset):
    """Some files cannot be read, ever."""

    def __init__(self, bad):
        self.bad = bad

    def __len__(self):
        return 40

    def __getitem__(self, i):
        if i in self.bad:
            raise torn_file(i)
        return torch.tensor(float(i))


def test_a_file_that_stays_unreadable_costs_its_batch_and_not_the_run(tmp_path):
    seen, waits, healer = train(DataLoader(Files({21, 33}), batch_size=4), tmp_path, epochs=2)
    assert seen == [[float(i) for i in range(40) if i // 4 not in (5, 8)]] * 2
    assert waits == [30.0, 60.0, 120.0, 240.0, 480.0, 600.0]  # none of them in the second epoch
    skipped = [d for _, d, _ in healer.history if d.cause is Cause.DATA_ERROR]
    assert [d.evidence["samples"] for d in skipped] == [[*range(20, 24)], [*range(32, 36)]] * 2


def test_a_disk_that_is_gone_ends_the_run_within_the_limits_of_bad_data(tmp_path):
    with pytest.raises(HealingError) as halted:
        train(DataLoader(Files(range(8, 40)), batch_size=4), tmp_path)
    assert halted.value.exit_code == ExitCode.BAD_DATA


@pytest.mark.parametrize("dataset", [Stream, Map])
def test_a_disk_that_comes_back_costs_nothing(dataset, tmp_path):
    loader = DataLoader(dataset(Failing(21, torn_file(21), times=2)), batch_size=4)
    seen, waits, _ = train(loader, tmp_path)
    assert seen == [[float(i) for i in range(40)]]
    assert waits == [30.0, 60.0]


@pytest.mark.parametrize("error", [AssertionError("no boxes"), MemoryError("291 TiB")])
def test_what_a_dataset_raises_for_every_sample_ends_the_run(error, tmp_path):
    seen, _, healer = train(DataLoader(Map(Failing(21, error)), batch_size=4), tmp_path)
    assert len(seen[0]) == 36
    assert healer.micro_batches == 1

    class Always(Map):
        def __getitem__(self, i):
            raise error

    with pytest.raises(HealingError) as halted:
        train(DataLoader(Always(None), batch_size=4), tmp_path)
    assert halted.value.exit_code == ExitCode.BAD_DATA


def test_a_generator_that_an_error_has_ended_is_opened_anew(tmp_path):
    loader = DataLoader(Stream(Failing(21, TORN)), batch_size=4)
    seen, _, healer = train(loader, tmp_path)
    assert seen == [[float(i) for i in range(40) if i // 4 != 5]]
    assert [d.cause.value for _, d, _ in healer.history] == ["data_error"]
    assert healer.notes == []


def test_an_epoch_that_cannot_be_read_to_its_end_is_noted(tmp_path):
    loader = DataLoader(Stream(Failing(21, TORN, times=1000)), batch_size=4)
    seen, _, _ = train(loader, tmp_path)
    assert seen == [[float(i) for i in range(20)]]
    (note,) = events(tmp_path, "note")
    assert "batch 5 of epoch 0 failed again" in note["text"]
    assert "the rest of the epoch is lost" in note["text"]


@pytest.mark.parametrize("error", [TORN, NETWORK])
def test_an_iterator_that_dies_is_noted(error, tmp_path):
    def generate():
        for i in range(40):
            if i == 5:
                raise error
            yield torch.full((4,), float(i))

    seen, _, healer = train(generate(), tmp_path)
    assert len(seen[0]) == 20
    assert any("an iterator cannot be opened again" in note for note in healer.notes)


def test_a_bad_batch_at_the_end_of_an_epoch_costs_no_second_pass(tmp_path):
    data = Map(Failing(39, TORN))
    reads = []
    data.failing.check = lambda i, check=data.failing.check: (reads.append(i), check(i))
    seen, _, healer = train(DataLoader(data, batch_size=4), tmp_path)
    assert len(reads) == 40
    assert len(seen[0]) == 36
    assert healer.notes == []


def test_the_share_of_a_worker_that_failed_is_read_after_all(tmp_path):
    flag = tmp_path / "failed"

    class Shares(IterableDataset):
        def __iter__(self):
            worker = torch.utils.data.get_worker_info()
            for i in range(worker.id, 40, 2):
                if i == 20 and not flag.exists():
                    flag.touch()
                    raise TORN
                yield torch.tensor(float(i))

    seen, _, healer = train(DataLoader(Shares(), batch_size=4, num_workers=2), tmp_path / "run")
    assert len(seen[0]) == 36  # one batch is lost, and not the rest of the worker's share
    assert healer.notes == []


class Shards:
    """Cannot be opened the second time, and so many times after that."""

    def __init__(self, error, times):
        self.error, self.times, self.opened = error, times, 0

    def __iter__(self):
        self.opened += 1
        if 2 <= self.opened < 2 + self.times:
            torch.rand(1)  # as loaders draw their workers' seed before they fail
            raise self.error
        return iter([torch.randn(4) for _ in range(10)])


def test_a_loader_that_cannot_be_opened_is_waited_for(tmp_path):
    seen, waits, _ = train(Shards(NETWORK, times=2), tmp_path, epochs=3)
    assert [len(epoch) for epoch in seen] == [40] * 3
    assert waits == [30.0, 60.0]
    undisturbed, _, _ = train(Shards(NETWORK, times=0), tmp_path, epochs=3)
    assert seen == undisturbed


def test_a_loader_that_never_opens_ends_the_run_within_its_budget(tmp_path):
    with pytest.raises(HealingError) as halted:
        train(Shards(NETWORK, times=1000), tmp_path, epochs=3)
    assert halted.value.exit_code == ExitCode.NETWORK


def test_a_loader_that_is_broken_is_not_waited_for(tmp_path):
    with pytest.raises(ValueError, match="torn"):
        train(Shards(ValueError("torn sample"), times=1), tmp_path, epochs=3)
