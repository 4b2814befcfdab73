"""A trainer with a loop of its own, as PPO had: its optimizer's step is what can be guarded."""

from transformers import Trainer, TrainingArguments

from tests.heal.trainers import tiny
from tests.heal.trainers.runs import Healed, assert_same, is_finite, set_seed, weights


class OwnLoopTrainer(Trainer):
    """Several optimizer steps per update, no training_step and no hook around a step."""

    bad = ()

    def train(self):
        loader = self.get_train_dataloader()
        self.create_optimizer_and_scheduler(num_training_steps=self.args.max_steps)
        self.model, self.optimizer = self.accelerator.prepare(self.model, self.optimizer)
        self.control = self.callback_handler.on_train_begin(self.args, self.state, self.control)
        taken = 0
        for batch in loader:
            for _ in range(2):  # epochs over one batch of experience
                loss = self.model(**batch).loss
                loss = loss * float("nan") if taken in self.bad else loss
                self.accelerator.backward(loss)
                self.optimizer.step()
                self.optimizer.zero_grad()
                taken += 1
            self.lr_scheduler.step()
            self.state.global_step += 1
            self.control = self.callback_handler.on_step_end(self.args, self.state, self.control)
            if self.state.global_step >= self.args.max_steps:
                break
        self.control = self.callback_handler.on_train_end(self.args, self.state, self.control)


def own_loop(folder, bad=(), **changes):
    trainer = OwnLoopTrainer(
        model=tiny.llama(),
        args=tiny.arguments(TrainingArguments, folder, max_steps=12, **changes),
        train_dataset=tiny.tokens(),
    )
    trainer.remove_callback(tiny.PrinterCallback)
    trainer.bad = bad
    return trainer


def test_an_undisturbed_loop_is_left_alone(tmp_path):
    alone = own_loop(tmp_path / "alone")
    set_seed(1)
    alone.train()
    healed = Healed(own_loop(tmp_path / "healed"))
    assert healed.error is None
    assert healed.healer.notes == []
    assert healed.healer.last_step == 23
    assert_same(weights(alone), weights(healed.trainer))


def test_its_bad_steps_are_skipped(tmp_path):
    trainer = own_loop(tmp_path, bad=(9, 12, 13, 14))
    healed = Healed(trainer, nan_patience=3)
    assert is_finite(trainer)
    assert healed.healer.metrics()["healing/nan_count"] == 4
    assert not any("Rollback" in actions for _, actions in healed.decisions)
    assert trainer.state.global_step == 12


def test_without_healing_one_of_them_ruins_the_model(tmp_path):
    trainer = own_loop(tmp_path, bad=(9,))
    trainer.train()
    assert not is_finite(trainer)


def test_its_postmortem_is_written(tmp_path):
    Healed(own_loop(tmp_path))
    assert (tmp_path / "postmortem.json").is_file()
