"""A hand-written loop that heals what it raises: ``with healer.attempt()``."""

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from heal.actions import HealingError
from heal.data.split import split
from heal.exit_codes import ExitCode
from tests.heal.runs import regression


def out_of_memory():
    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB (injected)")


def loop(setup, healer, errors, epochs=3):
    """Train by hand, with errors by number of the batch; return the pieces of each batch."""
    pieces, batch_number = [], -1
    for _ in range(epochs):
        for batch in healer.batches(setup.loader):
            batch_number += 1
            with healer.attempt():
                pieces.append(healer.micro_batches)
                parts = split(batch, healer.micro_batches)
                for piece, samples in parts:
                    loss = setup.train_step(piece) * samples / len(batch[0])
                    loss.backward()
                if batch_number in errors:
                    raise errors.pop(batch_number)
                healer.step(loss)
            setup.optimizer.zero_grad()
    return pieces


def test_out_of_memory_costs_the_batch_and_later_ones_are_cut():
    setup = regression()
    healer = setup.healer()
    before = torch.get_rng_state()
    pieces = loop(setup, healer, {5: out_of_memory()})
    assert pieces[:6] == [1] * 6
    assert set(pieces[6:]) == {2}
    assert healer.last_step == len(pieces) - 2
    assert not torch.equal(before, torch.get_rng_state())
    healer.close()


def loop_of_the_docstring(setup, healer, cuts, most_samples=4):
    """Train as ``attempt`` shows, with memory for so many samples."""

    def loss_of(piece):
        if len(piece[0]) > most_samples:
            raise out_of_memory()
        return setup.train_step(piece)

    for batch in healer.batches(setup.loader):
        with healer.attempt():
            total = 0.0
            for piece, share in healer.pieces(batch) if cuts else [(batch, 1.0)]:
                loss = share * loss_of(piece)
                loss.backward()
                total += loss.detach()
            healer.step(total)
        setup.optimizer.zero_grad()


def test_the_loop_of_the_docstring_trains_where_memory_runs_out():
    setup = regression()
    healer = setup.healer()
    loop_of_the_docstring(setup, healer, cuts=True)
    assert healer.last_step == 16 - 2 - 1  # the two batches that found out what fits
    assert healer.micro_batches == 4
    healer.close()


def test_a_loop_that_never_cuts_halts_and_says_what_to_do():
    setup = regression()
    healer = setup.healer()
    with pytest.raises(HealingError, match=r"iterate healer\.pieces") as caught:
        loop_of_the_docstring(setup, healer, cuts=False)
    assert caught.value.exit_code == ExitCode.OUT_OF_MEMORY
    shrunk = [a for r in healer.recoveries for a in r["plan"] if a["action"] == "ShrinkBatch"]
    assert not any(action["effect"] for action in shrunk)


def test_pieces_give_the_gradient_of_the_whole_batch():
    setup = regression(model=lambda: torch.nn.Linear(8, 1))
    healer = setup.healer()
    batch = next(iter(setup.loader))
    setup.train_step(batch).backward()
    whole = setup.model.weight.grad.clone()
    with healer.attempt():
        healer.pieces(batch)
        raise out_of_memory()
    setup.optimizer.zero_grad()
    pieces = healer.pieces(batch)
    assert len(pieces) == 2
    for piece, share in pieces:
        (share * setup.train_step(piece)).backward()
    torch.testing.assert_close(setup.model.weight.grad, whole)
    healer.close()


def test_a_bad_batch_is_given_up():
    setup = regression()
    healer = setup.healer()
    loop(setup, healer, {5: ValueError("shapes do not match")})
    assert [d.cause.value for _, d, _ in healer.history] == ["data_error"]
    assert healer.last_step == 46
    healer.close()


def test_gradients_of_a_failed_attempt_are_gone():
    setup = regression()
    healer = setup.healer()
    batch = next(iter(setup.loader))
    with healer.attempt():
        setup.train_step(batch).backward()
        raise ValueError("shapes do not match")
    assert all(p.grad is None for p in setup.model.parameters())
    healer.close()


def test_memory_that_never_suffices_ends_within_the_budget(tmp_path):
    setup = regression()
    healer = setup.healer(run_dir=tmp_path)
    with pytest.raises(HealingError) as halted:
        loop(setup, healer, {n: out_of_memory() for n in range(100)}, epochs=9)
    assert halted.value.exit_code == ExitCode.OUT_OF_MEMORY
    assert (tmp_path / "postmortem.json").exists()


def test_an_error_in_the_program_is_raised_as_it_is():
    setup = regression()
    healer = setup.healer()
    with pytest.raises(AttributeError, match="no such thing"):
        loop(setup, healer, {5: AttributeError("no such thing")})
    healer.exits.dismiss()


def test_memory_that_runs_out_in_the_step_returns_to_a_snapshot():
    setup = regression()
    healer = setup.healer()

    def fail(*ignored):
        if healer.last_step == 24:
            handle.remove()
            with torch.no_grad():
                next(setup.model.parameters()).add_(1.0)
            raise out_of_memory()

    handle = setup.optimizer.register_step_pre_hook(fail)
    loop(setup, healer, {})
    done = [type(action).__name__ for _, _, plan in healer.history for action in plan]
    assert "Rollback" in done
    healer.close()


class Numbers(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        if index == 37:
            raise ValueError("sample 37 is torn")
        return torch.full((8,), index / 64), torch.zeros(1)


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("generator", [None, 5])
def test_the_samples_of_a_bad_batch_are_named(shuffle, generator):
    setup = regression()
    own = None if generator is None else torch.Generator().manual_seed(generator)
    loader = DataLoader(Numbers(), batch_size=4, shuffle=shuffle, generator=own)
    healer = setup.healer()
    torch.manual_seed(1)
    list(healer.batches(loader))
    evidence = healer.history[0][1].evidence
    assert 37 in evidence["samples"]
    assert len(evidence["samples"]) == 4
    # Asking the sampler again has drawn from no generator of the run.
    state = torch.get_rng_state()
    torch.manual_seed(1)
    own_again = None if generator is None else torch.Generator().manual_seed(generator)
    bare = iter(DataLoader(Numbers(), batch_size=4, shuffle=shuffle, generator=own_again))
    for _ in range(16):
        try:
            next(bare)
        except ValueError:
            continue
    assert torch.equal(state, torch.get_rng_state())
    healer.exits.dismiss()


def numbered(batch_size=4):
    data = torch.utils.data.TensorDataset(torch.randn(64, 8), torch.arange(64))
    return DataLoader(data, batch_size=batch_size, shuffle=True)


def test_an_attempt_names_the_samples_of_a_batch_that_cannot_be_used():
    setup = regression()
    healer, bad = setup.healer(), None
    for i, (inputs, numbers) in enumerate(healer.batches(numbered())):
        with healer.attempt():
            if i == 5:
                bad = numbers.tolist()
                raise ValueError("shapes do not match")
            setup.model(inputs).square().mean().backward()
            healer.step()
        setup.optimizer.zero_grad()
    evidence = healer.history[0][1].evidence
    assert (evidence["epoch"], evidence["batch"], evidence["samples"]) == (0, 5, bad)
    healer.exits.dismiss()


@pytest.mark.parametrize("call", [3, 4, 5, 16, 20])
def test_samples_are_named_also_where_a_step_has_several_batches(call):
    """16 batches an epoch and three a step: the step of the calls 16 to 18 has two epochs in it."""
    setup = regression()
    healer, calls, bad = setup.healer(), [], []

    def train_step(batch):
        calls.append(batch[1].tolist())
        if len(calls) == call:
            bad.extend(calls[-1])
            raise ValueError("shapes do not match")
        return setup.model(batch[0]).square().mean()

    healer.run(train_step, numbered(), 8, accumulate=3, progress=False)
    evidence = healer.history[0][1].evidence
    number = call - 1
    if call == 20:  # the failed step is behind it, all three batches of which were drawn
        assert evidence["epoch"] == 1
    else:
        assert (evidence["epoch"], evidence["batch"]) == divmod(number, 16)
    assert evidence["samples"] == bad


def test_where_the_loader_cannot_tell_a_bad_batch_is_known_by_its_number():
    class Stream(IterableDataset):
        def __iter__(self):
            return iter([(torch.zeros(8), torch.zeros(1))] * 8)

    def collate(samples):
        collate.calls += 1
        if collate.calls == 2:
            raise ValueError("torn")
        return torch.utils.data.default_collate(samples)

    collate.calls = 0
    healer = regression().healer()
    list(healer.batches(DataLoader(Stream(), batch_size=2, collate_fn=collate)))
    evidence = healer.history[0][1].evidence
    assert (evidence["epoch"], evidence["batch"], evidence["samples"]) == (0, 1, None)
    healer.exits.dismiss()
