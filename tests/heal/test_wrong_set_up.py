"""What a Healer is given that it cannot use: an error where it costs nothing, else a note."""

import errno

import pytest
import torch

from heal import Healer, HealingConfig
from heal.actions import Rollback
from heal.testing import Chaos, Fault
from tests.heal.runs import regression


@pytest.mark.parametrize("below", ["", "run/checkpoints"])
def test_a_checkpoint_dir_that_cannot_be_made_is_an_error_at_once(tmp_path, below):
    in_the_way = tmp_path / "notes.txt"
    in_the_way.write_text("a file")
    wanted = in_the_way / below
    with pytest.raises(OSError, match="give a folder that this process may write to") as refused:
        regression().healer(checkpoint_dir=wanted)
    assert str(wanted) in str(refused.value)
    assert refused.value.errno in (errno.EEXIST, errno.ENOTDIR)
    assert refused.value.__cause__ is not None


def test_a_run_dir_that_cannot_be_made_costs_the_journal_and_not_the_run(tmp_path, capsys):
    in_the_way = tmp_path / "notes.txt"
    in_the_way.write_text("a file")
    healer = regression().run(20, run_dir=in_the_way / "run")
    assert healer.last_step == 19
    assert str(in_the_way / "run") in capsys.readouterr().err


def test_settings_may_be_a_dict():
    setup = regression()
    setup.config = {"nan_patience": 7}
    healer = setup.healer()
    healer.exits.dismiss()
    assert healer.config == HealingConfig(nan_patience=7)


def parts_of_a_healer(**changes):
    setup = regression()
    return {"model": setup.model, "optimizer": setup.optimizer, **changes}


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        (
            {"config": "heal.toml"},
            TypeError,
            "config: expected a HealingConfig or a dict, got str; .*from_toml",
        ),
        ({"model": "gpt2"}, TypeError, "model: expected a torch Module, got str"),
        ({"config": {"nan_patienc": 7}}, ValueError, "nan_patienc"),
        ({"scheduler": HealingConfig()}, TypeError, r"got a HealingConfig; .*config=\.\.\."),
        (
            {"optimizer": []},
            ValueError,
            "optimizer: expected one optimizer or more, got an empty list",
        ),
        ({"optimizer": ["adam"]}, TypeError, r"optimizer\[0\]: expected a torch Opt.*, got str"),
    ],
)
def test_an_argument_of_the_wrong_kind_is_named(changes, kind, message):
    with pytest.raises(kind, match=message):
        Healer(**parts_of_a_healer(**changes))


def test_an_optimizer_that_is_given_twice_is_refused():
    given = parts_of_a_healer()
    given["optimizer"] = [given["optimizer"]] * 2
    with pytest.raises(ValueError, match=r"optimizer\[1\]: expected .* got one AdamW twice"):
        Healer(**given)


def test_a_loader_that_can_be_passed_over_once_ends_the_run_early_and_that_is_said(capsys):
    setup = regression()
    healer = setup.healer()
    healer.run(setup.train_step, (batch for batch in setup.loader), 100, progress=False)
    (note,) = healer.notes
    assert note.startswith("the loader gave 16 batches and then none; 16 of 100 steps were done")
    assert "generators" in note
    assert capsys.readouterr().err == f"heal: {note}\n"


def test_a_loader_without_batches_is_said_to_have_none(capsys):
    setup = regression()
    healer = setup.healer()
    healer.run(setup.train_step, [], 10, progress=False)
    assert healer.notes == ["the loader has no batches; 0 of 10 steps were done"]
    assert healer.notes[0] in capsys.readouterr().err


@pytest.mark.parametrize("told", [{"steps": 0}, {"steps": -1}, {"accumulate": 0}])
def test_a_dry_run_of_nothing_is_refused(told):
    setup = regression()
    healer = setup.healer()
    healer.exits.dismiss()
    with pytest.raises(ValueError, match="steps and accumulate: expected 1 or more of each, got"):
        healer.dry_run(setup.train_step, setup.loader, **told)


class OwnSchedule:
    """Somebody's own: it sets the learning rate and knows nothing of state dicts."""

    def __init__(self, optimizer):
        self.optimizer, self.steps = optimizer, 0

    def step(self):
        self.steps += 1
        for group in self.optimizer.param_groups:
            group["lr"] = 3e-3 * 0.99**self.steps


def test_a_scheduler_without_state_costs_no_snapshots_and_is_noted_once():
    setup = regression(loss_spike_factor=1e9)
    setup.scheduler = OwnSchedule(setup.optimizer)
    healer = setup.healer()
    chaos = Chaos(healer, [Fault("corrupt_weight", at=30)])
    healer.run(chaos.wrap(setup.train_step), setup.loader, 60, progress=False)
    assert any(isinstance(a, Rollback) for _, _, plan in healer.history for a in plan)
    assert healer.last_step == 59
    (note,) = healer.notes
    assert "OwnSchedule" in note
    assert "state_dict" in note
    assert all(torch.isfinite(p).all() for p in setup.model.parameters())


def test_a_scheduler_without_state_is_saved_and_resumed_around(tmp_path):
    setup = regression(checkpoint_interval=10)
    setup.scheduler = OwnSchedule(setup.optimizer)
    setup.run(20, checkpoint_dir=tmp_path)
    again = regression(checkpoint_interval=10)
    again.scheduler = OwnSchedule(again.optimizer)
    healer = again.healer(checkpoint_dir=tmp_path)
    assert healer.resume() == 20
    healer.exits.dismiss()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"optimizer": torch.optim.AdamW}, "optimizer: expected .*, got the class AdamW"),
        ({"optimizer": None}, "optimizer: expected .*, got NoneType"),
        ({"scheduler": "cosine"}, "scheduler: expected an object with a step method, got str"),
    ],
)
def test_what_cannot_be_stepped_is_an_error(changes, message):
    with pytest.raises(TypeError, match=message):
        Healer(**parts_of_a_healer(**changes))


class Silent:
    def observe(self, record):
        return None

    def state(self):
        return {}

    def load_state(self, state):
        pass


@pytest.mark.parametrize(
    ("add", "message"),
    [
        (lambda healer: healer.on_instability(None), "hook: expected a function, got NoneType"),
        (lambda healer: healer.on_rollback(3), "callback: expected a function, got int"),
        (lambda healer: healer.on_record([]), "callback: expected a function, got list"),
        (
            lambda healer: healer.add_detector("x", print),
            "detector: expected an object with the methods observe, state and load_state, got",
        ),
        (lambda healer: healer.add_detector("x", Silent), "got the class Silent"),
        (lambda healer: healer.run([], print, 3), "train_step: expected a function, got list"),
        (lambda healer: list(healer.batches(None)), "loader: expected an iterable of batches"),
    ],
)
def test_an_extension_of_the_wrong_kind_is_an_error_when_it_is_added(add, message):
    healer = regression().healer()
    healer.exits.dismiss()
    with pytest.raises(TypeError, match=message):
        add(healer)
    healer.add_detector("x", Silent())


@pytest.mark.parametrize("wrong", [{"steps": -1}, {"steps": 3, "accumulate": 0}])
def test_a_run_of_fewer_than_no_steps_is_an_error(wrong):
    setup = regression()
    healer = setup.healer()
    healer.exits.dismiss()
    with pytest.raises(ValueError, match="expected at least"):
        healer.run(setup.train_step, setup.loader, **wrong, progress=False)


@pytest.mark.parametrize(
    ("returned", "got"),
    [
        (lambda loss: None, "NoneType"),
        (lambda loss: {"loss": loss}, "dict"),
        (lambda loss: loss.expand(8), "a tensor of 8 numbers"),
        (lambda loss: loss.detach(), "one that does not depend on any parameter"),
    ],
)
def test_a_train_step_that_returns_no_loss_ends_the_run_with_its_error(returned, got):
    setup = regression()
    healer = setup.healer()
    with pytest.raises(TypeError, match=f"train_step: expected the mean loss, .* got {got}"):
        healer.run(lambda batch: returned(setup.train_step(batch)), setup.loader, 5, progress=False)


def notes_of_a_loop(body, **changes):
    """Train a few steps by a loop whose body is wrong; return what the healer notes."""
    setup = regression()
    healer = Healer(setup.model, setup.optimizer, config=setup.config, **changes)
    for batch in healer.batches(setup.loader):
        body(healer, setup, setup.train_step(batch))
        setup.optimizer.zero_grad()
    healer.close()
    return healer.notes


def test_a_loop_without_backward_is_noted_once():
    (note,) = notes_of_a_loop(lambda healer, setup, loss: healer.step(loss))
    assert note.startswith("step: expected gradients")


def test_a_second_step_with_the_same_loss_is_noted_once():
    def body(healer, setup, loss):
        loss.backward()
        healer.step(loss)
        healer.step(loss)

    (note,) = notes_of_a_loop(body)
    assert "got the same tensor twice" in note


def test_a_constant_for_a_loss_may_be_given_again():
    constant = torch.zeros(())

    def body(healer, setup, loss):
        loss.backward()
        healer.step(constant)

    assert notes_of_a_loop(body) == []


@pytest.mark.parametrize("is_first", [False, True])
def test_an_optimizer_that_the_loop_steps_too_is_noted_once(is_first):
    def body(healer, setup, loss):
        loss.backward()
        if is_first:
            setup.optimizer.step()
        healer.step(loss)
        if not is_first:
            setup.optimizer.step()

    (note,) = notes_of_a_loop(body)
    assert note.startswith("AdamW: expected healer.step to take the step")


def test_a_scheduler_of_another_optimizer_is_noted():
    other = torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ConstantLR(other)
    given = parts_of_a_healer(scheduler=scheduler)
    healer = Healer(**given)
    healer.exits.dismiss()
    (note,) = healer.notes
    assert note.startswith("ConstantLR drives another optimizer")
