"""What a healed run says about its checkpoints: failures are logged, and resumes are honest."""

import itertools
import json
import logging
import os
import shutil
import signal

import pytest
import torch

from heal import HealingConfig
from heal.actions import HealingError
from heal.checkpoint import CheckpointStore, NoSpace, SaveFailed
from heal.config_fields import ConfigError
from heal.exit_codes import ExitCode
from heal.training_state import StateMismatch
from tests.checkpoint.scenes import run, saved_at
from tests.checkpoint.test_hostile import changed
from tests.heal.runs import fingerprint, regression

SYNC = {"checkpoint_interval": 5, "checkpoint_async": False}


@pytest.fixture
def log(caplog):
    caplog.set_level(logging.WARNING, "heal")
    return lambda: [r.getMessage() for r in caplog.records if r.name == "heal"]


def lines_with(lines, *words):
    return [line for line in lines if all(word in line for word in words)]


def train(setup, folder, steps, on_step=None):
    healer = setup.healer(checkpoint_dir=folder, run_dir=folder.parent / "journal")
    healer.resume()
    healer.run(setup.train_step, setup.loader, steps, progress=False, on_step=on_step)
    return healer


def test_every_failed_save_is_logged_and_so_is_the_first_that_works_again(
    tmp_path, log, monkeypatch
):
    from heal.checkpoint import saving

    def fill(step):
        if step in (7, 17):
            monkeypatch.setattr(saving, "free_bytes", lambda path: 0 if step == 7 else 2**40)

    healer = train(regression(**SYNC), tmp_path / "c", 25, fill)
    lines = log()
    assert len(lines_with(lines, "checkpoint of step 10 failed")) == 1
    assert len(lines_with(lines, "checkpoint of step 15 failed")) == 1
    assert lines_with(lines, "works again") == [
        "heal: checkpoint of step 20 is saved: saving works again"
    ]
    assert healer.failed_checkpoints == 2
    page = json.loads((tmp_path / "journal" / "postmortem.json").read_text())
    assert page["failed_checkpoints"] == 2


def test_a_checkpoint_folder_that_was_deleted_is_made_again(tmp_path):
    def delete(step):
        if step == 7:
            shutil.rmtree(tmp_path / "c")

    train(regression(**SYNC), tmp_path / "c", 12, delete)
    assert CheckpointStore(tmp_path / "c").steps() == [12, 10]


def damage(folder):
    for path in folder.glob("step-*/rank-*.safetensors"):
        path.write_bytes(path.read_bytes()[:-8])


def test_a_start_from_the_beginning_because_all_is_damaged_is_logged(tmp_path, log):
    train(regression(**SYNC), tmp_path / "c", 15)
    damage(tmp_path / "c")
    again = regression(**SYNC)
    healer = again.healer(checkpoint_dir=tmp_path / "c")
    assert healer.resume() == 0
    healer.exits.dismiss()
    (line,) = lines_with(log(), "none of the 3 checkpoints")
    assert "training starts at step 0" in line
    assert len(lines_with(log(), "cannot be used")) == 3


def test_retention_leaves_checkpoints_alone_that_could_not_be_read(tmp_path):
    train(regression(**SYNC), tmp_path / "c", 15)
    damage(tmp_path / "c")
    train(regression(**SYNC), tmp_path / "c", 30)
    names = sorted(path.name for path in (tmp_path / "c").iterdir())
    assert [name for name in names if "-r" not in name] == [
        "step-000005",
        "step-000010",
        "step-000015",
        "step-000020",
        "step-000025",
        "step-000030",
    ]
    assert len(names) == 6


OPTIMIZERS = {
    "SGD": lambda ps: torch.optim.SGD(ps, lr=0.1),
    "momentum": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9),
    "Adam": lambda ps: torch.optim.Adam(ps, lr=1e-2),
    "AdamW": lambda ps: torch.optim.AdamW(ps, lr=1e-2),
    "RMSprop": lambda ps: torch.optim.RMSprop(ps, lr=1e-2),
    "Adagrad": lambda ps: torch.optim.Adagrad(ps, lr=1e-2),
    "NAdam": lambda ps: torch.optim.NAdam(ps, lr=1e-2),
}
PAIRS = [
    (a, b)
    for a, b in itertools.permutations(OPTIMIZERS, 2)
    if {a, b} != {"SGD", "momentum"}  # one optimizer: its settings are those of the checkpoint
]


def with_optimizer(name, seed=0):
    setup = regression(seed, **SYNC)
    setup.optimizer = OPTIMIZERS[name](setup.model.parameters())
    return setup


@pytest.mark.parametrize(("saved", "live"), PAIRS)
def test_another_optimizer_is_refused_before_anything_is_changed(tmp_path, saved, live):
    train(with_optimizer(saved), tmp_path / "c", 5)
    again = with_optimizer(live, seed=1)
    before = fingerprint(again)
    healer = again.healer(checkpoint_dir=tmp_path / "c")
    with pytest.raises(StateMismatch, match=r"optimizers of the checkpoint: expected .*, got .*; "):
        healer.resume()
    healer.exits.dismiss()
    for a, b in zip(fingerprint(again), before, strict=True):
        assert torch.equal(a, b)


def test_an_old_checkpoint_that_names_no_optimizer_is_judged_by_its_settings(tmp_path):
    train(with_optimizer("SGD"), tmp_path / "c", 5)
    changed(tmp_path / "c" / "step-000005", lambda page: forget(page["values"], "optimizers"))
    healer = with_optimizer("AdamW").healer(checkpoint_dir=tmp_path / "c")
    with pytest.raises(
        StateMismatch, match="expected AdamW, as in this run, got one with no amsgrad, betas"
    ):
        healer.resume()
    healer.exits.dismiss()


def forget(value, name):
    """Take a name out of nested JSON, wherever it stands."""
    children = value.values() if isinstance(value, dict) else value
    if isinstance(value, dict):
        value.pop(name, None)
    for child in list(children):
        if isinstance(child, (dict, list)):
            forget(child, name)


def stopped(folder, spoil):
    """Stop a run by a signal and let its last save fail or not; return the halt."""
    setup = regression(checkpoint_interval=10, checkpoint_async=False)

    def stop(step):
        if step == 14:
            spoil()
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(HealingError) as halt:
        train(setup, folder, 40, stop)
    return halt.value


def test_a_stop_whose_state_is_saved_says_run_me_again(tmp_path):
    assert stopped(tmp_path / "c", lambda: None).exit_code == ExitCode.PREEMPTED
    page = json.loads((tmp_path / "journal" / "postmortem.json").read_text())
    assert (page["exit_reason"], page["exit_code"]) == ("sigterm", 75)


def test_a_stop_whose_state_could_not_be_saved_says_so(tmp_path, monkeypatch):
    from heal.checkpoint import saving

    def fill():
        monkeypatch.setattr(saving, "free_bytes", lambda path: 0)

    halt = stopped(tmp_path / "c", fill)
    assert halt.exit_code == ExitCode.NOT_SAVED
    assert "the newest checkpoint is of step 10" in str(halt)
    page = json.loads((tmp_path / "journal" / "postmortem.json").read_text())
    assert (page["exit_reason"], page["exit_code"]) == ("sigterm", 52)


def test_a_disk_that_is_too_full_is_told_with_the_reserve(tmp_path, monkeypatch):
    from heal.checkpoint import saving

    monkeypatch.setattr(saving, "free_bytes", lambda path: 512_000)
    with pytest.raises(NoSpace, match="and a reserve of 16777216 are needed, and 512000 are free"):
        run().train(1).save(tmp_path, 1)


def test_the_folder_of_a_save_that_could_not_be_committed_is_removed(tmp_path, monkeypatch):
    from heal.checkpoint import saving

    def full(path, parts):
        if path.name == "COMMIT":
            raise OSError(28, "No space left on device")
        real(path, parts)

    real = saving.write_file
    monkeypatch.setattr(saving, "write_file", full)
    with pytest.raises(SaveFailed, match="No space left"):
        run().train(1).save(tmp_path, 1)
    assert not list(tmp_path.iterdir())


def test_a_checkpoint_without_values_is_passed_over(tmp_path):
    train(regression(**SYNC), tmp_path / "c", 10)
    changed(tmp_path / "c" / "step-000010", lambda page: page.update(values={}))
    healer = regression(**SYNC).healer(checkpoint_dir=tmp_path / "c")
    assert healer.resume() == 5
    healer.exits.dismiss()
    assert any(
        "step-000010 cannot be used: expected a checkpoint of a healed run" in n
        for n in healer.notes
    )


def test_a_checkpoint_without_values_is_passed_over_by_load_too(tmp_path):
    saved_at(tmp_path, 1, 2)
    changed(tmp_path / "step-000002", lambda page: page.update(values={}))
    resumed = run(seed=1).load(tmp_path)
    assert resumed.step == 1
    assert "step-000002 cannot be used: expected a checkpoint of a healed run" in resumed.notes[0]


def test_settings_that_are_nested_too_deeply_are_refused_by_name():
    with pytest.raises(ConfigError, match="nested too deeply"):
        HealingConfig.from_toml("x = " + "[" * 5000 + "]" * 5000)
