"""Healing adds no read of the device to a healthy step of a trainer."""

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from heal.guarded_step import GuardedStep, WatchedOptimizer
from tests.heal.trainers import tiny
from tests.heal.trainers.runs import Healed, bare
from zclip.mailbox import Mailbox

READS = ("item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__", "__index__")
STEPS = 12


class Reads(TorchDispatchMode):
    """Counts what would make the host wait: values asked for, by operator or by method.

    Letters of the mailbox are read when they have long landed, and do not count; nor do the two
    functions that read a verdict if it lies in host memory anyhow, as here. On a device they do
    not, which ``tests/heal/test_no_sync.py`` proves.
    """

    QUIET = ((Mailbox, "poll"), (GuardedStep, "post"), (WatchedOptimizer, "step_if_allowed"))

    def __init__(self, monkeypatch):
        super().__init__()
        self.count = Counter()
        self._is_quiet = False
        for name in READS:
            monkeypatch.setattr(torch.Tensor, name, self._counted(getattr(torch.Tensor, name)))
        for owner, name in self.QUIET:
            monkeypatch.setattr(owner, name, self._quiet(getattr(owner, name)))

    def _quiet(self, method):
        def quiet(*args, **kwargs):
            before, self._is_quiet = self._is_quiet, True
            try:
                return method(*args, **kwargs)
            finally:
                self._is_quiet = before

        return quiet

    def _counted(self, method):
        def counted(tensor, *args, **kwargs):
            if not self._is_quiet:
                self.count[method.__name__] += 1
            return method(tensor, *args, **kwargs)

        return counted

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.name()
        if not self._is_quiet and ("_local_scalar_dense" in name or "nonzero" in name):
            self.count[name] += 1
        return function(*args, **(kwargs or {}))


def reads(monkeypatch, train):
    with monkeypatch.context() as patch, Reads(patch) as counted:
        train()
    return counted.count


@pytest.mark.parametrize("zclip_enabled", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_healthy_step_asks_the_device_nothing_that_the_bare_trainer_does_not(
    zclip_enabled, tmp_path, monkeypatch
):
    settings = {"max_steps": STEPS, "logging_steps": 1000, "gradient_accumulation_steps": 2}
    alone = tiny.plain(tmp_path / "alone", **settings)
    trainer = tiny.plain(tmp_path / "healed", **settings)
    without = reads(monkeypatch, lambda: bare(alone))
    healed = []
    quiet = {"snapshot_interval": 1000, "check_interval": 0}  # what is done once in a while
    with_healing = reads(
        monkeypatch,
        lambda: healed.append(Healed(trainer, zclip_enabled=zclip_enabled, **quiet)),
    )
    assert healed[0].healer.notes == []
    added = {name: n - without[name] for name, n in with_healing.items() if n != without[name]}
    assert sum(without.values()) >= STEPS  # the trainer's own
    # A few at the start, where checks and snapshots are at powers of two, and at the end.
    assert all(n < STEPS for n in added.values()), added


def test_a_read_per_step_would_be_noticed(tmp_path, monkeypatch):
    def train(reads_more):
        trainer = tiny.plain(tmp_path, max_steps=STEPS, logging_steps=1000)
        step = trainer.training_step

        def training_step(*args, **kwargs):
            loss = step(*args, **kwargs)
            if reads_more:
                loss.item()
            return loss

        trainer.training_step = training_step
        return reads(monkeypatch, lambda: bare(trainer))

    assert train(True)["item"] - train(False)["item"] == STEPS
