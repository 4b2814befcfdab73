"""A dry run takes real steps and leaves nothing behind."""

import pytest

from heal import SelfHealingTrainer
from tests.heal.trainers import failures, tiny
from tests.heal.trainers.runs import Healed, assert_same, bare, fingerprint, log, set_seed, weights


def files_in(folder):
    return sorted(path for path in folder.rglob("*"))


@pytest.mark.parametrize(
    "name",
    ["Trainer", *(pytest.param(n, marks=pytest.mark.slow) for n in ("GRPO", "SFT", "DPO"))],
)
def test_training_after_a_dry_run_is_as_if_there_had_been_none(name, tmp_path):
    make = tiny.TRAINERS[name]
    alone = bare(make(tmp_path / "alone"))
    trainer = make(tmp_path / "tried", save_strategy="steps", save_steps=1)
    set_seed(1)
    report = SelfHealingTrainer(trainer).dry_run(num_steps=2)
    assert report.is_ok, report.problems
    assert len(report.losses) == 2
    assert report.trained == len(list(trainer.model.parameters()))
    assert files_in(tmp_path / "tried") == []
    assert trainer.state.global_step == 0
    assert trainer.state.log_history == []
    assert trainer.optimizer is None
    trainer.args.save_strategy = "no"
    trainer.train()
    assert log(trainer) == log(alone)
    assert_same(fingerprint(alone), fingerprint(trainer))


@pytest.mark.slow
def test_a_dry_run_between_two_trainings_keeps_the_optimizer(tmp_path):
    twice = bare(bare(tiny.plain(tmp_path / "alone")))
    trainer = bare(tiny.plain(tmp_path / "tried"))
    assert SelfHealingTrainer(trainer).dry_run().is_ok
    assert_same(fingerprint(twice), fingerprint(bare(trainer)))


def test_a_dry_run_tells_what_would_fail_and_takes_it_back(tmp_path):
    trainer = tiny.plain(tmp_path)
    before = weights(trainer)
    failures.raises(trainer, lambda: ValueError("labels have the wrong shape"), at=1)
    report = SelfHealingTrainer(trainer).dry_run()
    assert report.problems == ["ValueError: labels have the wrong shape"]
    assert_same(before, weights(trainer))
    assert "training_step" not in vars(trainer)


def test_a_dry_run_tells_of_a_loss_that_is_not_finite(tmp_path):
    trainer = tiny.plain(tmp_path)
    failures.nan_loss(trainer, at=0)
    report = SelfHealingTrainer(trainer).dry_run()
    assert not report.is_ok
    assert "not finite" in report.problems[0]


def test_the_wrapper_trains_after_its_dry_run(tmp_path):
    trainer = tiny.plain(tmp_path)
    SelfHealingTrainer(trainer).dry_run()
    assert Healed(trainer).output.global_step == 8
