"""The stream of batches: as a for loop sees them, rewound, skipped, and with bad ones in it."""

import weakref

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, RandomSampler, TensorDataset

from heal.data.stream import BatchStream, NoMoreBatches

NUMBERS = TensorDataset(torch.arange(40))


class Loop(BatchStream):
    """Draws as ``Healer.epoch`` does; ``step`` is the one that the next batch is for."""

    def __init__(self, on_error, on_begin):
        super().__init__(on_error)
        self.step, self.on_begin = 0, on_begin

    def epoch(self, loader):
        number = self.begin(loader)
        try:
            self.on_begin()
            while True:
                yield self.draw(loader, number, self.step)
        except NoMoreBatches:
            return
        finally:
            self.leave(number)


def make_stream(on_error=None, on_begin=lambda: None):
    errors = []
    noted = on_error or (lambda error, epoch, index: errors.append((error, epoch, index)))
    stream = Loop(noted, on_begin)
    return stream, errors


def drawn(batches):
    return [tuple(batch[0].tolist()) for batch in batches]


def loaders():
    yield "shuffled", lambda: DataLoader(NUMBERS, batch_size=4, shuffle=True)
    yield "workers", lambda: DataLoader(NUMBERS, batch_size=4, shuffle=True, num_workers=2)
    generator = torch.Generator().manual_seed(5)
    yield (
        "own generator",
        lambda: DataLoader(
            NUMBERS,
            batch_size=4,
            sampler=RandomSampler(NUMBERS, generator=generator.manual_seed(5)),
        ),
    )
    yield "list", lambda: [(torch.tensor([i]),) for i in range(10)]


LOADERS = dict(loaders())


@pytest.mark.parametrize("kind", LOADERS)
def test_a_stream_is_what_a_for_loop_sees(kind):
    torch.manual_seed(1)
    loader = LOADERS[kind]()
    expected = [drawn(loader) for _ in range(2)] + [torch.rand(1).item()]
    torch.manual_seed(1)
    loader = LOADERS[kind]()
    stream, _ = make_stream()
    assert [drawn(stream.epoch(loader)) for _ in range(2)] + [torch.rand(1).item()] == expected


@pytest.mark.parametrize("kind", LOADERS)
@pytest.mark.parametrize("at", [0, 1, 7, 10])
def test_a_rewound_stream_gives_the_same_batches_again(kind, at):
    torch.manual_seed(2)
    loader = LOADERS[kind]()
    positions = {}

    def note(i):
        positions[i] = (stream.position(), torch.get_rng_state())

    stream, _ = make_stream(on_begin=lambda: note(0))
    first = drawn(stream.epoch(loader))
    batches, seen = stream.epoch(loader), []
    for i in range(10):
        seen += drawn([next(batches)])
        note(i + 1)
    position, rng = positions[at]
    stream.rewind(position)
    torch.set_rng_state(rng)  # as a rollback that replays does
    assert drawn(batches) == seen[at:]
    if at:
        assert torch.equal(torch.get_rng_state(), rng)
    assert first != seen or kind == "list"


def test_a_rewind_into_the_epoch_before_ends_where_the_loop_would():
    torch.manual_seed(3)
    loader = DataLoader(NUMBERS, batch_size=4, shuffle=True)
    stream, _ = make_stream()
    rng, positions, seen = {}, {}, []
    epochs = 0
    rewound = False
    for _ in range(3):
        for batch in stream.epoch(loader):
            seen += drawn([batch])
            positions[len(seen)], rng[len(seen)] = stream.position(), torch.get_rng_state()
            if len(seen) == 13 and not rewound:
                rewound = True
                first_time = list(seen)
                stream.rewind(positions[8])
                torch.set_rng_state(rng[8])
                seen = seen[:8]
        epochs += 1
    assert seen[:13] == first_time
    assert len(seen) == 30
    assert epochs == 3
    for epoch in range(3):
        numbers = sorted(n for batch in seen[10 * epoch : 10 * epoch + 10] for n in batch)
        assert numbers == list(range(40))


def test_stateful_loaders_return_to_the_exact_position():
    stateful = pytest.importorskip("torchdata.stateful_dataloader")
    torch.manual_seed(4)
    loader = stateful.StatefulDataLoader(NUMBERS, batch_size=4, shuffle=True)
    stream, _ = make_stream()
    batches, seen = stream.epoch(loader), []
    for _ in range(3):
        seen += drawn([next(batches)])
    position = stream.position()
    for _ in range(4):
        seen += drawn([next(batches)])
    stream.rewind(position)
    assert drawn(batches)[:4] == seen[3:]


def test_batches_of_bad_steps_are_left_out_of_a_replay():
    loader = [(torch.tensor([i]),) for i in range(12)]
    stream, _ = make_stream()
    batches, start = stream.epoch(loader), None
    for i in range(8):
        stream.step = i // 2  # two batches per step
        next(batches)
        start = start or stream.position()
    stream.rewind(start)
    stream.abandon_from(1)
    stream.step = 1
    stream.skip(2, 4)  # batches 4 to 7 were seen; step 4 would have had 8 and 9
    assert drawn(batches) == [(1,), (2,), (3,), (10,), (11,)]


def test_skipping_what_lies_behind_needs_nothing():
    loader = [(torch.tensor([i]),) for i in range(6)]
    stream, _ = make_stream()
    batches = stream.epoch(loader)
    for i in range(3):
        stream.step = i
        next(batches)
    stream.skip(0, 2)
    assert drawn(batches) == [(3,), (4,), (5,)]


class Spoilt(Dataset):
    """Every fifth sample cannot be read."""

    def __len__(self):
        return 20

    def __getitem__(self, i):
        if i % 5 == 4:
            raise ValueError(f"sample {i} is torn")
        return (i,)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_batch_that_cannot_be_read_is_recorded_and_passed_over(workers):
    loader = DataLoader(Spoilt(), batch_size=2, num_workers=workers)
    stream, errors = make_stream()
    seen = drawn(stream.epoch(loader))
    assert seen == [(0, 1), (2, 3), (6, 7), (10, 11), (12, 13), (16, 17)]
    assert [(epoch, index) for _, epoch, index in errors] == [(0, 2), (0, 4), (0, 7), (0, 9)]
    assert "sample 4 is torn" in str(errors[0][0])


def test_an_error_handler_can_end_the_stream():
    def give_up(error, epoch, index):
        raise RuntimeError("enough")

    stream, _ = make_stream(give_up)
    with pytest.raises(RuntimeError, match="enough"):
        drawn(stream.epoch(DataLoader(Spoilt(), batch_size=2)))


def test_a_batch_is_let_go_before_the_next_one_is_read():
    """Whoever deletes it has room for the next one: a stream that keeps it needs memory for two."""
    given, alive = [], []

    def batch():
        alive.append(sum(ref() is not None for ref in given))
        tensor = torch.zeros(3)
        given.append(weakref.ref(tensor))
        return tensor

    stream, _ = make_stream()
    for tensor in stream.epoch(batch() for _ in range(3)):
        del tensor
    assert alive == [0, 0, 0]


def test_two_epochs_at_once_are_refused_and_never_mixed():
    first, second = [(torch.tensor([i]),) for i in range(3)], [(torch.tensor([9]),)] * 3
    stream, _ = make_stream()
    pairs = zip(stream.epoch(first), stream.epoch(second), strict=False)
    assert drawn(next(pairs)) == [(0,), (9,)]
    with pytest.raises(RuntimeError, match=r"expected one loop over batches\(\) at a time"):
        next(pairs)


def test_an_evaluation_does_not_end_the_epoch_without_a_word():
    stream, _ = make_stream()
    training = stream.epoch([(torch.tensor([i]),) for i in range(3)])
    next(training)
    assert len(drawn(stream.epoch([(torch.tensor([9]),)] * 3))) == 3
    with pytest.raises(RuntimeError, match="Iterate the loader of an evaluation itself"):
        next(training)


def test_a_loop_that_was_left_but_not_collected_is_not_in_the_way():
    loader = [(torch.tensor([i]),) for i in range(3)]
    stream, _ = make_stream()
    left = stream.epoch(loader)
    next(left)
    again = stream.epoch(loader)
    assert drawn([next(again)]) == [(0,)]
    left.close()
    assert stream.is_open
    assert drawn(again) == [(1,), (2,)]
    assert not stream.is_open
