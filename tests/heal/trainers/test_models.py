"""Adapters, frozen and shared weights, compiled models and low precision: all heal."""

import pytest
import torch
from transformers import TrainerCallback

from tests.heal.trainers import failures, tiny
from tests.heal.trainers.runs import Healed, assert_same, bare, fingerprint, is_finite, weights

HARM = {"rolls_back_after": 2}


def lora(model):
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))


def tied():
    return tiny.llama(tie_word_embeddings=True)


def half_frozen():
    model = tiny.llama()
    model.model.layers[0].requires_grad_(False)
    return model


MODELS = {
    "lora": lambda: lora(tiny.llama()),
    "tied": tied,
    "half-frozen": half_frozen,
}


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(make, id=name, marks=() if name == "lora" else pytest.mark.slow)
        for name, make in MODELS.items()
    ],
)
def test_models_of_every_kind_are_left_alone_and_rolled_back(make, tmp_path):
    alone = bare(tiny.plain(tmp_path / "alone", make()))
    assert_same(fingerprint(alone), fingerprint(Healed(tiny.plain(tmp_path / "a", make())).trainer))
    trainer = tiny.plain(tmp_path / "healed", make(), max_steps=16)
    frozen = [p.detach().clone() for p in trainer.model.parameters() if not p.requires_grad]
    failures.nan_loss(trainer, at=7, times=2)
    healed = Healed(trainer, **HARM)
    assert healed.healer.notes == []
    assert "Rollback" in healed.decisions[-1][1]
    assert is_finite(trainer)
    assert_same(frozen, [p for p in trainer.model.parameters() if not p.requires_grad])


@pytest.mark.slow
def test_snapshots_of_adapters_hold_the_adapters_only(tmp_path):
    healed = Healed(tiny.plain(tmp_path, lora(tiny.llama())))
    model = healed.trainer.model
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad) * 4
    buffers = sum(b.nbytes for b in model.buffers())
    (snapshot, *_) = healed.healer.training.ring._kept
    assert sum(t.nbytes for t in snapshot.tensors.values()) <= 3 * trained + buffers + 4096


def test_weights_that_are_unfrozen_on_the_way_are_healed_too(tmp_path):
    class Unfreeze(TrainerCallback):
        def on_step_begin(self, args, state, control, model=None, **kwargs):
            if state.global_step == 6:
                model.requires_grad_(True)

    trainer = tiny.plain(tmp_path, half_frozen(), max_steps=24, callbacks=[Unfreeze()])
    trainer.create_optimizer()
    frozen = [p for p in trainer.model.parameters() if not p.requires_grad]
    trainer.optimizer.add_param_group({"params": frozen})
    failures.nan_loss(trainer, at=15, times=2)
    healed = Healed(trainer, **HARM)
    assert healed.error is None
    assert "Rollback" in healed.decisions[-1][1]
    assert is_finite(trainer)
    assert all(p.requires_grad for p in frozen)
    assert healed.output.global_step == 24


def test_bfloat16_autocast_is_left_alone_and_healed(tmp_path):
    alone = bare(tiny.plain(tmp_path / "alone", bf16=True))
    same = Healed(tiny.plain(tmp_path / "same", bf16=True)).trainer
    assert_same(fingerprint(alone), fingerprint(same))
    trainer = tiny.plain(tmp_path / "healed", bf16=True, max_steps=12)
    failures.nan_loss(trainer, at=4)
    assert Healed(trainer).output.metrics["healing/nan_count"] == 1
    assert is_finite(trainer)


@pytest.mark.slow
def test_a_compiled_model_is_healed(tmp_path):
    trainer = tiny.plain(tmp_path, max_steps=12, torch_compile=True, torch_compile_backend="eager")
    failures.nan_loss(trainer, at=7, times=2)
    healed = Healed(trainer, **HARM)
    assert healed.error is None
    assert healed.output.metrics["healing/nan_count"] == 2
    assert is_finite(trainer)


def test_an_optimizer_that_is_not_fused_refuses_too(tmp_path):
    trainer = tiny.plain(tmp_path, optim="adamw_torch", max_steps=12)
    failures.nan_loss(trainer, at=4)
    healed = Healed(trainer)
    assert healed.output.metrics["healing/nan_count"] == 1
    assert is_finite(trainer)


def test_gradient_checkpointing_is_switched_on_where_the_model_has_it(tmp_path):
    """Memory for no backward at all until activations are recomputed."""
    trainer = tiny.plain(tmp_path, max_steps=6)

    def harm(call, inputs, loss):
        if call >= 2 and not trainer.model.is_gradient_checkpointing:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return loss()

    failures.Injection(trainer, harm)
    before = weights(trainer)
    healed = Healed(trainer)
    assert healed.error is None
    assert healed.decisions[-1][1] == ["ClearCache", "CheckpointActivations"]
    assert healed.output.global_step == 6
    assert not torch.equal(before[0], weights(trainer)[0])
