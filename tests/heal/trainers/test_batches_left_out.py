"""Batches that did harm do not come again, also after a trainer was resumed."""

from types import SimpleNamespace

import pytest
from torch.utils.data import DataLoader
from transformers import TrainerCallback

from heal.data.stream import BatchStream
from heal.integrations.transformers.batches import TrainerBatches, batches_of_steps
from tests.heal.trainers import failures, tiny
from tests.heal.trainers.runs import Healed

SAVING = {"save_strategy": "steps", "save_steps": 3, "max_steps": 24}


class Fed:
    """Notes which batches a trainer is fed at which step; those in ``bad`` have a NaN loss."""

    def __init__(self, trainer, bad=(), fail_at=None):
        self.trainer, self.bad, self.seen, self.fail_at = trainer, bad, [], fail_at
        failures.Injection(trainer, self)

    def __call__(self, call, inputs, loss):
        first = tuple(inputs["input_ids"][:, 0].tolist())
        self.seen.append(first)
        if self.trainer.state.global_step == self.fail_at and len(self.fed) == 2:
            raise AttributeError("a bug")
        return loss() * float("nan") if first in self.bad else loss()

    @property
    def fed(self):
        """The bad ones that came."""
        return [first for first in self.seen if first in self.bad]


def resumed_after_harm(folder, samples, data, accumulate):
    """Have two batches do harm, roll back, crash, and resume; return what came of it."""
    settings = {**SAVING, "data": tiny.tokens(samples), "gradient_accumulation_steps": accumulate}
    config = {
        "rolls_back_after": 2,
        "after_rollback": data,
        "snapshot_interval": 5,
    }  # saves 6 once more
    undisturbed = Fed(tiny.plain(folder / "undisturbed", **settings))
    Healed(undisturbed.trainer)
    bad = {undisturbed.seen[8 * accumulate], undisturbed.seen[9 * accumulate]}
    crashed = Fed(tiny.plain(folder / "run", **settings), bad, fail_at=7)
    assert isinstance(Healed(crashed.trainer, **config).error, AttributeError)
    assert len(crashed.fed) == 2
    again = Fed(tiny.plain(folder / "run", **settings), bad)
    resumed = Healed(again.trainer, resume=True, **config)
    assert resumed.wrapper.resumed_from == str(folder / "run" / "checkpoint-6")
    assert resumed.error is None
    assert again.trainer.state.global_step == 24
    return again, resumed.healer


@pytest.mark.parametrize("data", ["replay_data", "skip_data"])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_batches_that_did_harm_do_not_come_again_after_a_resume(data, accumulate, tmp_path):
    again, healer = resumed_after_harm(tmp_path, 512, data, accumulate)
    assert again.fed == []
    assert healer.metrics()["healing/recovery_attempts"] == 1
    assert healer.notes == []


def trainer_at(step, length=16, accumulate=3, ignores=False):
    return SimpleNamespace(
        state=SimpleNamespace(global_step=step),
        args=SimpleNamespace(gradient_accumulation_steps=accumulate, ignore_data_skip=ignores),
        callback_handler=SimpleNamespace(train_dataloader=[0] * length),
    )


def batches_at(step, **options):
    healer = SimpleNamespace(stream=BatchStream(lambda *_: None))
    return TrainerBatches(trainer_at(step, **options), healer), healer.stream


@pytest.mark.parametrize(
    ("steps", "batches", "of_last_epoch"),
    [(0, 0, 0), (1, 3, 3), (5, 15, 15), (6, 16, 0), (7, 19, 3), (12, 32, 0), (13, 35, 3)],
)
def test_the_last_step_of_an_epoch_takes_what_is_left(steps, batches, of_last_epoch):
    assert batches_of_steps(trainer_at(0), steps) == (batches, of_last_epoch)


def test_how_many_batches_steps_take_is_not_known_without_a_length():
    trainer = trainer_at(0)
    trainer.callback_handler.train_dataloader = iter(())
    assert batches_of_steps(trainer, 5) == (None, 15)


def test_batches_to_leave_out_are_counted_from_the_first_of_the_training():
    first, stream = batches_at(7)
    stream.leave_out([2, 5])
    assert first.unwanted() == [21, 24]
    second, stream = batches_at(8)
    second.leave_out([21, 24])
    assert stream.unwanted() == [2]  # 21 was before
    third, stream = batches_at(8, ignores=True)  # begins at the beginning of an epoch
    third.leave_out([21, 24])
    assert third.unwanted() == stream.unwanted() == []


def test_a_resumed_run_goes_on_if_all_of_its_first_epoch_did_harm(tmp_path):
    again, healer = resumed_after_harm(tmp_path, 64, "skip_data", 3)
    assert again.fed == []
    assert healer.metrics()["healing/recovery_attempts"] == 1


@pytest.mark.parametrize("interval", [3, 9])
def test_a_run_goes_on_after_an_epoch_of_which_nothing_is_left(interval, tmp_path):
    """Two batches an epoch, and three are asked for: one that is skipped costs the other too."""
    settings = {"max_steps": 30, "gradient_accumulation_steps": 3}
    trainer = tiny.plain(tmp_path, data=tiny.tokens(8), **settings)
    failures.corrupts_weights(trainer, at=14 * 3)
    healed = Healed(trainer, snapshot_interval=interval, check_interval=5, nan_patience=3)
    assert healed.error is None
    assert trainer.state.global_step == 30


def test_a_loader_without_batches_still_ends_the_run(tmp_path):
    trainer = tiny.plain(tmp_path, max_steps=5)
    trainer.get_train_dataloader = lambda: DataLoader([])
    assert Healed(trainer).error is None
    assert trainer.state.global_step == 0


def test_a_stop_that_a_callback_asked_for_is_kept_also_if_batches_were_passed_over(tmp_path):
    class Stops(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_training_stop = state.global_step >= 4

    trainer = tiny.plain(tmp_path, max_steps=20, callbacks=[Stops()])
    failures.raises(trainer, lambda: IndexError("index 99 is out of range"), at=2)
    healed = Healed(trainer)
    assert healed.causes == {"data_error"}
    assert trainer.state.global_step == 4
