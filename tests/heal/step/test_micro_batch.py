"""Smaller pieces, the same gradient; and a failed attempt that leaves no trace."""

import gc
import weakref

import pytest
import torch
from torch import nn

from heal import ExitCode, Healer, HealingError
from heal.micro_batch import MicroBatcher

torch.set_num_threads(1)

X = torch.arange(14.0).reshape(7, 2)


def make(seed=0, norm=False):
    torch.manual_seed(seed)
    layers = [nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 1)]
    return nn.Sequential(*([nn.BatchNorm1d(2)] if norm else []), *layers)


def gradients(pieces, batches):
    model = make()
    micro = MicroBatcher(model, lambda: list(model.parameters()))
    micro.pieces = pieces
    loss = micro.backward(batches, lambda x: model(x).square().mean(), lambda loss: loss)
    return loss, [p.grad for p in model.parameters()]


@pytest.mark.parametrize("pieces", [2, 3, 4, 7])
@pytest.mark.parametrize("num_batches", [1, 3])
def test_the_gradient_is_that_of_the_whole_batch(pieces, num_batches):
    batches = list(torch.randn(num_batches, 7, 2))
    whole_loss, whole = gradients(1, batches)
    loss, cut = gradients(pieces, batches)
    torch.testing.assert_close(loss, whole_loss)
    for a, b in zip(whole, cut, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


def test_tokens_that_are_padding_do_not_count_if_weighed():
    model = make()
    mask = torch.tensor([1.0, 0, 0, 1, 1, 1, 1])

    def mean_over_tokens(batch):
        x, m = batch
        return (model(x).squeeze(1).square() * m).sum() / m.sum()

    found = []
    for pieces in (1, 3):
        micro = MicroBatcher(model, lambda: list(model.parameters()), weigh=lambda b: b[1].sum())
        micro.pieces = pieces
        model.zero_grad()
        micro.backward([(X, mask)], mean_over_tokens, lambda loss: loss)
        found.append([p.grad.clone() for p in model.parameters()])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("tokens", [[1.0, 1, 1, 0, 0, 0, 0], [0.0, 0, 0, 0, 0, 1, 1], [0.0] * 7])
def test_a_piece_of_nothing_but_padding_does_not_spoil_the_step(tokens):
    model, mask, found = make(), torch.tensor(tokens), []

    def mean_over_tokens(batch):
        x, m = batch
        return (model(x).squeeze(1).square() * m).sum() / m.sum()

    for pieces in (1, 3):
        micro = MicroBatcher(model, lambda: list(model.parameters()), weigh=lambda b: b[1].sum())
        micro.pieces = pieces
        model.zero_grad()
        loss = micro.backward([(X, mask)], mean_over_tokens, lambda loss: loss)
        found.append([loss, *(p.grad for p in model.parameters())])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, equal_nan=True)


def test_a_failed_attempt_leaves_no_trace():
    model = make(norm=True)
    micro = MicroBatcher(model, lambda: list(model.parameters()))
    before = [b.clone() for b in model.buffers()]
    rng = torch.get_rng_state()
    calls = []

    def fails_late(x):
        calls.append(len(x))
        torch.rand(3)
        loss = model(x).mean()
        if len(calls) == 3:
            raise torch.OutOfMemoryError("out of memory")
        return loss

    micro.pieces = 3
    with pytest.raises(torch.OutOfMemoryError):
        micro.backward([X, X], fails_late, lambda loss: loss)
    assert any(not torch.equal(a, b) for a, b in zip(before, model.buffers(), strict=True))
    micro.undo()
    assert all(torch.equal(a, b) for a, b in zip(before, model.buffers(), strict=True))
    assert torch.equal(torch.get_rng_state(), rng)
    assert all(p.grad is None for p in model.parameters())


def test_pieces_shrink_to_the_smallest_and_grow_back_ever_more_slowly():
    model = make()
    micro = MicroBatcher(model, lambda: list(model.parameters()), smallest=2, grow_steps=3)
    micro.backward([torch.randn(8, 2)], lambda x: model(x).mean(), lambda loss: loss)
    assert [micro.shrink() for _ in range(3)] == [True, True, False]
    sizes = []
    for _ in range(12):
        micro.note_clean()
        sizes.append(micro.pieces)
    assert sizes == [4, 4, 2, 2, 2, 2, 2, 2, 1, 1, 1, 1]


def sizes_of_pieces(sizes, fits, smallest):
    """Train on batches of these sizes while no more than ``fits`` samples fit."""
    model, seen = make(norm=True), []
    micro = MicroBatcher(model, lambda: list(model.parameters()), smallest=smallest)

    def train_step(x):
        seen.append(len(x))
        if len(x) > fits:
            raise torch.OutOfMemoryError("out of memory")
        return model(x).square().mean()

    for size in sizes:
        while True:
            seen.clear()
            try:
                micro.backward([torch.randn(size, 2)], train_step, lambda loss: loss)
                break
            except torch.OutOfMemoryError:
                assert micro.shrink()
    return sorted(seen), micro


@pytest.mark.parametrize(
    ("sizes", "fits", "smallest", "pieces"),
    [
        ([16, 5], 4, 1, [2, 3]),  # as many as of a full batch would be of one sample each
        ([16, 4], 4, 1, [4]),
        ([16, 2], 4, 1, [2]),
        ([6], 2, 2, [2, 2, 2]),
        ([7], 3, 2, [2, 2, 3]),
        ([16, 7], 4, 3, [3, 4]),
        ([6, 16], 2, 1, [2] * 8),
        ([16, 5], 5, 4, [5]),
    ],
)
def test_what_fits_is_a_number_of_samples(sizes, fits, smallest, pieces):
    seen, micro = sizes_of_pieces(sizes, fits, smallest)
    assert seen == pieces
    young = MicroBatcher(make(norm=True), list, smallest=smallest)
    young.load_state(micro.state())
    assert [young.parts_of(n) for n in range(1, 40)] == [micro.parts_of(n) for n in range(1, 40)]


@pytest.mark.parametrize("samples", range(1, 40))
@pytest.mark.parametrize("smallest", [1, 2, 3, 8])
def test_every_shrink_makes_the_largest_piece_smaller_and_none_too_small(samples, smallest):
    model = make()
    micro = MicroBatcher(model, lambda: list(model.parameters()), smallest=smallest)
    micro.largest_batch = samples
    largest = samples
    while micro.shrink():
        parts = micro.parts_of(samples)
        assert -(-samples // parts) < largest
        assert samples // parts >= smallest
        largest = -(-samples // parts)
    assert micro.parts_of(samples) == max(1, samples // smallest) or largest < 2 * smallest


def test_where_every_forward_is_a_message_all_ranks_have_equally_many_pieces():
    model = make()
    micro = MicroBatcher(model, lambda: list(model.parameters()))
    micro.messages.are_in_every_forward, micro.largest_batch = True, 16
    assert micro.shrink()
    assert micro.shrink()
    assert [micro.parts_of(n) for n in (16, 5, 4)] == [4, 4, 4]


def test_nothing_keeps_the_tensors_of_a_failed_attempt():
    model = make()
    micro = MicroBatcher(model, lambda: list(model.parameters()))
    alive = []

    def fails(x):
        activations = model(x)
        alive.append(weakref.ref(activations))
        raise torch.OutOfMemoryError("out of memory")

    try:
        micro.backward([X], fails, lambda loss: loss)
    except torch.OutOfMemoryError as error:
        error.__traceback__ = None
    gc.collect()
    assert alive[0]() is None


def test_a_batch_that_cannot_be_cut_is_told_of_and_never_cut_wrongly():
    model = make()
    micro = MicroBatcher(model, lambda: list(model.parameters()))
    packed = nn.utils.rnn.pack_sequence([X, X[:3]])

    def train_step(batch):
        assert batch.data.shape == packed.data.shape
        raise torch.OutOfMemoryError("out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        micro.backward([packed], train_step, lambda loss: loss)
    assert "PackedSequence" in micro.cannot_cut
    assert not micro.shrink()


def test_beside_a_batch_that_cannot_be_cut_others_are():
    model = make()
    micro = MicroBatcher(model, lambda: list(model.parameters()))
    packed, seen = nn.utils.rnn.pack_sequence([X, X[:3]]), []

    def train_step(batch):
        seen.append(type(batch).__name__)
        if len(seen) == 2:
            raise torch.OutOfMemoryError("out of memory")
        rows = batch if isinstance(batch, torch.Tensor) else batch.data
        return model(rows).square().mean()

    with pytest.raises(torch.OutOfMemoryError):
        micro.backward([packed, X], train_step, lambda loss: loss)
    assert micro.shrink()
    micro.undo()
    micro.backward([packed, X], train_step, lambda loss: loss)
    assert seen[2:] == ["PackedSequence", "Tensor", "Tensor"]


@pytest.mark.parametrize(("norm", "fewest"), [(False, 1), (True, 2)])
def test_no_piece_is_too_small_for_batch_norm(norm, fewest):
    model, seen = make(norm=norm), []
    healer = Healer(model, torch.optim.SGD(model.parameters(), lr=0.1))

    def train_step(batch):
        seen.append(len(batch))
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    with pytest.raises(HealingError) as ended:
        healer.run(train_step, [torch.randn(8, 2)], 1, progress=False)
    assert ended.value.exit_code == ExitCode.OUT_OF_MEMORY
    assert min(seen) == fewest
