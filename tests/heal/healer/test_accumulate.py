"""Steps of several batches: drawn as a bare loop draws them, also where a step is tried again."""

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from tests.heal.runs import assert_same, fingerprint, regression

STEPS = 12


class Augmented(Dataset):
    """Draws random numbers in this process, between those of dropout."""

    def __init__(self, inner):
        self.inner = inner

    def __len__(self):
        return len(self.inner)

    def __getitem__(self, i):
        x, y = self.inner[i]
        return x + 0.1 * torch.randn(8), y


def build(augments):
    setup = regression()
    if augments:
        setup.loader = DataLoader(Augmented(setup.loader.dataset), batch_size=16, shuffle=True)
    return setup


def bare(setup, accumulate):
    done = waiting = 0
    while True:
        for batch in setup.loader:
            (setup.train_step(batch) * (1 / accumulate)).backward()
            waiting += 1
            if waiting < accumulate:
                continue
            setup.optimizer.step()
            setup.optimizer.zero_grad()
            done, waiting = done + 1, 0
            if done == STEPS:
                return


@pytest.mark.parametrize("accumulate", [2, 3, 5])  # 16 batches are an epoch
@pytest.mark.parametrize("augments", [False, True], ids=["shuffled", "augmented"])
def test_an_undisturbed_run_is_the_bare_one(accumulate, augments):
    setup = build(augments)
    bare(setup, accumulate)
    expected = fingerprint(setup)
    healed = build(augments)
    healed.healer().run(
        healed.train_step, healed.loader, STEPS, accumulate=accumulate, progress=False
    )
    assert_same(fingerprint(healed), expected)


def failing(setup, call, error):
    """The setup's train step, of which one call raises when its forward is done."""
    calls = []

    def train_step(batch):
        calls.append(1)
        loss = setup.train_step(batch)
        if len(calls) == call:
            raise error
        return loss

    return train_step


@pytest.mark.parametrize("call", [16, 17, 18])  # the step of the second epoch's first batch
def test_a_step_that_is_tried_again_is_the_one_that_did_not_fail(call):
    expected = build(augments=True)
    bare(expected, 3)
    expected = fingerprint(expected)
    healed = build(augments=True)
    train_step = failing(healed, call, ConnectionError("refused"))
    healer = healed.healer()
    healer.run(train_step, healed.loader, STEPS, accumulate=3, progress=False)
    assert [d.cause.value for _, d, _ in healer.history] == ["network_error"]
    assert_same(fingerprint(healed), expected)


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory"), ValueError("shapes do not match")]
)
def test_no_shuffle_repeats_after_a_step_that_failed_across_two_epochs(error):
    """What the shuffle took from the generators must not be put back with the failed step."""
    setup = regression(model=lambda: torch.nn.Linear(8, 1))  # no dropout: only shuffles draw
    seen = []

    class Noted(Dataset):
        def __len__(self):
            return 160

        def __getitem__(self, i):
            seen.append(i)
            return setup.loader.dataset[i]

    loader = DataLoader(Noted(), batch_size=16, shuffle=True)  # ten batches
    setup.healer().run(failing(setup, 11, error), loader, STEPS, accumulate=3, progress=False)
    epochs = [tuple(seen[i : i + 160]) for i in range(0, len(seen) - 159, 160)]
    assert len(epochs) == len(set(epochs)) == 3
    assert all(len(set(epoch)) == 160 for epoch in epochs)


def test_a_step_is_given_up_as_a_whole():
    setup, batches = regression(), []
    inner = setup.train_step

    def train_step(batch):
        batches.append(int(batch[0][0, 0]))
        if batches[-1] == 4:
            raise ValueError("shapes do not match")
        return inner((torch.ones(4, 8), torch.ones(4, 1)))

    loader = [(torch.full((4, 8), float(i)), torch.ones(4, 1)) for i in range(12)]
    healer = setup.healer()
    healer.run(train_step, loader, 3, accumulate=3, progress=False)
    assert batches == [0, 1, 2, 3, 4, 6, 7, 8, 9, 10, 11]  # 5 would have been of that step
    ((_, diagnosis, _),) = healer.history
    assert diagnosis.evidence["batch"] == 4


def test_a_loader_that_runs_dry_within_a_step_ends_the_run():
    setup = regression()
    healer = setup.healer()
    healer.run(setup.train_step, iter(list(setup.loader)), STEPS, accumulate=3, progress=False)
    assert healer.last_step == 4  # sixteen batches
    assert any("gave 16 batches and then none" in note for note in healer.notes)


def test_what_on_step_raises_goes_on_even_if_it_is_an_end_of_something():
    setup = regression()

    def on_step(step):
        raise StopIteration("of the user's")

    with pytest.raises(StopIteration, match="of the user's"):
        setup.healer().run(setup.train_step, setup.loader, STEPS, progress=False, on_step=on_step)
