"""Settings of optimizers that make no sense are noted when they are first seen, or change so."""

import pytest
import torch

from heal import Healer
from tests.heal.runs import regression


def notes_with(make):
    model = torch.nn.Linear(3, 1)
    healer = Healer(model, make(model.parameters()))
    healer.exits.dismiss()
    return healer.notes


def changed(optimizer, **settings):
    optimizer.param_groups[0].update(settings)
    return optimizer


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda p: torch.optim.AdamW(p, 2e-3, weight_decay=1000.0), "takes 2 times the weight"),
        (lambda p: torch.optim.AdamW(p, 1e-3, weight_decay=20.0), "takes 0.02 times the weight"),
        (lambda p: torch.optim.SGD(p, 0.1, weight_decay=0.5), "takes 0.05 times the weight"),
        (lambda p: changed(torch.optim.AdamW(p), weight_decay=-0.1), "got -0.1; every step makes"),
        (lambda p: torch.optim.SGD(p, 0.1, momentum=1.0), "momentum of SGD: expected 0 or more"),
        (lambda p: changed(torch.optim.AdamW(p), betas=(0.9, 1.5)), r"got (0.9, 1.5); old"),
        (lambda p: changed(torch.optim.AdamW(p), eps=-1e-8), "eps of AdamW: expected 0 or more"),
    ],
)
def test_a_setting_that_makes_no_sense_is_noted_at_once(make, expected):
    (note,) = notes_with(make)
    assert expected in note


@pytest.mark.parametrize(
    "make",
    [
        torch.optim.AdamW,
        lambda p: torch.optim.AdamW(p, 1e-3, weight_decay=10.0),
        lambda p: torch.optim.Adam(p, 1e-3, weight_decay=100.0),  # divided by its own size
        lambda p: torch.optim.RMSprop(p, 1e-2, weight_decay=10.0, momentum=0.99),
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.99, weight_decay=1e-2),
        lambda p: torch.optim.AdamW(p, torch.tensor(1e-3), weight_decay=0.1),
        lambda p: torch.optim.Adafactor(p),
        lambda p: changed(torch.optim.SGD(p, 0.1), weight_decay=None),
    ],
)
def test_usual_settings_are_not_noted(make):
    assert notes_with(make) == []


def warmed_up(optimizer):
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 100)  # a rate of 0 at first
    return optimizer


def test_decay_is_judged_at_the_rate_that_a_schedule_reaches():
    (note,) = notes_with(lambda p: warmed_up(torch.optim.AdamW(p, 1e-3, weight_decay=100.0)))
    assert "at a learning rate of 0.001" in note


def test_a_learning_rate_that_leaps_says_nothing_of_the_decay():
    model = torch.nn.Linear(3, 1)
    healer = Healer(model, torch.optim.AdamW(model.parameters(), 1e-3, weight_decay=0.01))
    healer.exits.dismiss()
    healer.optimizers[0].param_groups[0]["lr"] = 10.0
    healer.settings.look()
    assert healer.notes == []


def test_settings_that_change_while_the_run_goes_on_are_noted_once_each():
    setup = regression()
    healer = setup.healer()
    groups = setup.optimizer.param_groups
    decays = {20: -0.1, 60: 0.01, 100: -0.2}

    def change(step):
        groups[0]["weight_decay"] = decays.get(step, groups[0]["weight_decay"])

    healer.run(setup.train_step, setup.loader, 130, progress=False, on_step=change)
    notes = [note for note in healer.notes if note.startswith("weight_decay of")]
    assert len(notes) == 2
    assert "got -0.1;" in notes[0]
    assert "got -0.2;" in notes[1]
