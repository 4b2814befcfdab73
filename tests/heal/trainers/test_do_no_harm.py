"""A run that needs no healing is bit by bit the bare trainer's, and the trainer is given back."""

import pytest
import torch

from heal import HealingConfig, SelfHealingCallback, SelfHealingTrainer
from tests.heal.trainers import tiny
from tests.heal.trainers.failures import raises
from tests.heal.trainers.runs import (
    Healed,
    assert_same,
    bare,
    fingerprint,
    log,
    quick,
)

SLOW = pytest.mark.slow
QUICK_ONES = ("Trainer", "SFT", "GRPO")


def assert_undisturbed(make, tmp_path, **settings):
    alone = bare(make(tmp_path / "alone", **settings))
    healed = Healed(make(tmp_path / "healed", **settings))
    assert healed.error is None
    assert healed.healer.notes == []
    assert log(healed.trainer) == log(alone)
    assert healed.output.global_step == alone.state.global_step
    assert healed.trainer.state.num_train_epochs == alone.state.num_train_epochs
    assert_same(fingerprint(alone), fingerprint(healed.trainer))


@pytest.mark.parametrize(
    "name", [n if n in QUICK_ONES else pytest.param(n, marks=SLOW) for n in tiny.TRAINERS]
)
def test_an_undisturbed_run_is_bit_by_bit_the_bare_trainers(name, tmp_path):
    assert_undisturbed(tiny.TRAINERS[name], tmp_path)


def test_so_it_is_with_accumulation_over_several_epochs_of_uneven_length(tmp_path):
    settings = {"gradient_accumulation_steps": 3, "max_steps": -1, "num_train_epochs": 2.5}
    assert_undisturbed(tiny.plain, tmp_path, **settings)


@pytest.mark.slow
@pytest.mark.parametrize("name", list(tiny.TRAINERS))
def test_so_it_is_with_accumulation_for_every_trainer(name, tmp_path):
    assert_undisturbed(tiny.TRAINERS[name], tmp_path, gradient_accumulation_steps=3)


def test_random_generators_are_where_the_bare_trainer_left_them(tmp_path):
    bare(tiny.plain(tmp_path / "alone"))
    after_bare = torch.get_rng_state()
    Healed(tiny.plain(tmp_path / "healed"))
    assert torch.equal(torch.get_rng_state(), after_bare)


def everything_set_on(trainer):
    owners = (trainer, trainer.accelerator, trainer.optimizer)
    kept = [dict(vars(owner)) for owner in owners if owner is not None]
    return kept, list(trainer.callback_handler.callbacks)


@pytest.mark.parametrize("harm", [None, lambda: AttributeError("a bug")])
def test_no_patch_outlives_train(harm, tmp_path):
    trainer = bare(tiny.plain(tmp_path))  # makes what the first train() makes
    if harm is not None:
        raises(trainer, harm)
    (own, accelerator, optimizer), callbacks = everything_set_on(trainer)
    Healed(trainer)
    (own_now, accelerator_now, optimizer_now), callbacks_now = everything_set_on(trainer)
    patched = ("training_step", "get_batch_samples", "set_initial_training_values")
    assert not set(patched) & set(own_now)
    assert set(own_now) == set(own)
    assert set(accelerator_now) == set(accelerator)
    assert optimizer_now.keys() == optimizer.keys()
    assert "_step" not in repr(optimizer_now["step"])
    assert callbacks_now == callbacks
    assert not trainer.is_in_train


def test_the_trainer_can_be_trained_bare_after_it_was_healed(tmp_path):
    trainer = Healed(tiny.plain(tmp_path / "first")).trainer
    twice = bare(bare(tiny.plain(tmp_path / "second")))
    assert_same(fingerprint(bare(trainer)), fingerprint(twice))


def test_the_callback_alone_leaves_an_undisturbed_run_as_it_is(tmp_path):
    alone = bare(tiny.plain(tmp_path / "alone"))
    watched = tiny.plain(tmp_path / "watched")
    callback = SelfHealingCallback(watched, quick())
    watched.add_callback(callback)
    bare(watched)
    assert callback.healer.latest.step == 7
    assert log(watched) == log(alone)
    assert_same(fingerprint(watched), fingerprint(alone))


def test_zclip_takes_the_place_of_the_trainers_clip(tmp_path):
    trainer = tiny.plain(tmp_path, max_grad_norm=0.25)
    wrapper = SelfHealingTrainer(trainer, HealingConfig())
    metrics = wrapper.train().metrics
    assert wrapper.healer.optimizers[0].clipper.max_grad_norm == 0.25
    assert metrics["zclip/raw_grad_norm"] > 0.25
    assert metrics["zclip/clipped_grad_norm"] == pytest.approx(0.25, rel=1e-3)


def test_a_trainer_that_does_not_clip_is_not_clipped_by_a_limit_of_ours(tmp_path):
    trainer = tiny.plain(tmp_path, max_grad_norm=0.0)
    wrapper = SelfHealingTrainer(trainer, HealingConfig())
    wrapper.train()
    assert wrapper.healer.optimizers[0].clipper.max_grad_norm is None
