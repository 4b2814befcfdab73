"""Samples that cannot be read, and services that do not answer, beneath a trainer's loader."""

import pytest
import torch

from heal.exit_codes import ExitCode
from tests.heal.trainers import tiny
from tests.heal.trainers.runs import Healed, assert_same, bare, fingerprint


class Samples(torch.utils.data.Dataset):
    """Sentences as tokens; some positions fail, some of them only for a while."""

    def __init__(self, broken=(), absent=None, error=ConnectionError):
        self.rows = tiny.tokens()["input_ids"]
        self.broken = set(broken)
        self.absent = dict(absent or {})  # position: how often it fails
        self.error = error
        self.read = []

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        if i in self.broken:
            raise ValueError(f"sample {i} has the wrong shape")
        if self.absent.get(i, 0):
            self.absent[i] -= 1
            raise self.error(f"no answer for sample {i}")
        self.read.append(i)
        row = torch.tensor(self.rows[i])
        return {"input_ids": row, "labels": row}


def in_order(folder, samples, **changes):
    """A trainer that reads its samples one after another."""
    trainer = tiny.plain(folder, data=samples, **changes)
    trainer._get_train_sampler = lambda *_: torch.utils.data.SequentialSampler(samples)
    return trainer


def test_only_the_batch_of_a_broken_sample_is_left_out(tmp_path):
    samples = Samples(broken=[21])
    trained = []
    trainer = in_order(tmp_path, samples, max_steps=15)
    step = trainer.training_step
    trainer.training_step = lambda m, inputs, n=None: (
        trained.append(inputs["input_ids"][0, 0].item()) or step(m, inputs, n)
    )
    healed = Healed(trainer)
    assert healed.decisions == [("data_error", ["SkipBatches"])]
    evidence = healed.healer.history[0][1].evidence
    assert (evidence["epoch"], evidence["batch"]) == (0, 5)
    assert "sample 21" in evidence["message"]
    first_words = [samples.rows[i][0] for i in range(0, 64, 4) if i != 20]
    assert trained == first_words
    assert healed.output.global_step == 15


def test_a_service_that_is_away_for_a_while_costs_time_and_no_batch(tmp_path):
    alone = bare(tiny.plain(tmp_path / "alone", data=Samples(), max_steps=16))
    samples = Samples(absent={9: 3, 40: 1})
    trainer = tiny.plain(tmp_path / "healed", data=samples, max_steps=16)
    healed = Healed(trainer)
    assert healed.error is None
    assert set(healed.causes) == {"network_error"}
    assert sorted(healed.waits) in ([30.0, 30.0, 60.0, 120.0], [30.0, 60.0, 120.0, 240.0])
    assert_same(fingerprint(alone), fingerprint(trainer))


def test_a_service_that_stays_away_ends_the_run_when_the_waits_are_spent(tmp_path):
    trainer = tiny.plain(tmp_path, data=Samples(absent={9: 10**6}), max_steps=16)
    healed = Healed(trainer)
    assert healed.waits == [30.0, 60.0, 120.0, 240.0, 480.0, 600.0, 600.0, 600.0]
    assert healed.error.exit_code == ExitCode.NETWORK


def test_a_loader_of_which_everything_is_broken_ends_the_run(tmp_path):
    trainer = tiny.plain(tmp_path, data=Samples(broken=range(64)))
    healed = Healed(trainer)
    assert healed.error.exit_code == ExitCode.BAD_DATA


@pytest.mark.slow
def test_broken_samples_in_every_epoch_do_not_shorten_the_run(tmp_path):
    samples = Samples(broken=[5, 50])
    trainer = tiny.plain(
        tmp_path, data=samples, max_steps=-1, num_train_epochs=3, gradient_accumulation_steps=2
    )
    healed = Healed(trainer)
    assert healed.error is None
    assert healed.output.global_step == trainer.state.max_steps == 24
    assert set(healed.causes) == {"data_error"}
