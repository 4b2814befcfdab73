"""A checkpoint of steps that were taken back must not be what a run goes on from."""

import math
import os
from pathlib import Path
from types import SimpleNamespace

from transformers import TrainerState

from heal.integrations.transformers.position import (
    TrainerPosition,
    UndoneCheckpoints,
    checkpoint_folder,
)
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
    damaged = {"check_interval": 10, "nan_patience": 3, "snapshot_interval": 5}
    crashed = tiny.plain(tmp_path, **settings)
    failures.corrupts_weights(crashed, at=8, then=fail_at(7))
    healed = Healed(crashed, **damaged)
    assert isinstance(healed.error, AttributeError)
    assert (tmp_path / "abandoned-checkpoint-9").is_dir()
    again = tiny.plain(tmp_path, **settings)
    resumed = Healed(again, resume=True, **damaged)
    assert resumed.wrapper.resumed_from == str(tmp_path / "checkpoint-6")
    assert resumed.error is None
    assert resumed.decisions == []
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


def trainer_in(folder, limit=None, should_save=True):
    args = SimpleNamespace(output_dir=str(folder), should_save=should_save, save_total_limit=limit)
    return SimpleNamespace(args=args, state=TrainerState())


def rolled_back(trainer, steps, to, bad_step=0, checkpoints=None):
    """Have a trainer save checkpoints of some steps, in order, and return to a step."""
    notes = []
    checkpoints = checkpoints or UndoneCheckpoints(trainer, notes.append)
    for trainer.state.global_step in steps:
        checkpoint_folder(trainer, trainer.state.global_step).mkdir(exist_ok=True)
        checkpoints.after_save()
    trainer.state.global_step = to
    return checkpoints, checkpoints.put_aside(bad_step), notes


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_checkpoints_put_aside_keep_their_names_apart(tmp_path):
    trainer = trainer_in(tmp_path)
    state = trainer.state
    state.best_model_checkpoint = str(tmp_path / "checkpoint-9")
    state.best_metric, state.best_global_step = 0.5, 9
    (tmp_path / "checkpoint-6").mkdir()  # of another run
    checkpoints, _, _ = rolled_back(trainer, (3, 4, 9), to=4)
    for _ in range(2):
        rolled_back(trainer, [9], to=4, checkpoints=checkpoints)
    assert names(tmp_path) == [
        "abandoned-checkpoint-9",
        "abandoned-checkpoint-9-2",
        "abandoned-checkpoint-9-3",
        "checkpoint-3",
        "checkpoint-4",
        "checkpoint-6",
    ]
    assert state.best_model_checkpoint is state.best_metric is state.best_global_step is None


def test_a_rank_that_does_not_save_renames_nothing(tmp_path):
    _, renamed, _ = rolled_back(trainer_in(tmp_path, should_save=False), [9], to=4)
    assert renamed == []
    assert names(tmp_path) == ["checkpoint-9"]


def test_the_last_sound_checkpoint_stays_until_there_is_another(tmp_path):
    """With ``save_total_limit=1`` there is no older one, and a kill would lose the run."""
    trainer = trainer_in(tmp_path)
    checkpoints, _, _ = rolled_back(trainer, [18, 20, 22], to=16, bad_step=21)
    assert names(tmp_path) == [
        "abandoned-checkpoint-18",
        "abandoned-checkpoint-22",
        "checkpoint-20",
    ]
    trainer.state.global_step = 18  # saved, and removed at once: the trainer keeps the newest
    checkpoints.after_save()
    assert "checkpoint-20" in names(tmp_path)
    rolled_back(trainer, [18], to=18, bad_step=21, checkpoints=checkpoints)
    assert "checkpoint-20" not in names(tmp_path)
    assert "checkpoint-18" in names(tmp_path)


def test_a_checkpoint_that_may_hold_the_damage_does_not_stay(tmp_path):
    rolled_back(trainer_in(tmp_path), [20], to=16, bad_step=19)
    assert names(tmp_path) == ["abandoned-checkpoint-20"]


def test_a_run_killed_right_after_a_rollback_can_be_resumed(tmp_path):
    settings = {**SAVING, "save_steps": 6, "max_steps": 16, "save_total_limit": 1}
    crashed = tiny.plain(tmp_path, **settings)
    failures.corrupts_weights(crashed, at=7, then=fail_at(4))
    healed = Healed(crashed, check_interval=1, quarantine_steps=4)
    assert isinstance(healed.error, AttributeError)
    assert healed.healer.last_step < 6  # before the checkpoint, which was made before the damage
    again = tiny.plain(tmp_path, **settings)
    resumed = Healed(again, resume=True, check_interval=1, quarantine_steps=4)
    assert resumed.wrapper.resumed_from == str(tmp_path / "checkpoint-6")
    assert resumed.error is None
    assert again.state.global_step == 16
    assert is_finite(again)


def test_one_that_cannot_be_renamed_does_not_keep_the_others(tmp_path, monkeypatch):
    rename = os.rename

    def refuse(source, target):
        if str(source).endswith("checkpoint-6"):
            raise PermissionError("not yours")
        rename(source, target)

    monkeypatch.setattr(os, "rename", refuse)
    _, renamed, notes = rolled_back(trainer_in(tmp_path), [3, 6, 9], to=4)
    assert [path.name for path in renamed] == ["abandoned-checkpoint-9"]
    assert len(notes) == 1
    assert "checkpoint-6 was undone, and cannot be renamed: not yours" in notes[0]


def test_as_many_of_those_put_aside_stay_as_the_trainer_keeps(tmp_path):
    trainer = trainer_in(tmp_path, limit=2)
    checkpoints, _, _ = rolled_back(trainer, [4], to=4)
    for day, step in enumerate((8, 12, 100, 8)):
        rolled_back(trainer, [step], to=4, checkpoints=checkpoints)
        newest = max(tmp_path.glob("abandoned-*"), key=lambda path: path.stat().st_mtime)
        os.utime(newest, (day, day))
    rolled_back(trainer, [5], to=5, checkpoints=checkpoints)
    assert names(tmp_path) == [
        "abandoned-checkpoint-100",
        "abandoned-checkpoint-8",
        "checkpoint-4",
        "checkpoint-5",
    ]


def test_a_trainer_that_keeps_all_keeps_those_put_aside(tmp_path):
    trainer = trainer_in(tmp_path)
    checkpoints, _, _ = rolled_back(trainer, [4], to=4)
    for _ in range(3):
        rolled_back(trainer, [8], to=4, checkpoints=checkpoints)
    assert len(list(tmp_path.glob("abandoned-*"))) == 3


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
