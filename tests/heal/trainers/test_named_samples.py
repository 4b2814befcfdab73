"""A batch that fails in a trainer is named by its own number and samples."""

import pytest

from tests.heal.trainers import failures, tiny
from tests.heal.trainers.runs import Healed

BAD = 17


@pytest.mark.parametrize("is_seeded", [True, False])
@pytest.mark.parametrize("per_step", [1, 3])
def test_the_batch_that_failed_is_named(tmp_path, is_seeded, per_step):
    trainer = tiny.plain(
        tmp_path,
        data=tiny.tokens(28),  # each sample once
        max_steps=-1,
        num_train_epochs=2,
        gradient_accumulation_steps=per_step,
        accelerator_config={"use_seedable_sampler": is_seeded},
    )
    words = list(trainer.train_dataset[BAD]["input_ids"])

    def harm(call, inputs, loss):
        if words in inputs["input_ids"].tolist():
            raise ValueError("shape mismatch")
        return loss()

    failures.Injection(trainer, harm)
    healed = Healed(trainer)
    assert healed.error is None
    named = [entry["evidence"] for entry in healed.healer.recoveries]
    assert [evidence["epoch"] for evidence in named][:2] == [0, 1]
    assert all(BAD in evidence["samples"] for evidence in named)
