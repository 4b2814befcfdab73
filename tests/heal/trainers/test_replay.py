"""Corrupt weights and a replay give the run that never failed: weights, generators and log."""

import pytest
import torch
from torch import nn
from transformers import TrainerCallback

from tests.heal.trainers import failures, tiny
from tests.heal.trainers.runs import Healed, assert_same, fingerprint, log

BATCHES_PER_EPOCH = 16


def both(build, tmp_path, at, **settings):
    """Return a healed run whose weights were corrupted, and one that was not."""
    sound = Healed(build(tmp_path / "sound"), after_rollback="replay_data", **settings)
    trainer = build(tmp_path / "healed")
    failures.corrupts_weights(trainer, at=at)
    healed = Healed(trainer, after_rollback="replay_data", **settings)
    assert healed.error is None
    assert healed.decisions == [("weight_corruption", ["Rollback"])]
    return healed.trainer, sound.trainer


@pytest.mark.parametrize("per_step", [1, 3, 5])
@pytest.mark.parametrize("step", [13, 14])
def test_an_epoch_that_ends_inside_a_step_is_replayed_exactly(tmp_path, per_step, step):
    assert BATCHES_PER_EPOCH % per_step == (0 if per_step == 1 else 1)
    settings = {"max_steps": 24, "gradient_accumulation_steps": per_step}
    healed, sound = both(lambda f: tiny.plain(f, **settings), tmp_path, at=step * per_step)
    assert_same(fingerprint(healed), fingerprint(sound))
    assert log(healed) == log(sound)


@pytest.mark.parametrize(
    "options",
    [
        {"eval_strategy": "epoch"},
        {"eval_strategy": "steps", "eval_steps": 4},
        {"logging_strategy": "epoch"},
        {"accelerator_config": {"use_seedable_sampler": False}},
        {"max_steps": -1, "num_train_epochs": 4},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_the_log_is_that_of_the_run_that_never_failed(tmp_path, options):
    settings = {"max_steps": 24, "gradient_accumulation_steps": 3, **options}
    if "eval_strategy" in options:
        settings["eval_dataset"] = tiny.tokens(8)
    healed, sound = both(lambda f: tiny.plain(f, **settings), tmp_path, at=39)
    assert log(healed) == log(sound)
    assert_same(fingerprint(healed), fingerprint(sound))


def test_a_reference_model_that_follows_the_policy_returns_with_it(tmp_path):
    follows = {"sync_ref_model": True, "ref_model_sync_steps": 2, "ref_model_mixup_alpha": 0.5}
    healed, sound = both(lambda f: tiny.dpo(f, max_steps=14, **follows), tmp_path, at=7)
    assert_same(fingerprint(healed), fingerprint(sound))
    for ours, theirs in zip(
        healed.ref_model.parameters(), sound.ref_model.parameters(), strict=True
    ):
        assert torch.equal(ours, theirs)


class Keeps(TrainerCallback):
    """A callback with a model of its own."""

    def __init__(self):
        self.average = nn.Linear(2, 2)


def test_a_model_that_a_callback_keeps_is_named_once(tmp_path):
    healed = Healed(tiny.plain(tmp_path, callbacks=[Keeps()]))
    (note,) = [note for note in healed.healer.notes if "Keeps.average" in note]
    assert "no snapshot holds" in note
