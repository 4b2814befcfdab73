"""Damage without NaN is found by an experiment and undone; a change that was meant is left alone.

With default settings: nobody tunes healing before something has gone wrong.
"""

from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from transformers import TrainerCallback

from heal import SelfHealingCallback, SelfHealingTrainer
from heal.journal import read_events
from tests.heal.trainers import tiny
from tests.heal.trainers.runs import assert_same, bare, log, set_seed, weights

AT = 50  # the step that damage or a change comes before


def distinct_words(completions, **ignored):
    """A reward that no policy can get with one word for all."""
    return [len(set(text.split())) / 6 for text in completions]


def train(trainer, wrapper=SelfHealingTrainer, config=None):
    set_seed(1)
    healing = wrapper(trainer, config)
    if wrapper is SelfHealingTrainer:
        healing.train()
    else:
        trainer.add_callback(healing)
        trainer.train()
    return healing.healer


def answers(folder):
    events, _ = read_events(folder / "events.jsonl")
    return [e["answer"] for e in events if e["event"] == "experiment"]


class Damages(TrainerCallback):
    """Multiplies all weights once, as no optimizer does."""

    def __init__(self):
        self.norm = 0.0

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        if state.global_step == AT and not self.norm:
            self.norm = norm_of(model)
            with torch.no_grad():
                for param in model.parameters():
                    param.mul_(1000.0)


def norm_of(model):
    return float(torch.stack([p.detach().norm() for p in model.parameters()]).norm())


KINDS = [
    ("Trainer", SelfHealingTrainer, {}),
    ("Trainer", SelfHealingCallback, {}),
    ("GRPO", SelfHealingTrainer, {"reward_funcs": distinct_words, "max_steps": 110}),
    pytest.param("SFT", SelfHealingTrainer, {}, marks=pytest.mark.slow),
    pytest.param("DPO", SelfHealingTrainer, {}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("name", "wrapper", "settings"), KINDS)
def test_damaged_weights_are_found_by_an_experiment_and_put_back(name, wrapper, settings, tmp_path):
    trainer = tiny.TRAINERS[name](tmp_path, **{"max_steps": 80, **settings})
    damage = Damages()
    trainer.add_callback(damage)
    healer = train(trainer, wrapper)
    plans = [[type(action).__name__ for action in plan] for _, _, plan in healer.history]
    assert ["Rollback"] in [plan[:1] for plan in plans]
    assert "damaged" in answers(tmp_path)
    assert damage.norm
    assert norm_of(trainer.model) < 2.0 * damage.norm


def two_tasks(name):
    """Data whose second half is another task: random words, and preferences turned round."""
    half = 4 * AT
    if name == "DPO":
        there = [" " + tiny.sentence(i + 9, 4) for i in range(2 * half)]
        back = [" " + tiny.sentence(i + 5, 4, stride=5) for i in range(2 * half)]
        return Dataset.from_dict(
            {
                "prompt": [tiny.sentence(i, 3) for i in range(2 * half)],
                "chosen": there[:half] + back[half:],
                "rejected": back[:half] + there[half:],
            }
        )
    if name == "GRPO":
        return Dataset.from_dict({"prompt": [tiny.sentence(i, 3) for i in range(2 * half)]})
    draws = torch.randint(4, 32, (half, tiny.LENGTH), generator=torch.Generator().manual_seed(0))
    rows = [[4 + (start + 3 * i) % 28 for i in range(tiny.LENGTH)] for start in range(half)]
    if name == "SFT":
        texts = [" ".join(f"w{token - 4}" for token in row) for row in rows + draws.tolist()]
        return Dataset.from_dict({"text": texts})
    return Dataset.from_dict({"input_ids": rows + draws.tolist(), "labels": rows + draws.tolist()})


def changing(name, folder):
    """A trainer that takes its data in order, so that the other task comes at one step."""
    settings = {"max_steps": 90, "data": two_tasks(name)}
    if name == "GRPO":
        now = SimpleNamespace(trainer=None)

        def turned_round(completions, **ignored):
            sign = -1.0 if now.trainer.state.global_step >= AT else 1.0
            return [sign * reward for reward in distinct_words(completions)]

        settings["reward_funcs"] = turned_round
        now.trainer = trainer = tiny.TRAINERS[name](folder, **settings)
        return trainer
    trainer = tiny.TRAINERS[name](folder, **settings)
    trainer._get_train_sampler = lambda *_: torch.utils.data.SequentialSampler(
        trainer.train_dataset
    )
    return trainer


@pytest.mark.parametrize(
    ("name", "wrapper"),
    [
        ("Trainer", SelfHealingTrainer),
        ("Trainer", SelfHealingCallback),
        ("GRPO", SelfHealingTrainer),
        pytest.param("SFT", SelfHealingTrainer, marks=pytest.mark.slow),
        pytest.param("DPO", SelfHealingTrainer, marks=pytest.mark.slow),
    ],
)
def test_a_change_that_was_meant_is_left_alone(name, wrapper, tmp_path):
    alone = bare(changing(name, tmp_path / "alone"))
    trainer = changing(name, tmp_path / "healed")
    healer = train(trainer, wrapper, {"zclip_enabled": False})
    assert all(plan == () for _, _, plan in healer.history)
    assert "damaged" not in answers(tmp_path / "healed")
    assert healer.experiment.forwards > 0
    assert_same(weights(alone), weights(trainer))
    assert log(trainer) == log(alone)
