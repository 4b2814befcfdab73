"""The zoo of healthy set-ups: a few of them are left alone, and a change of one bit is seen."""

import pytest
import torch

from benchmarks.healthy.__main__ import page
from benchmarks.healthy.guards import Bare, Healed
from benchmarks.healthy.zoo import SETUPS, Looked, fingerprint, look, look_at


@pytest.mark.parametrize("mode", ["loop", "run"])
@pytest.mark.parametrize("name", ["nothing changes", "dropout 0.5", "two tasks in turn"])
def test_a_healthy_set_up_is_left_alone(name, mode):
    found = look(name, 0, mode, zclip_enabled=False)
    assert found.ok, found


def test_a_game_of_two_healers_is_compared_with_all_its_networks():
    with Bare() as bare:
        modules = SETUPS["SAC, a healer each, 3e-4"](0, bare)
    assert len(modules) == 4


def test_there_are_at_least_34_set_ups():
    assert len(SETUPS) >= 34


def test_a_change_of_training_is_seen(monkeypatch):
    def setup(seed, guard):
        model = torch.nn.Linear(2, 1)
        torch.nn.init.constant_(model.weight, 0.5 if isinstance(guard, Healed) else 0.25)
        return [model]

    monkeypatch.setitem(SETUPS, "changed", setup)
    found = look("changed", 0)
    assert not found.identical
    assert not found.ok


def test_a_draw_from_the_generator_is_seen():
    torch.manual_seed(0)
    before = fingerprint([])
    torch.rand(1)
    assert not torch.equal(before[0], fingerprint([])[0])


def test_a_halt_is_seen_and_its_journal_is_read(monkeypatch):
    def setup(seed, guard):
        torch.manual_seed(seed)
        model = torch.nn.Linear(2, 1)
        guard.watch(model, torch.optim.SGD(model.parameters(), lr=0.1, fused=True))
        if isinstance(guard, Healed):
            raise RuntimeError("a halt")
        return [model]

    monkeypatch.setitem(SETUPS, "halted", setup)
    found = look_at(("halted", 0, "loop", True))
    assert found.halted == "RuntimeError: a halt"
    assert not found.ok


def test_with_clipping_only_changes_of_training_count():
    found = look_at(("nothing changes", 0, "loop", True))
    assert found.ok


def test_the_page_counts_runs_and_set_ups():
    good = Looked("a", 0, "loop", True, "", 0, 0, 2, {}, {"loss_spike": 1})
    bad = Looked("b", 0, "loop", True, "", 1, 0, 0, {}, {})
    text = "\n".join(page([good, bad]))
    assert "| a | 1/1 | 1/1 | 0 | 0 | 0 | 2 | loss_spike x 1 |" in text
    assert "1 of 2 runs and 1 of 2 set-ups were left alone; 2 experiments; seeds 0." in text


@pytest.mark.parametrize("seed", [3, 4])
def test_a_task_that_returns_after_another_one_was_learned_is_left_alone(seed):
    """Old weights do better on it than today's, which have learned the other one."""
    found = look("old task returns", seed, zclip_enabled=False)
    assert found.ok, found
