"""Failures in a plain trainer, one by one: what is done about them, and what comes out."""

import json

import pytest
import torch
from transformers import TrainerCallback

from heal import SelfHealingCallback
from heal.actions import HealingError
from heal.exit_codes import ExitCode
from tests.heal.trainers import failures, tiny
from tests.heal.trainers.runs import (
    Healed,
    assert_same,
    bare,
    fingerprint,
    is_finite,
    log,
    losses,
    quick,
    weights,
)


def final_loss(trainer):
    return losses(trainer)[-1]


def test_a_nan_loss_is_refused_and_costs_one_step(tmp_path):
    trainer = tiny.plain(tmp_path, max_steps=10)
    failures.nan_loss(trainer, at=4)
    healed = Healed(trainer)
    assert is_finite(trainer)
    assert healed.decisions == [("nonfinite_loss", ["Skip"])]
    assert healed.output.metrics["healing/nan_count"] == 1
    assert healed.output.global_step == 10


def test_without_healing_the_same_nan_ruins_the_model(tmp_path):
    trainer = tiny.plain(tmp_path, max_steps=10)
    failures.nan_loss(trainer, at=4)
    assert not is_finite(bare(trainer))


def test_a_nan_in_one_of_several_micro_batches_refuses_the_step(tmp_path):
    trainer = tiny.plain(tmp_path, max_steps=8, gradient_accumulation_steps=3)
    failures.nan_loss(trainer, at=10)
    healed = Healed(trainer)
    assert is_finite(trainer)
    assert healed.output.metrics["healing/nan_count"] == 1


def test_nans_in_a_row_roll_back_and_the_steps_are_made_up_for(tmp_path):
    trainer = tiny.plain(tmp_path, max_steps=20)
    failures.nan_loss(trainer, at=9, times=2)
    healed = Healed(trainer, rolls_back_after=2)
    assert healed.decisions[-1] == ("nonfinite_loss", ["Rollback", "SkipBatches", "ScaleLr"])
    assert is_finite(trainer)
    assert healed.output.global_step == trainer.state.max_steps == 20
    assert [line["step"] for line in log(trainer)] == [*range(1, 21), 20]


def test_a_rollback_with_replay_gives_the_run_that_never_failed(tmp_path):
    def corrupt(trainer):
        def on_call(call, inputs, loss):
            if call == 9:
                with torch.no_grad():
                    next(iter(trainer.model.parameters())).fill_(float("nan"))
            return loss()

        failures.Injection(trainer, on_call)

    alone = bare(tiny.plain(tmp_path / "alone", max_steps=20))
    trainer = tiny.plain(tmp_path / "healed", max_steps=20)
    corrupt(trainer)
    healed = Healed(trainer, check_interval=1, after_rollback="replay_data")
    assert healed.decisions[-1] == ("weight_corruption", ["Rollback"])
    assert_same(fingerprint(alone), fingerprint(trainer))
    assert log(trainer) == log(alone)


def test_out_of_memory_cuts_batches_and_keeps_the_gradient(tmp_path):
    settings = {"max_steps": 6, "gradient_accumulation_steps": 2}
    model = {"attention_dropout": 0.0}
    alone = bare(tiny.plain(tmp_path / "alone", tiny.llama(**model), **settings))
    trainer = tiny.plain(tmp_path / "healed", tiny.llama(**model), **settings)
    failures.oom_above(trainer, rows=1, at=5)
    healed = Healed(trainer)
    assert healed.decisions == [("oom", ["ClearCache", "ShrinkBatch"])] * 2
    assert healed.healer.micro.pieces == 4
    assert trainer.state.global_step == 6
    for ours, theirs in zip(weights(trainer), weights(alone), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_out_of_memory_at_the_smallest_piece_recomputes_activations_then_halts(tmp_path):
    trainer = tiny.plain(tmp_path, max_steps=6)
    failures.oom_above(trainer, rows=0, at=2)
    healed = Healed(trainer)
    assert healed.decisions[-2][1] == ["ClearCache", "CheckpointActivations"]
    assert trainer.model.is_gradient_checkpointing
    assert healed.error.exit_code == ExitCode.OUT_OF_MEMORY


def test_network_errors_are_waited_for_and_the_same_batch_comes_again(tmp_path):
    alone = bare(tiny.plain(tmp_path / "alone"))
    trainer = tiny.plain(tmp_path / "healed")
    failures.raises(trainer, lambda: ConnectionError("reset by peer"), times=3)
    healed = Healed(trainer)
    assert healed.waits == [30.0, 60.0, 120.0]
    assert_same(fingerprint(alone), fingerprint(trainer))


def test_a_collectives_timeout_is_never_waited_for(tmp_path):
    trainer = tiny.plain(tmp_path)
    failures.raises(trainer, lambda: RuntimeError("NCCL: Watchdog caught collective timeout"))
    healed = Healed(trainer)
    assert healed.waits == []
    assert healed.error.exit_code == ExitCode.DISTRIBUTED
    assert "Watchdog" in str(healed.error.__cause__)


def test_a_bad_batch_makes_way_for_the_next_and_the_step_count_stays(tmp_path):
    trainer = tiny.plain(tmp_path, gradient_accumulation_steps=2)
    failures.raises(trainer, lambda: ValueError("shape mismatch"), at=5)
    healed = Healed(trainer)
    assert healed.decisions == [("data_error", ["SkipBatches"])]
    assert healed.output.global_step == 8
    assert max(losses(trainer)) < 3.6  # no step counts its items twice


def test_a_model_that_always_raises_is_not_hidden_by_skipping(tmp_path):
    trainer = tiny.plain(tmp_path)
    failures.raises(trainer, lambda: ValueError("shape mismatch"), times=1000)
    healed = Healed(trainer)
    assert healed.error.exit_code == ExitCode.BAD_DATA
    assert isinstance(healed.error.__cause__, ValueError)


def test_a_bug_ends_the_run_with_its_own_exception_and_a_postmortem(tmp_path):
    trainer = tiny.plain(tmp_path)
    failures.raises(trainer, lambda: AttributeError("no such thing"))
    healed = Healed(trainer)
    assert isinstance(healed.error, AttributeError)
    page = json.loads((tmp_path / "postmortem.json").read_text())
    assert page["exit_reason"] == "exception"
    assert page["exception_type"] == "AttributeError"
    assert page["last_step"] == 3
    assert page["recovery_actions"][0]["actions"] == ["halt"]


def test_memory_that_runs_out_within_the_optimizer_rolls_back(tmp_path):
    trainer = tiny.plain(tmp_path, max_steps=12)
    trainer.create_optimizer()
    sound, calls = trainer.optimizer.step, []

    def step(closure=None):
        calls.append(None)
        if len(calls) == 9:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return sound(closure)

    trainer.optimizer.step = step
    healed = Healed(trainer)
    assert healed.error is None
    assert "Rollback" in healed.decisions[0][1]
    assert healed.output.global_step == 12
    assert trainer.lr_scheduler.last_epoch == 12


def test_nan_that_never_ends_ends_the_run_with_sound_weights(tmp_path):
    trainer = tiny.plain(tmp_path, max_steps=60)
    failures.nan_loss(trainer, at=9, times=10**6)
    healed = Healed(trainer, nan_patience=1, max_consecutive_skips=20)
    assert isinstance(healed.error, HealingError)
    assert healed.error.exit_code == ExitCode.NONFINITE
    assert is_finite(trainer)


def test_the_callback_alone_refuses_nan_and_lets_exceptions_pass(tmp_path):
    trainer = tiny.plain(tmp_path, max_steps=10)
    failures.nan_loss(trainer, at=3)
    callback = SelfHealingCallback(trainer, quick())
    trainer.add_callback(callback)
    bare(trainer)
    assert is_finite(trainer)
    assert callback.healer.metrics()["healing/nan_count"] == 1
    failures.raises(trainer, lambda: ConnectionError("reset by peer"))
    with pytest.raises(ConnectionError):
        bare(trainer)


@pytest.mark.parametrize("name", ["GRPO", "RLOO"])
def test_nan_weights_that_surface_where_a_model_samples_are_rolled_back(name, tmp_path):
    trainer = tiny.TRAINERS[name](tmp_path, max_steps=12)

    class Corrupts(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 8 and not done:
                done.append(True)
                with torch.no_grad():
                    next(iter(trainer.model.parameters())).fill_(float("nan"))

    done = []
    trainer.add_callback(Corrupts())
    healed = Healed(trainer)
    assert healed.error is None
    assert healed.decisions[0][0] == "weight_corruption"
    assert "Rollback" in healed.decisions[0][1]
    assert is_finite(trainer)
    assert healed.output.global_step == 12
