"""What trackers are shown: numbers beside the trainer's own, and an alert for every decision."""

import pytest
from transformers import TrainerCallback

from heal import SelfHealingTrainer
from tests.heal.trainers import failures, tiny
from tests.heal.trainers.runs import Healed, log


class Recorder:
    """A tracker that keeps what it gets."""

    def __init__(self):
        self.numbers, self.alerts, self.is_open = {}, [], False

    def start(self, config):
        self.is_open = True

    def log(self, metrics, step):
        self.numbers.update(metrics)

    def alert(self, level, title, text):
        self.alerts.append((level, title))

    def close(self):
        self.is_open = False


class ReportTo(TrainerCallback):
    """Stands for the callback of wandb and its like."""

    def __init__(self):
        self.lines = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.lines.append(dict(logs))


def test_report_to_is_shown_our_numbers_and_the_trainers_log_is_not_touched(tmp_path):
    report = ReportTo()
    trainer = tiny.plain(tmp_path, callbacks=[report])
    Healed(trainer)
    assert {"loss", "healing/nan_count", "zclip/raw_grad_norm"} <= set(report.lines[-2])
    assert not any("healing" in name for line in log(trainer) for name in line)


def test_a_tracker_of_ours_gets_every_decision(tmp_path):
    tracker = Recorder()
    trainer = tiny.plain(tmp_path, max_steps=12)
    failures.nan_loss(trainer, at=3)
    Healed(trainer, trackers=[tracker])
    assert any("nonfinite_loss" in title for _, title in tracker.alerts)
    assert tracker.numbers["healing/nan_count"] == 1
    assert not tracker.is_open


def test_a_tracker_that_is_not_known_is_an_error_before_training(tmp_path):
    with pytest.raises(ValueError, match=r"tracker: expected one of trackio.*, got 'trakio'"):
        SelfHealingTrainer(tiny.plain(tmp_path), trackers="trakio")
