"""How much host memory snapshots take, and what they do when there is little."""

import pytest
import torch
from torch import nn

from heal.snapshots import SnapshotRing
from heal.state_checks import count_bad
from heal.training_state import TrainingState, available_bytes
from tests.heal.state.snapshot_states import build, take, train


def test_memory_is_at_most_twice_the_trainable_state_and_is_reused():
    state, ring = build(interval=1, quarantine_steps=0)
    train(state, 2)
    sizes = set()
    for step in range(2, 12):
        take(state, ring, step)
        ring.note_clean(step)
        sizes.add(ring.held_bytes())
        train(state, 1)
    trainable = sum(t.nbytes for t in state.tensors().values())
    assert max(sizes) == 2 * trainable
    assert len(ring.good_steps()) == 2


def test_frozen_weights_take_no_memory_until_they_change():
    state, _ = build()
    everything = sum(t.nbytes for t in state.tensors().values())
    state.model.embed.weight.requires_grad_(False)
    state.notice_changes()
    without = sum(t.nbytes for t in state.tensors().values())
    assert everything - without == state.model.embed.weight.nbytes
    frozen = [key for key, _ in state.constants() if key[0] == "parameter"]
    assert frozen == [("parameter", "embed.weight")]
    with torch.no_grad():
        state.model.embed.weight.mul_(0.9)  # as a moving average would
    state.notice_changes()
    assert sum(t.nbytes for t in state.tensors().values()) == everything
    assert not [key for key, _ in state.constants() if key[0] == "parameter"]


class Overlapping(nn.Module):
    """Parameters of one storage: a whole and a part of it, or two parts that overlap."""

    def __init__(self, is_whole):
        super().__init__()
        memory = torch.randn(8, 4)
        first, second = (memory[:4], memory) if is_whole else (memory[:5], memory[3:])
        self.first, self.second = nn.Parameter(first), nn.Parameter(second)


@pytest.mark.parametrize("is_whole", [True, False], ids=["a view of the other", "overlapping"])
def test_parameters_that_share_memory_return_together(is_whole):
    model = Overlapping(is_whole)
    state = TrainingState(model, [])
    saved = {key: tensor.clone() for key, tensor in state.tensors().items()}
    wanted = [param.detach().clone() for param in model.parameters()]
    with torch.no_grad():
        model.first.add_(1)
        model.second.mul_(2)
    state.restore(saved, state.values())
    for param, value in zip(model.parameters(), wanted, strict=True):
        assert torch.equal(param, value)
    (tensor,) = saved.values()
    assert tensor.dtype is (torch.float32 if is_whole else torch.uint8)


def test_nan_is_found_in_a_parameter_that_another_is_a_view_of():
    model = Overlapping(True)
    with torch.no_grad():
        model.second[7, 0] = torch.nan
    assert int(count_bad(TrainingState(model, []).tensors().items())) == 1


def test_tied_weights_and_views_are_copied_once():
    state, _ = build()
    keys = state.tensors()
    weights = [key for key, t in keys.items() if t.shape == (6, 6)]
    assert len(weights) == 1
    storage = {t.untyped_storage()._cdata for t in keys.values()}
    assert len(storage) == len(keys)


def test_too_little_memory_degrades_and_says_so(monkeypatch):
    state, ring = build()
    num_bytes = sum(t.nbytes for t in state.tensors().values())
    monkeypatch.setattr("heal.snapshots.available_bytes", lambda: num_bytes)
    assert not take(state, ring, 0)
    assert "free host memory" in ring.degraded
    monkeypatch.setattr("heal.snapshots.available_bytes", lambda: 2.5 * num_bytes)
    assert take(state, ring, 5)
    ring.note_clean(5), ring.note_clean(6)
    assert take(state, ring, 10)
    assert ring.held_bytes() <= 2 * num_bytes


def test_the_system_is_asked_for_memory_until_all_are_there_that_are_wanted(monkeypatch):
    state, ring = build()[0], SnapshotRing(10, 2, 2.0, 0)
    asked = []
    monkeypatch.setattr("heal.snapshots.available_bytes", lambda: asked.append(1) or 1 << 40)
    for step in range(0, 50, 10):
        assert take(state, ring, step)
        ring.note_clean(step)
    assert len(asked) == 2  # the memory of the first two is used again and again
    ring.drop_all()
    assert ring.held_bytes() > 0


def test_a_place_that_may_have_to_grow_is_asked_for_once_a_second(monkeypatch):
    """That of step 0 has no moments, and is kept as the oldest for most of a run."""
    state, ring = build()[0], SnapshotRing(1, 3, 3.0, 0)
    clock, asked, free = [100.0], [], [1 << 40]
    monkeypatch.setattr("heal.snapshots.available_bytes", lambda: asked.append(1) or free[0])
    monkeypatch.setattr("heal.snapshots.time.monotonic", lambda: clock[0])
    for step in range(20):
        assert take(state, ring, step)
        ring.note_clean(step)
        ring.pin({0})
        clock[0] += 0.125
        train(state, 1)  # the first time makes the moments
    assert ring.of_step(0) is not None
    assert len(asked) == 3 + 2  # for each place, and in the two seconds that follow
    free[0], clock[0] = 0, clock[0] + 1.0  # what the system said is not believed for longer
    take(state, ring, 20)
    assert "free host memory" in ring.degraded


def test_memory_that_is_short_for_the_second_leaves_one(monkeypatch):
    state, ring = build()[0], SnapshotRing(10, 2, 2.0, 0)
    assert take(state, ring, 0)
    ring.note_clean(0)
    monkeypatch.setattr("heal.snapshots.available_bytes", lambda: 0)
    assert take(state, ring, 10)
    assert len(ring._kept) == 1
    assert "1 are kept" in ring.degraded


def test_a_fraction_below_one_means_no_snapshots_and_says_so():
    state, ring = build(memory_fraction=0.5)
    assert not take(state, ring, 0)
    assert "snapshot_memory_factor" in ring.degraded


def system(root, files):
    for name, text in {"proc/meminfo": "MemTotal: 99 kB\nMemAvailable: 64 kB\n", **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return available_bytes(root)


def test_memory_is_what_the_system_has_available(tmp_path):
    assert system(tmp_path, {}) == 64 * 1024
    assert available_bytes() > 0


@pytest.mark.parametrize("inner", ["job/step", "job"])
def test_a_container_has_no_more_memory_than_its_limit_leaves(tmp_path, inner):
    groups = "sys/fs/cgroup"
    files = {
        "proc/self/cgroup": f"1:name=systemd:/x\n0::/{inner}\n",
        f"{groups}/job/memory.max": "50000\n",  # also of what is inside
        f"{groups}/job/memory.current": "40000\n",
        f"{groups}/job/memory.stat": "anon 1\ninactive_file 7000\n",
        f"{groups}/job/step/memory.max": "max\n",
        f"{groups}/job/step/memory.current": "40000\n",
    }
    assert system(tmp_path, files) == 17000


def test_a_container_of_the_first_version_has_a_limit_too(tmp_path):
    folder = "sys/fs/cgroup/memory/job"
    files = {
        "proc/self/cgroup": "4:cpu,memory:/job\n",
        f"{folder}/memory.limit_in_bytes": "50000\n",
        f"{folder}/memory.usage_in_bytes": "30000\n",
        f"{folder}/memory.stat": "cache 5\ninactive_file 1\ntotal_inactive_file 500\n",
    }
    assert system(tmp_path, files) == 20500
