"""Mistakes are named before anything is trained, and nothing is lost."""

import pytest
from transformers import Trainer, TrainerCallback

from heal import HealingConfig, SelfHealingCallback, SelfHealingTrainer
from heal.config_fields import ConfigError
from tests.heal.trainers import tiny
from tests.heal.trainers.runs import Healed, assert_same, weights


def test_a_class_instead_of_a_trainer():
    with pytest.raises(TypeError, match=r"trainer: expected an instance, got the class Trainer; "):
        SelfHealingTrainer(Trainer)


def test_something_that_is_no_trainer():
    with pytest.raises(TypeError, match=r"trainer: expected .* got dict, which lacks train, args"):
        SelfHealingTrainer({})


def test_a_setting_that_does_not_exist(tmp_path):
    trainer = tiny.plain(tmp_path)
    with pytest.raises(ConfigError, match="nan_patients"):
        SelfHealingTrainer(trainer, {"nan_patients": 3})
    with pytest.raises(ConfigError, match="nan_patients"):
        HealingConfig(nan_patients=3)
    with pytest.raises(TypeError, match=r"config: expected .* got int; "):
        SelfHealingCallback(trainer, 3)


def test_a_trainer_that_is_training_already(tmp_path):
    trainer = tiny.plain(tmp_path)
    raised_while_training = []

    class TrainsAgain(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            for begin in (SelfHealingTrainer(trainer).train, SelfHealingTrainer(trainer).dry_run):
                with pytest.raises(RuntimeError, match="is training already") as raised:
                    begin()
                raised_while_training.append(raised)

    trainer.add_callback(TrainsAgain())
    SelfHealingTrainer(trainer).train()
    assert len(raised_while_training) == 16
    assert trainer.state.global_step == 8


def test_a_trainer_whose_healed_training_failed_can_be_healed_again(tmp_path):
    trainer = tiny.plain(tmp_path)

    class Fails(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            raise KeyboardInterrupt

    trainer.add_callback(Fails())
    with pytest.raises(KeyboardInterrupt):
        SelfHealingTrainer(trainer).train()
    trainer.remove_callback(Fails)
    assert Healed(trainer).output.global_step == 8


def test_a_trainer_whose_training_failed_before_can_be_healed(tmp_path):
    trainer = tiny.plain(tmp_path)
    trainer.is_in_train = True  # what a train() that raised leaves behind
    with pytest.warns(RuntimeWarning, match="has raised before, or is still running"):
        assert Healed(trainer).output.global_step == 8


def test_a_trainer_that_is_watched_already(tmp_path):
    trainer = tiny.plain(tmp_path)
    trainer.add_callback(SelfHealingCallback(trainer))
    with pytest.raises(RuntimeError, match="already has a SelfHealingCallback"):
        SelfHealingTrainer(trainer).train()


def test_an_output_dir_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("in the way")
    trainer = tiny.plain(tmp_path)
    trainer.args.output_dir = str(tmp_path / "file" / "run")
    before = weights(trainer)
    with pytest.raises(PermissionError, match="cannot be made: Not a directory"):
        SelfHealingTrainer(trainer).train()
    assert_same(before, weights(trainer))


def test_an_output_dir_that_cannot_be_written(tmp_path, monkeypatch):
    trainer = tiny.plain(tmp_path)
    monkeypatch.setattr("os.access", lambda path, mode: False)  # root may write everywhere
    with pytest.raises(PermissionError, match="cannot be written"):
        SelfHealingTrainer(trainer).train()


def test_a_trainer_with_deepspeed(tmp_path):
    trainer = tiny.plain(tmp_path)
    trainer.is_deepspeed_enabled = True
    with pytest.raises(TypeError, match="DeepSpeed"):
        SelfHealingTrainer(trainer)
