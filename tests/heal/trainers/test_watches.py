"""Preference and reward training: alarms where there is something wrong, and only there."""

import random

import pytest
from datasets import Dataset
from transformers import TrainerCallback

from tests.heal.trainers import tiny
from tests.heal.trainers.runs import Healed

SETTINGS = {"max_steps": 60, "lr_scheduler_type": "constant"}


def coin_tosses():
    """Preferences that nothing can be learned from: the same two answers, either way round."""
    rng = random.Random(0)
    rows = {"prompt": [], "chosen": [], "rejected": []}
    for i in range(64):
        pair = [" " + tiny.sentence(i, 4), " " + tiny.sentence(i, 4, stride=5)]
        rng.shuffle(pair)
        for repeat in (pair, pair[::-1]):
            rows["prompt"].append(tiny.sentence(i, 3))
            rows["chosen"].append(repeat[0])
            rows["rejected"].append(repeat[1])
    return Dataset.from_dict(rows)


def test_dpo_on_coin_tosses_stays_at_chance_and_is_reported(tmp_path):
    settings = {**SETTINGS, "learning_rate": 1e-4}
    healed = Healed(tiny.dpo(tmp_path, data=coin_tosses(), **settings), plateau_steps=80)
    (diagnosis,) = [d for _, d, _ in healed.healer.history if d.cause.value == "plateau"]
    assert diagnosis.evidence["at_chance"]
    assert healed.decisions == [("plateau", [])]  # an alert; nothing is done
    assert healed.healer.lr_scale == 1.0


@pytest.mark.slow
def test_dpo_that_learns_is_not(tmp_path):
    healed = Healed(tiny.dpo(tmp_path, **SETTINGS), plateau_steps=80)
    assert healed.decisions == []


@pytest.mark.slow
def test_the_learning_rate_is_raised_at_a_plateau_on_request(tmp_path):
    settings = {**SETTINGS, "learning_rate": 1e-4}
    trainer = tiny.dpo(tmp_path, data=coin_tosses(), **settings)
    healed = Healed(trainer, plateau_steps=80, lr_ramp_steps=0, plateau_lr_factor=3.0)
    assert healed.decisions == [("plateau", ["ScaleLr"])]
    assert healed.healer.lr_scale == 3.0


@pytest.mark.parametrize("factor", [0.5, 1.0, 6.0])
def test_a_factor_that_makes_no_sense_is_an_error(factor, tmp_path):
    with pytest.raises(ValueError, match="plateau_lr_factor: expected more than 1 and at most 5"):
        Healed(tiny.plain(tmp_path), plateau_lr_factor=factor)


def test_answers_that_all_get_one_reward_are_reported(tmp_path):
    trainer = tiny.grpo(
        tmp_path, max_steps=40, reward_funcs=lambda completions, **_: [1.0] * len(completions)
    )
    healed = Healed(trainer)
    assert ("reward_collapse", []) in healed.decisions
    assert healed.output.global_step == 40


@pytest.mark.slow
@pytest.mark.parametrize("name", list(tiny.TRAINERS))
def test_a_healthy_run_of_any_trainer_raises_no_alarm(name, tmp_path):
    trainer = tiny.TRAINERS[name](tmp_path, max_steps=150, lr_scheduler_type="cosine")
    healed = Healed(trainer, zclip_enabled=True, plateau_steps=1000)
    assert healed.decisions == []


@pytest.mark.parametrize(("name", "chance"), [("rewards/accuracies", 0.0), ("accuracy", 0.6931)])
def test_a_log_of_preferences_speaks_for_chance_in_place_of_the_loss(name, chance, tmp_path):
    class Tells(TrainerCallback):
        def on_log(self, args, state, control, logs=None, **kwargs):
            logs[name] = 0.5

    healed = Healed(tiny.plain(tmp_path, callbacks=[Tells()], max_steps=3))
    assert healed.healer.monitor.watch.detectors["plateau"].chance == chance
