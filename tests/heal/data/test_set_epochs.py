"""Who gets ``set_epoch``: in a whole loop, samplers and datasets that the caller leaves alone."""

import pytest
import torch
from torch import nn

from heal import Healer
from heal.actions import Rollback
from tests.heal.data.test_replay import PER_EPOCH, rolled_back_to, with_epochs
from tests.heal.runs import quick

PLACES = ["sampler", "batch_sampler", "dataset"]


def trained(loader, steps=3 * PER_EPOCH, on_step=None, spoil_at=None, **options):
    """Train by ``run``; return the batch of every step as it stood in the end, and the healer."""
    model, seen, calls = nn.Linear(4, 1), {}, []
    config = quick(
        snapshot_interval=5, quarantine_steps=2, check_interval=1, after_rollback="replay_data"
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    healer = Healer(model, optimizer, config=config, **options)
    healer.on_instability(lambda d, plan: [a for a in plan if isinstance(a, Rollback)] or None)

    def train_step(batch):
        calls.append(1)
        if len(calls) == spoil_at:
            with torch.no_grad():
                model.weight[0, 0] = float("nan")
        seen[healer.last_step + 1] = batch[0].tolist()
        return model(batch[0].float()).square().mean() * 1e-5

    torch.manual_seed(5)
    if "checkpoint_dir" in options:
        healer.resume()
    healer.run(train_step, loader, steps, progress=False, on_step=on_step)
    return seen, healer


def by_hand(place, epochs=(0, 1, 2)):
    """What a loop sees that tells the epoch itself."""
    loader, owner = with_epochs(place)
    torch.manual_seed(5)
    seen = []
    for epoch in epochs:
        owner.set_epoch(epoch)
        seen += [batch[0].tolist() for batch in loader]
    return dict(enumerate(seen))


@pytest.mark.parametrize("place", PLACES)
def test_a_whole_loop_tells_the_epoch_as_a_loop_by_hand_does(place):
    loader, owner = with_epochs(place)
    assert trained(loader)[0] == by_hand(place)
    assert owner.epoch == 2


@pytest.mark.parametrize("place", PLACES)
def test_what_the_user_tells_stands(place):
    loader, owner = with_epochs(place)
    owner.set_epoch(7)

    def tell(step):
        if step % PER_EPOCH == PER_EPOCH - 1:
            owner.set_epoch(owner.epoch + 10)

    assert trained(loader, on_step=tell)[0] == by_hand(place, (7, 17, 27))


@pytest.mark.parametrize("place", PLACES)
def test_a_replay_in_a_whole_loop_tells_the_same_epochs_again(place):
    loader, _ = with_epochs(place)
    seen, healer = trained(loader, spoil_at=PER_EPOCH + 2)
    assert min(rolled_back_to(healer)) < PER_EPOCH
    assert seen == by_hand(place)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("stop_at", [PER_EPOCH - 3, PER_EPOCH, PER_EPOCH + 3])
def test_a_resumed_whole_loop_goes_on_with_its_epoch(place, stop_at, tmp_path):
    first, _ = trained(with_epochs(place)[0], stop_at, checkpoint_dir=tmp_path)
    rest, _ = trained(with_epochs(place)[0], checkpoint_dir=tmp_path)
    assert {**first, **rest} == by_hand(place)
    assert min(rest) == stop_at


def test_a_loop_by_hand_is_the_users_business():
    loader, owner = with_epochs("sampler")
    model = nn.Linear(4, 1)
    healer = Healer(model, torch.optim.SGD(model.parameters(), lr=0.0), config=quick())
    epochs = [[batch[0].tolist() for batch in healer.batches(loader)] for _ in range(2)]
    assert epochs[0] == epochs[1]
    assert owner.epoch == 0
