"""A rollback that fails half-way is taken back, tried again, or made to an older snapshot."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from heal import training_state
from heal.actions import HealingError
from heal.checkpoint.store import training_state as training_state_of
from heal.testing import Fault
from heal.training_state import RestoreFailed
from tests.forked import run_forked
from tests.heal.runs import fingerprint, regression, strike
from tests.heal.state.snapshot_states import build, train


def contents(state):
    """Every tensor and plain value of a state, as something that can be compared."""
    tensors = {key: tensor.clone() for key, tensor in state.tensors().items()}
    values = state.values()
    plain = {name: values[name] for name in ("groups", "state", "schedulers")}
    return tensors, repr(plain)


def same(first, second):
    tensors, others = first[0], second[0]
    return (
        tensors.keys() == others.keys()
        and all(torch.equal(tensors[key], others[key]) for key in tensors)
        and first[1] == second[1]
    )


def fail_after_half(monkeypatch, fails):
    """Have copies of a restore stop half-way as long as ``fails`` says so."""
    whole = training_state.copy_by_kind

    def half(targets, sources, non_blocking):
        if not fails():
            return whole(targets, sources, non_blocking)
        cut = len(targets) // 2
        whole(targets[:cut], sources[:cut], non_blocking)
        raise RuntimeError("the copy stopped half-way")

    monkeypatch.setattr(training_state, "copy_by_kind", half)


@pytest.mark.parametrize("steps_before", [0, 3])
def test_a_copy_that_stops_half_way_leaves_the_state_that_was(monkeypatch, steps_before):
    state, _ = build()
    train(state, steps_before)
    saved = {key: tensor.clone() for key, tensor in state.tensors().items()}
    values = state.values()
    train(state, 4)
    before = contents(state)
    fail_after_half(monkeypatch, lambda: True)
    with pytest.raises(RestoreFailed) as caught:
        state.restore(saved, values)
    assert not caught.value.is_mixed
    assert same(contents(state), before)


def test_moments_that_a_failed_restore_made_are_removed_again(monkeypatch):
    state, _ = build()
    train(state, 3)
    saved = {key: tensor.clone() for key, tensor in state.tensors().items()}
    values = state.values()
    state.optimizers[0].state.clear()
    before = contents(state)
    fail_after_half(monkeypatch, lambda: True)
    with pytest.raises(RestoreFailed):
        state.restore(saved, values)
    assert same(contents(state), before)
    assert not state.optimizers[0].state


def test_a_scheduler_that_cannot_be_loaded_leaves_weights_and_moments_as_they_were(monkeypatch):
    state, _ = build()
    train(state, 3)
    saved = {key: tensor.clone() for key, tensor in state.tensors().items()}
    values = state.values()
    train(state, 4)
    before = contents(state)
    loads = iter([True])

    def load_once_badly(self, saved):
        if next(loads, False):
            raise ValueError("no such schedule")
        self.__dict__.update(saved)

    monkeypatch.setattr(type(state.schedulers[0]), "load_state_dict", load_once_badly)
    with pytest.raises(RestoreFailed, match="no such schedule"):
        state.restore(saved, values)
    assert same(contents(state), before)


def run_with_failing_copies(monkeypatch, fails):
    setup = regression(zclip_enabled=False)
    healer = setup.healer()
    fail_after_half(monkeypatch, lambda: fails(healer))
    return setup, strike(setup, [Fault("corrupt_weight", at=45)], 90, healer)


def rollbacks(healer):
    return [entry["resumed_at"] for entry in healer.recoveries if "rollback" in entry["actions"]]


def test_a_rollback_that_fails_once_is_tried_again(monkeypatch):
    failures = iter([True])
    _, healer = run_with_failing_copies(monkeypatch, lambda healer: next(failures, False))
    assert rollbacks(healer) == [40]
    assert any("failed" in note for note in healer.notes)


def test_a_rollback_that_keeps_failing_is_made_to_an_older_snapshot(monkeypatch):
    failures = iter([True, True])
    _, healer = run_with_failing_copies(monkeypatch, lambda healer: next(failures, False))
    (step,) = rollbacks(healer)
    assert step < 40
    assert healer.last_step == 89


def test_a_halt_after_failed_rollbacks_leaves_no_mixed_state(monkeypatch):
    seen = []
    setup = regression(zclip_enabled=False)

    def fails():
        if not seen:
            seen.append(fingerprint(setup)[:-2])  # without the generators
        return True

    fail_after_half(monkeypatch, fails)
    with pytest.raises(HealingError, match="the state is what it was before"):
        strike(setup, [Fault("corrupt_weight", at=45)], 90)
    for before, now in zip(seen[0], fingerprint(setup)[:-2], strict=True):
        torch.testing.assert_close(now, before, rtol=0, atol=0, equal_nan=True)


def test_without_room_for_a_copy_a_failed_restore_says_that_the_state_is_mixed(monkeypatch):
    state, _ = build()
    train(state, 3)
    saved = {key: tensor.clone() for key, tensor in state.tensors().items()}
    values = state.values()
    train(state, 4)
    monkeypatch.setattr("heal.training_state.available_bytes", lambda: 0)
    fails = iter([True])
    fail_after_half(monkeypatch, lambda: next(fails, False))
    with pytest.raises(RestoreFailed, match="no host memory") as caught:
        state.restore(saved, values)
    assert caught.value.is_mixed
    state.restore(saved, values)  # as the run does next
    assert all(torch.equal(state.tensors()[key], saved[key]) for key in saved)


def restore_sharded_moments():
    """Lose the moments of a sharded parameter, restore them, and take another step."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,))
    model = torch.nn.Linear(3, 2, bias=False)
    model.weight = torch.nn.Parameter(distribute_tensor(model.weight.detach(), mesh, [Shard(0)]))
    optimizer = torch.optim.AdamW(model.parameters())
    state = training_state_of(model, optimizer)

    def step():
        model.weight.grad = torch.ones_like(model.weight)
        optimizer.step()
        return model.weight.full_tensor().clone()

    step()
    saved, values = {key: t.clone() for key, t in state.tensors().items()}, state.values()
    expected = step()
    optimizer.state.clear()
    state.restore(saved, values)
    assert isinstance(optimizer.state[model.weight]["exp_avg"], DTensor)
    assert torch.equal(step(), expected)


def test_sharded_moments_that_are_gone_are_made_again():
    assert run_forked(restore_sharded_moments) == 0
