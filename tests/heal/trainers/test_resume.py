"""A healed run that crashed goes on from its checkpoint as if nothing had happened."""

import os
import signal
import sys

import pytest
import torch
from transformers import TrainerCallback

from heal import HealingConfig
from heal.actions import HealingError
from heal.detectors.watch import LogWatch
from heal.exit_codes import ExitCode
from heal.report.collect import read_run
from tests.heal.trainers import failures, tiny
from tests.heal.trainers.runs import (
    Healed,
    assert_same,
    bare,
    fingerprint,
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
    assert read_run(tmp_path / "crashed").runs == 1


def test_a_rollback_after_a_resume_finds_its_data_again(tmp_path):
    settings = {**SAVING, "max_steps": 28, "save_steps": 6}
    whole = Healed(tiny.plain(tmp_path / "run", **settings)).trainer
    again = tiny.plain(tmp_path / "run", **settings)
    failures.corrupts_weights(again, at=8)
    checkpoint = str(tmp_path / "run" / "checkpoint-6")
    resumed = Healed(again, resume=checkpoint, check_interval=1, after_rollback="replay_data")
    assert resumed.decisions[-1] == ("weight_corruption", ["Rollback"])
    assert_same(fingerprint(whole)[:-2], fingerprint(again)[:-2])
    assert [line["step"] for line in log(again)] == [*range(1, 29), 28]


@pytest.mark.slow
def test_a_checkpoint_made_without_healing_can_be_resumed_with_it(tmp_path):
    tiny.plain(tmp_path, **SAVING).train()
    resumed = Healed(tiny.plain(tmp_path, **SAVING), resume=str(tmp_path / "checkpoint-4"))
    assert resumed.output.global_step == 10
    assert resumed.healer.notes == []


def test_healing_state_that_cannot_be_read_is_noted_and_training_goes_on(tmp_path):
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


def test_healing_state_of_another_version_is_noted_and_training_goes_on(tmp_path):
    Healed(tiny.plain(tmp_path, **SAVING))
    path = tmp_path / "checkpoint-4" / "healing.pt"
    torch.save({"version": 1, "clip": torch.load(path)["clip"]}, path)
    resumed = Healed(tiny.plain(tmp_path, **SAVING), resume=str(tmp_path / "checkpoint-4"))
    assert resumed.output.global_step == 10
    assert "expected version 2, got 1" in resumed.healer.notes[0]


def test_a_checkpoint_knows_of_every_step_that_could_be_polled(tmp_path):
    """Calm records wait to be polled together: a save must not lose those that wait."""
    Healed(tiny.plain(tmp_path, **SAVING))
    saved = torch.load(tmp_path / "checkpoint-8" / "healing.pt")
    assert saved["step"] == 8
    assert len(saved["healing"]["gradient_explosion"]["norms"]) == 8 - HealingConfig().lag


def test_what_was_tried_survives_the_resume(tmp_path):
    """Else a run that is resumed again and again would heal for ever."""
    trainer = tiny.plain(tmp_path, **SAVING)
    failures.nan_loss(trainer, at=3, times=2)
    healed = Healed(trainer, rolls_back_after=2)
    again = Healed(
        tiny.plain(tmp_path, **SAVING), resume=str(tmp_path / "checkpoint-8"), rolls_back_after=2
    )
    for name in ("healing/recovery_attempts", "healing/nan_count"):
        assert again.healer.metrics()[name] == healed.healer.metrics()[name] >= 1


def test_what_the_log_showed_survives_the_resume(tmp_path):

    class TellsKl(TrainerCallback):
        def on_log(self, args, state, control, logs=None, **kwargs):
            logs["kl"] = 0.01 * state.global_step

    Healed(tiny.plain(tmp_path, callbacks=[TellsKl()], **SAVING))
    saved = torch.load(tmp_path / "checkpoint-8" / "healing.pt")["log"]
    assert saved != LogWatch(HealingConfig()).state()
    rest = {**SAVING, "max_steps": 9, "logging_steps": 5}  # a single line, that has no KL
    again = Healed(tiny.plain(tmp_path, **rest), resume=str(tmp_path / "checkpoint-8"))
    assert again.wrapper.log_watch.state() == saved


def test_a_lowered_learning_rate_survives_the_resume(tmp_path):
    trainer = tiny.plain(tmp_path, **{**SAVING, "max_steps": 16})
    failures.nan_loss(trainer, at=5, times=2)
    healed = Healed(trainer, rolls_back_after=2, lr_ramp_steps=1000)
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
    assert isinstance(healed.error, HealingError)
    assert healed.error.exit_code == ExitCode.PREEMPTED
    assert signal.getsignal(signal.SIGTERM) is before
    with pytest.raises(SystemExit) as ended:  # as Python does with what is not caught
        sys.excepthook(HealingError, healed.error, None)
    assert ended.value.code == ExitCode.PREEMPTED
    stopped_at = trainer.state.global_step
    assert 5 < stopped_at < 50
    assert (tmp_path / f"checkpoint-{stopped_at}" / "healing.pt").is_file()
