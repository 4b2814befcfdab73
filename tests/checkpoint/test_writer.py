"""Saving beside the training: what is saved is the moment of the call, and nothing waits."""

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from heal import checkpoint
from heal.checkpoint import CheckpointStore, SaveFailed, saving
from heal.checkpoint import store as store_module
from heal.checkpoint.store import training_state
from heal.cluster.launch import RankGroup
from heal.training_state import RngState
from tests.checkpoint.scenes import assert_same, run


@pytest.fixture
def slow_disk(monkeypatch):
    """A disk that writes when it is told to."""
    allowed = threading.Event()
    real = saving.write_shard

    def write_shard(*args):
        allowed.wait(300)
        real(*args)

    monkeypatch.setattr(saving, "write_shard", write_shard)
    yield allowed
    allowed.set()


def saver(there, store):
    state = training_state(there.model, there.optimizer, there.scheduler, None)
    return lambda step: store.save_state(step, state, {"rng": RngState.now(), "extra": None})


def test_what_is_saved_is_the_moment_of_the_call(tmp_path, slow_disk):
    there = run().train(2)
    store = CheckpointStore(tmp_path, asynchronous=True)
    bits = there.bits()
    saver(there, store)(2)
    there.train(5)  # while nothing is written yet
    assert store.is_busy
    slow_disk.set()
    store.close()
    again = run(seed=1)
    assert again.load(tmp_path).step == 2
    assert_same(again.bits(), bits)


def test_a_save_is_left_out_while_the_one_before_is_written(tmp_path, slow_disk):
    there = run().train(1)
    store = CheckpointStore(tmp_path, asynchronous=True)
    save = saver(there, store)
    save(1)
    with pytest.raises(SaveFailed, match="the save before is still being written"):
        save(2)
    slow_disk.set()
    store.wait()
    save(3)
    store.close()
    assert store.steps() == [3, 1]


def test_a_hundred_saves_while_training_are_all_whole(tmp_path):
    there = run()
    store = CheckpointStore(tmp_path, asynchronous=True, keep=3)
    save, moments, left_out = saver(there, store), {}, 0
    for step in range(1, 101):
        there.train(1)
        try:
            save(step)
            moments[step] = there.bits()
        except SaveFailed:
            left_out += 1
            time.sleep(0.001)
    store.close()
    assert all(report.error is None for report in store.finished_saves())
    assert len(moments) + left_out == 100
    assert len(store.steps()) == min(3, len(moments))
    for step in store.steps():
        store.verify(step)
        again = run(seed=1)
        assert again.load(tmp_path, most=step).step == step
        assert_same(again.bits(), moments[step])


def test_memory_for_copies_is_allocated_once(tmp_path, monkeypatch):
    places, real = [], saving.write_shard

    def write_shard(folder, rank, entries, tensors):
        places.append({name: t.data_ptr() for name, t in tensors.items()})
        real(folder, rank, entries, tensors)

    monkeypatch.setattr(saving, "write_shard", write_shard)
    there = run().train(1)
    store = CheckpointStore(tmp_path, asynchronous=True)
    save = saver(there, store)
    for step in (1, 2):
        save(step)
        store.wait()
    first, again = places
    named = [name for name in first if not name.startswith("value/")]
    assert {name: first[name] for name in named} == {name: again[name] for name in named}


def test_weights_with_nan_are_noticed_by_the_thread_too(tmp_path):
    there = run().train(1)
    with torch.no_grad():
        there.model[0].weight[0, 0] = float("inf")
    store = CheckpointStore(tmp_path, asynchronous=True)
    saver(there, store)(1)
    store.wait()
    (report,) = store.finished_saves()
    assert "1 NaN or Inf" in str(report.error)
    assert store.steps() == []


def test_a_value_that_cannot_be_saved_is_named_and_nothing_is_written(tmp_path):
    there = run().train(1)
    state = training_state(there.model, there.optimizer, there.scheduler)
    store = CheckpointStore(tmp_path)
    with pytest.raises(SaveFailed, match=r"step 1 was not saved: CannotEncode: state\['mine'\]"):
        store.save_state(1, state, {"mine": object()})
    assert list(tmp_path.iterdir()) == []


def test_a_save_that_is_not_asynchronous_waits_for_the_one_that_is(tmp_path, slow_disk):
    there = run().train(1)
    store = CheckpointStore(tmp_path, asynchronous=True)
    save = saver(there, store)
    save(1)
    threading.Timer(0.05, slow_disk.set).start()
    state = training_state(there.model, there.optimizer, there.scheduler, None)
    store.save_state(2, state, {}, asynchronous=False)
    assert store.steps() == [2, 1]


def test_bytes_that_change_on_the_way_to_the_disk_are_noticed_before_the_commit(
    tmp_path, monkeypatch
):
    real = saving.write_shard

    def bad_cable(folder, rank, entries, tensors):
        real(folder, rank, entries, tensors)
        path = folder / "rank-00000.safetensors"
        data = bytearray(path.read_bytes())
        data[-3] ^= 1
        path.write_bytes(data)

    run().train(1).save(tmp_path, 1)
    monkeypatch.setattr(saving, "write_shard", bad_cable)
    with pytest.raises(checkpoint.CheckpointCorrupt, match="is not what was saved"):
        run().train(2).save(tmp_path, 2)
    assert CheckpointStore(tmp_path).steps() == [1]


def test_the_old_name_of_finished_saves_works_and_warns(tmp_path):
    store = CheckpointStore(tmp_path, asynchronous=True)
    saver(run().train(1), store)(1)
    store.wait()
    with pytest.warns(DeprecationWarning, match="news is CheckpointStore.finished_saves now"):
        assert [report.step for report in store.news()] == [1]


class HalfOfTwo(RankGroup):
    """Rank 0 of two, of which the other agrees with everything and writes nothing."""

    def __init__(self):
        self.rank, self.size = 0, 2
        self.sent = []

    def gather(self, payload):
        self.sent.append(payload)
        return [payload, payload]


def test_whatever_ends_the_writing_of_one_rank_the_others_hear_of_it(tmp_path, monkeypatch):
    real = saving.write_shard

    def out_of_memory(*args):
        raise MemoryError("no room for a copy")

    def bad_cable(folder, *args):
        real(folder, *args)
        path = folder / "rank-00000.safetensors"
        path.write_bytes(path.read_bytes()[:-1] + b"?")

    for write, kind, why in (
        (out_of_memory, SaveFailed, "no room for a copy"),
        (bad_cable, checkpoint.CheckpointCorrupt, "is not what was saved"),
    ):
        ranks = HalfOfTwo()
        store = CheckpointStore(tmp_path, ranks=ranks)
        monkeypatch.setattr(saving, "write_shard", write)
        with pytest.raises(kind, match=why):
            store.save_state(1, training_state(run().train(1).model), {})
        assert why in ranks.sent[-1]
        assert list(tmp_path.iterdir()) == []


def test_a_rank_without_memory_for_copies_marks_the_save_as_failed(tmp_path, monkeypatch):
    def out_of_memory(*args):
        raise MemoryError("no room for a copy")

    monkeypatch.setattr(store_module, "HostCopies", out_of_memory)
    store = CheckpointStore(tmp_path, asynchronous=True, ranks=HalfOfTwo())
    saver(run().train(1), store)(1)
    store.wait()
    (report,) = store.finished_saves()
    assert "no room for a copy" in str(report.error)
    assert [path.name for path in (tmp_path / "step-000001").iterdir()] == ["failed-00000"]


def test_in_a_hurry_nobody_waits_for_a_rank_that_may_be_gone(tmp_path, monkeypatch):
    monkeypatch.setattr(saving, "HURRY_SECONDS", 0.1)
    there = run().train(1)
    store = CheckpointStore(tmp_path, asynchronous=True, ranks=HalfOfTwo())
    saver(there, store)(1)
    assert not store.wait(0.5)
    store.hurry()
    assert store.wait(300)
    (report,) = store.finished_saves()
    assert "rank 1 wrote no manifest in time" in str(report.error)
    saver(there, store)(2)  # who goes on after all is as patient as before
    assert not store.wait(0.5)
    store.hurry()
    store.close()


def test_a_rank_that_failed_is_not_waited_for(tmp_path):
    store = CheckpointStore(tmp_path, asynchronous=True, ranks=HalfOfTwo())
    saver(run().train(1), store)(1)
    folder = tmp_path / "step-000001"
    while not (folder / "manifest-00000.json").exists():
        time.sleep(0.01)
    (folder / "failed-00001").write_text("no space left")
    assert store.wait(300)
    (report,) = store.finished_saves()
    assert "step-000001 was not committed: rank 1 failed" in str(report.error)


def test_a_rank_that_fails_leaves_a_mark_and_nothing_else(tmp_path, monkeypatch):
    def no_space(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(saving, "write_shard", no_space)
    store = CheckpointStore(tmp_path, asynchronous=True, ranks=HalfOfTwo())
    saver(run().train(1), store)(1)
    store.wait()
    assert [path.name for path in (tmp_path / "step-000001").iterdir()] == ["failed-00000"]


def test_a_rank_that_cannot_start_a_thread_leaves_a_mark(tmp_path, monkeypatch):
    def no_more(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", no_more)
    store = CheckpointStore(tmp_path, asynchronous=True, ranks=HalfOfTwo())
    with pytest.raises(SaveFailed, match="step 1 was not saved: can't start new thread"):
        saver(run().train(1), store)(1)
    assert [path.name for path in (tmp_path / "step-000001").iterdir()] == ["failed-00000"]


LEAVING = """
import atexit, sys
from heal.checkpoint import CheckpointStore, saving
from tests.checkpoint.scenes import run
from tests.checkpoint.test_writer import HalfOfTwo, saver
saving.HURRY_SECONDS = 0.1
atexit.register(lambda: print(*(r.error for r in store.finished_saves())))  # after all others
patience = 600.0 if sys.argv[2] == "fails" else 4.0
store = CheckpointStore(sys.argv[1], asynchronous=True, ranks=HalfOfTwo(), wait_seconds=patience)
saver(run().train(1), store)(1)
if sys.argv[2] == "fails":
    raise ConnectionError("another rank has died")
"""


@pytest.mark.parametrize("how", ["fails", "ends"])
def test_only_who_fails_leaves_in_a_hurry(tmp_path, how):
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", LEAVING, str(tmp_path), how],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == (how == "fails")
    assert "rank 1 wrote no manifest in time" in done.stdout
    assert how == "fails" or time.monotonic() - began > 4.0
