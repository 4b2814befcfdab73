"""float16 with a GradScaler: the scaler steps, and what we refuse it refuses."""

import pytest
import torch

from tests.heal.trainers import failures, tiny
from tests.heal.trainers.runs import Healed, assert_same, bare, is_finite, weights


def scaled(folder, monkeypatch, **changes):
    """A trainer whose accelerator scales losses as on a GPU; autocast is left out."""
    trainer = tiny.plain(folder, **changes)
    accelerator = trainer.accelerator
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    accelerator.native_amp = True
    monkeypatch.setattr(type(accelerator), "mixed_precision", "fp16")
    return trainer


@pytest.fixture(autouse=True)
def no_autocast(monkeypatch):
    from accelerate import Accelerator

    monkeypatch.setattr(Accelerator, "prepare_model", lambda self, model, **_: model)


def test_an_undisturbed_run_is_bit_by_bit_the_bare_trainers(tmp_path, monkeypatch):
    alone = bare(scaled(tmp_path / "alone", monkeypatch))
    healed = Healed(scaled(tmp_path / "healed", monkeypatch))
    assert healed.error is None
    assert healed.healer.notes == []
    assert_same(weights(alone), weights(healed.trainer))
    assert healed.healer.latest.norm < 10  # of gradients as they are, not a thousand times that


def test_a_nan_loss_is_refused_and_the_scale_backs_off(tmp_path, monkeypatch):
    trainer = scaled(tmp_path, monkeypatch, max_steps=10)
    failures.nan_loss(trainer, at=4)
    healed = Healed(trainer)
    assert healed.error is None
    assert is_finite(trainer)
    assert trainer.accelerator.scaler.get_scale() == 512.0
