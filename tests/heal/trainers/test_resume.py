"""A healed run that crashed goes on from its checkpoint as if nothing had happened."""

import math
import os
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import TrainerCallback, TrainerState

from heal import HealingConfig
from heal.actions import CannotHeal
from heal.exit_codes import ExitCode
from heal.integrations.transformers.position import TrainerPosition
from heal.integrations.transformers.undone_checkpoints import put_aside
from heal.journal import read_events
from heal.log_watch import LogWatch
from tests.heal.trainers import failures, tiny
from tests.heal.trainers.runs import (
    Healed,
    assert_same,
    bare,
    fingerprint,
    is_finite,
    log,
    losses,
)

SAVING = {"save_strategy": "steps", "save_steps": 4, "max_steps": 10}


@pytest.mark.parametrize("zclip_enabled", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_resumed_run_is_bit_by_bit_the_one_that_was_not_interrupted(zclip_enabled, tmp_path):
    whole = Healed(tiny.plain(tmp_path / "whole", **SAVING), zclip_enabled=zclip_enabled)
    crashed = tiny.plain(tmp_path / "crashed", **SAVING)
    failures.raises(crashed, lambda: AttributeError("a bug"), at=6)
    assert isinstance(Healed(crashed, zclip_enabled=zclip_enabled).error, AttributeError)
    again = tiny.plain(tmp_path / "crashed", **SAVING)
    resumed = Healed(again, zclip_enabled=zclip_enabled, resume=True)
    assert resumed.error is None
    assert resumed.healer.notes == []
    assert_same(fingerprint(whole.trainer), fingerprint(again))
    assert losses(again)[4:] == losses(whole.trainer)[4:]


def test_a_rollback_after_a_resume_finds_its_data_again(tmp_path):
    def corrupt(trainer, at):
        def on_call(call, inputs, loss):
            if call == at:
                with torch.no_grad():
                    next(iter(trainer.model.parameters())).fill_(float("nan"))
            return loss()

        failures.Injection(trainer, on_call)

    settings = {**SAVING, "max_steps": 28, "save_steps": 6}
    whole = Healed(tiny.plain(tmp_path / "run", **settings)).trainer
    again = tiny.plain(tmp_path / "run", **settings)
    corrupt(again, at=8)
    checkpoint = str(tmp_path / "run" / "checkpoint-6")
    resumed = Healed(again, resume=checkpoint, check_interval=1, data="replay")
    assert resumed.told[-1] == ("weight_corruption", ["Rollback"])
    assert_same(fingerprint(whole)[:-2], fingerprint(again)[:-2])
    assert [line["step"] for line in log(again)] == [*range(1, 29), 28]


@pytest.mark.slow
def test_a_checkpoint_made_without_healing_can_be_resumed_with_it(tmp_path):
    tiny.plain(tmp_path, **SAVING).train()
    resumed = Healed(tiny.plain(tmp_path, **SAVING), resume=str(tmp_path / "checkpoint-4"))
    assert resumed.output.global_step == 10
    assert resumed.healer.notes == []


def test_healing_state_that_cannot_be_read_is_told_and_training_goes_on(tmp_path):
    Healed(tiny.plain(tmp_path, **SAVING))
    (tmp_path / "checkpoint-4" / "healing.pt").write_bytes(b"torn")
    resumed = Healed(tiny.plain(tmp_path, **SAVING), resume=str(tmp_path / "checkpoint-4"))
    assert resumed.output.global_step == 10
    assert "cannot be read" in resumed.healer.notes[0]


@pytest.mark.parametrize("steps", [12, 16])
def test_a_finished_run_that_is_resumed_takes_as_many_steps_as_the_bare_one(steps, tmp_path):
    settings = {**SAVING, "max_steps": steps}
    bare(tiny.plain(tmp_path, **settings))
    last = str(tmp_path / f"checkpoint-{steps}")
    expected = bare(tiny.plain(tmp_path, **settings), resume=last)
    resumed = Healed(tiny.plain(tmp_path, **settings), resume=last)
    assert resumed.trainer.state.global_step == expected.state.global_step


def corrupt_at(trainer, call, then=lambda step: None):
    """Have the weights become NaN at a call; after it, do something at every step."""

    def on_call(number, inputs, loss):
        if number == call:
            with torch.no_grad():
                next(iter(trainer.model.parameters())).fill_(float("nan"))
        if number > call + 1:
            then(trainer.state.global_step)
        return loss()

    failures.Injection(trainer, on_call)


def fail_at(step):
    def then(now):
        if now == step:
            raise AttributeError("a bug")

    return then


def test_no_resume_begins_with_a_checkpoint_of_steps_that_were_taken_back(tmp_path):
    """It would have the damage in its weights, and know nothing of the attempt to heal it."""
    settings = {**SAVING, "save_steps": 3, "max_steps": 30}
    damaged = {"check_interval": 10, "nan_patience": 3}
    crashed = tiny.plain(tmp_path, **settings)
    corrupt_at(crashed, 8, then=fail_at(7))
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
    trainer = tiny.plain(tmp_path, **{**SAVING, "save_steps": 3, "max_steps": 14})
    corrupt_at(trainer, 8)
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
        put_aside(trainer, {3, 4, 9})
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
    assert put_aside(SimpleNamespace(args=args, state=TrainerState()), {9}) == []
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
        **{**SAVING, "save_steps": 3, "max_steps": 20},
    )
    corrupt_at(trainer, 8)
    healed = Healed(trainer, check_interval=10, nan_patience=3)
    assert healed.error is None
    assert Path(trainer.state.best_model_checkpoint).is_dir()
    assert math.isfinite(trainer.state.best_metric)
    assert is_finite(trainer)


def test_healing_state_of_another_version_is_told_and_training_goes_on(tmp_path):
    Healed(tiny.plain(tmp_path, **SAVING))
    path = tmp_path / "checkpoint-4" / "healing.pt"
    torch.save({**torch.load(path), "version": 1}, path)
    resumed = Healed(tiny.plain(tmp_path, **SAVING), resume=str(tmp_path / "checkpoint-4"))
    assert resumed.output.global_step == 10
    assert "version 1; wanted 2" in resumed.healer.notes[0]


def test_a_checkpoint_knows_of_every_step_that_could_be_heard_of(tmp_path):
    """Calm records wait to be heard together: a save must not lose those that wait."""
    Healed(tiny.plain(tmp_path, **SAVING))
    saved = torch.load(tmp_path / "checkpoint-8" / "healing.pt")
    assert saved["step"] == 8
    assert len(saved["healing"]["gradient_explosion"]["norms"]) == 8 - HealingConfig().lag


def test_what_was_tried_survives_the_resume(tmp_path):
    """Else a run that is resumed again and again would heal for ever."""
    trainer = tiny.plain(tmp_path, **SAVING)
    failures.nan_loss(trainer, at=3, times=2)
    healed = Healed(trainer, nan_patience=2)
    again = Healed(
        tiny.plain(tmp_path, **SAVING), resume=str(tmp_path / "checkpoint-8"), nan_patience=2
    )
    for name in ("healing/recovery_attempts", "healing/nan_count"):
        assert again.healer.metrics()[name] == healed.healer.metrics()[name] >= 1


def test_what_the_log_told_survives_the_resume(tmp_path):

    class TellsKl(TrainerCallback):
        def on_log(self, args, state, control, logs=None, **kwargs):
            logs["kl"] = 0.01 * state.global_step

    Healed(tiny.plain(tmp_path, callbacks=[TellsKl()], **SAVING))
    told = torch.load(tmp_path / "checkpoint-8" / "healing.pt")["log"]
    assert told != LogWatch(HealingConfig()).state()
    rest = {**SAVING, "max_steps": 9, "logging_steps": 5}  # a single line, that has no KL
    again = Healed(tiny.plain(tmp_path, **rest), resume=str(tmp_path / "checkpoint-8"))
    assert again.wrapper._callback.session.log_watch.state() == told


def test_a_lowered_learning_rate_survives_the_resume(tmp_path):
    trainer = tiny.plain(tmp_path, **{**SAVING, "max_steps": 16})
    failures.nan_loss(trainer, at=5, times=2)
    healed = Healed(trainer, nan_patience=2, lr_ramp_steps=1000)
    assert healed.healer.lr_scale == pytest.approx(0.5, abs=0.02)
    again = Healed(
        tiny.plain(tmp_path, **{**SAVING, "max_steps": 16}),
        resume=str(tmp_path / "checkpoint-12"),
        lr_ramp_steps=1000,
    )
    assert again.healer.lr_scale == healed.healer.lr_scale


def test_sigterm_saves_a_checkpoint_and_says_so(tmp_path):
    trainer = tiny.plain(tmp_path, max_steps=50)

    def harm(call, inputs, loss):
        if call == 5:
            os.kill(os.getpid(), signal.SIGTERM)
        return loss()

    failures.Injection(trainer, harm)
    before = signal.getsignal(signal.SIGTERM)
    healed = Healed(trainer)
    assert isinstance(healed.error, CannotHeal)
    assert healed.error.exit_code == ExitCode.PREEMPTED
    assert signal.getsignal(signal.SIGTERM) is before
    stopped_at = trainer.state.global_step
    assert 5 < stopped_at < 50
    assert (tmp_path / f"checkpoint-{stopped_at}" / "healing.pt").is_file()
