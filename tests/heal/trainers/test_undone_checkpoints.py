"""A checkpoint of steps that were taken back must not be what a run goes on from."""

import math
from pathlib import Path
from types import SimpleNamespace

from transformers import TrainerState

from heal.integrations.transformers.position import TrainerPosition
from heal.integrations.transformers.undone_checkpoints import put_undone_aside
from heal.journal import read_events
from tests.heal.trainers import failures, tiny
from tests.heal.trainers.runs import Healed, is_finite

SAVING = {"save_strategy": "steps", "save_steps": 3, "max_steps": 20}


def fail_at(step):
    def then(now):
        if now == step:
            raise AttributeError("a bug")

    return then


def test_no_resume_begins_with_a_checkpoint_of_steps_that_were_taken_back(tmp_path):
    """It would have the damage in its weights, and know nothing of the attempt to heal it."""
    settings = {**SAVING, "max_steps": 30}
    damaged = {"check_interval": 10, "nan_patience": 3}
    crashed = tiny.plain(tmp_path, **settings)
    failures.corrupts_weights(crashed, at=8, then=fail_at(7))
    healed = Healed(crashed, **damaged)
    assert isinstance(healed.error, AttributeError)
    assert (tmp_path / "abandoned-checkpoint-9").is_dir()
    again = tiny.plain(tmp_path, **settings)
    resumed = Healed(again, resume=True, **damaged)
    assert resumed.wrapper._callback.resumed_from == str(tmp_path / "checkpoint-6")
    assert resumed.error is None
    assert resumed.told == []
    assert again.state.global_step == 30
    assert resumed.healer.metrics()["healing/recovery_attempts"] == 1
    events, _ = read_events(tmp_path / "events.jsonl")
    assert "checkpoint_abandoned" in {event["event"] for event in events}


def test_checkpoints_that_others_left_there_are_left_alone(tmp_path):
    (tmp_path / "checkpoint-900").mkdir()
    trainer = tiny.plain(tmp_path, **SAVING)
    failures.corrupts_weights(trainer, at=8)
    healed = Healed(trainer, check_interval=10, nan_patience=3)
    assert healed.error is None
    assert (tmp_path / "checkpoint-900").is_dir()
    assert [p.name for p in tmp_path.glob("abandoned-*")] != []


def test_checkpoints_put_aside_keep_their_names_apart(tmp_path):
    state = TrainerState(global_step=4, best_model_checkpoint=str(tmp_path / "checkpoint-9"))
    state.best_metric, state.best_global_step = 0.5, 9
    trainer = SimpleNamespace(
        args=SimpleNamespace(output_dir=str(tmp_path), should_save=True), state=state
    )
    for _ in range(3):
        for step in (3, 4, 6, 9):
            (tmp_path / f"checkpoint-{step}").mkdir(exist_ok=True)
        put_undone_aside(trainer, {3, 4, 9})
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "abandoned-checkpoint-9",
        "abandoned-checkpoint-9-2",
        "abandoned-checkpoint-9-3",
        "checkpoint-3",
        "checkpoint-4",
        "checkpoint-6",
    ]
    assert state.best_model_checkpoint is state.best_metric is state.best_global_step is None


def test_a_rank_that_does_not_save_renames_nothing(tmp_path):
    (tmp_path / "checkpoint-9").mkdir()
    args = SimpleNamespace(output_dir=str(tmp_path), should_save=False)
    assert put_undone_aside(SimpleNamespace(args=args, state=TrainerState()), {9}) == []
    assert (tmp_path / "checkpoint-9").is_dir()


def test_what_was_best_before_is_best_again(tmp_path):
    trainer = tiny.plain(tmp_path)
    position, state = TrainerPosition(trainer, replays=False), trainer.state
    state.best_metric, state.best_global_step, state.best_model_checkpoint = 0.5, 3, "checkpoint-3"
    saved = position.save()
    state.best_metric, state.best_global_step, state.best_model_checkpoint = 0.1, 6, "checkpoint-6"
    position.put_back(saved)
    best = state.best_metric, state.best_global_step, state.best_model_checkpoint
    assert best == (0.5, 3, "checkpoint-3")


def test_the_best_evaluation_is_taken_back_with_its_step(tmp_path):
    trainer = tiny.plain(
        tmp_path,
        eval_dataset=tiny.tokens(8),
        eval_strategy="steps",
        eval_steps=3,
        load_best_model_at_end=True,
        **SAVING,
    )
    failures.corrupts_weights(trainer, at=8)
    healed = Healed(trainer, check_interval=10, nan_patience=3)
    assert healed.error is None
    assert Path(trainer.state.best_model_checkpoint).is_dir()
    assert math.isfinite(trainer.state.best_metric)
    assert is_finite(trainer)
