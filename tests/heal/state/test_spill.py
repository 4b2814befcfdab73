"""Snapshots that memory has no room for are on the disk: the same ones, and nothing is left."""

import errno
import os
import resource
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from benchmarks.damage.families import make
from benchmarks.damage.kinds import KINDS
from benchmarks.damage.runs import train
from heal.snapshot_files import SpillFile, folder_on_disk
from heal.snapshots import SnapshotCorrupt, SnapshotRing, is_due
from tests.heal.runs import regression

ROOT = Path(__file__).parents[3]
KEY = ("parameter", "weight")


def ring_with(memory, folders, count=4):
    return SnapshotRing(
        interval=50, count=count, memory_fraction=memory, quarantine_steps=10, folders=folders
    )


def lived(ring, steps, num_elements=100):
    """Run a ring for so many clean steps; the weight is the number of the step everywhere."""
    weight = torch.zeros(num_elements)
    for step in range(steps):
        if step == 0 or is_due(step, ring.interval):
            ring.capture(step, {KEY: weight.fill_(step)}, {}, is_proven=step == 0)
        ring.note_clean(step)
    return ring


def weights_of(ring):
    return {step: set(ring.take(step).tensors[KEY].tolist()) for step in ring.good_steps()}


@pytest.mark.parametrize("steps", [30, 140, 350, 2000])
@pytest.mark.parametrize("memory", [0.5, 1.0, 2.0, 3.0])
def test_little_memory_keeps_the_same_ages_as_enough(tmp_path, memory, steps):
    little, enough = (lived(ring_with(m, [tmp_path]), steps) for m in (memory, 4.0))
    assert little.good_steps() == enough.good_steps()
    assert weights_of(little) == {float(s): {float(s)} for s in enough.good_steps()}
    assert little.held_bytes() <= memory * 400
    assert little.disk_bytes() > 0
    assert enough.disk_bytes() == 0


def test_a_disk_holds_no_more_files_than_snapshots_and_is_written_only_for_those_that_stay(
    tmp_path, monkeypatch
):
    writes = []
    write = SpillFile.write
    monkeypatch.setattr(SpillFile, "write", lambda *args: writes.append(1) or write(*args))
    ring = lived(ring_with(2.0, [tmp_path]), 3000)
    assert ring.disk_bytes() <= 3 * 400
    assert len(writes) < 0.4 * 3000 / 50  # most snapshots make way before they are old


def odd_tensors():
    return {
        ("parameter", "half"): torch.randn(7, 5).to(torch.bfloat16),
        ("parameter", "image"): torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        ("parameter", "turned"): torch.randn(6, 4).t(),
        ("buffer", "strided"): torch.randn(9, 6)[::2, ::3],
        ("buffer", "mask"): torch.tensor([True, False, True]),
        ("buffer", "none"): torch.empty(0, 3),
        ("state", 0, "half", "step"): torch.tensor(17.0),
        ("extra", "count"): torch.tensor([2**60 + 1]),
        ("extra", "complex"): torch.randn(3, dtype=torch.complex64).conj(),
    }


@pytest.mark.parametrize("memory", [0.0, 1.0])
def test_every_bit_of_any_tensor_comes_back_from_the_disk(tmp_path, memory):
    torch.manual_seed(0)
    ring = ring_with(memory, [tmp_path])
    tensors = odd_tensors()
    expected = {key: tensor.clone() for key, tensor in tensors.items()}
    assert ring.capture(0, tensors, {}, is_proven=True)
    later = {key: torch.zeros_like(tensor) for key, tensor in tensors.items()}
    assert ring.capture(50, later, {})
    assert ring.good_steps() == [0]
    snapshot = ring.take(0)
    assert snapshot.file is not None
    assert list(snapshot.tensors) == list(expected)
    for key, tensor in expected.items():
        assert snapshot.tensors[key].dtype is tensor.dtype
        assert torch.equal(snapshot.tensors[key], tensor), key


def test_a_file_has_no_name_while_it_is_in_use_and_nothing_is_left_after_a_kill(tmp_path):
    script = f"""
        import os, signal
        from pathlib import Path
        from tests.heal.state.test_spill import lived, ring_with
        ring = lived(ring_with(1.0, [Path({str(tmp_path)!r})]), 200)
        assert ring.disk_bytes() > 0
        print(os.listdir({str(tmp_path)!r}), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], cwd=ROOT, capture_output=True, text=True
    )
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    assert ended.stdout == "[]\n"
    assert os.listdir(tmp_path) == []


def test_a_changed_byte_on_the_disk_is_found(tmp_path):
    ring = lived(ring_with(2.0, [tmp_path]), 400)
    oldest = ring.good_steps()[-1]
    ring.of_step(oldest).tensors[KEY][3] += 1
    with pytest.raises(SnapshotCorrupt, match=f"snapshot of step {oldest}: .* on the disk"):
        ring.take(oldest)
    assert oldest not in ring.good_steps()


def test_a_disk_that_cannot_be_read_costs_one_snapshot_and_not_the_process(tmp_path, monkeypatch):
    ring = lived(ring_with(2.0, [tmp_path]), 400)

    def broken(file):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(SpillFile, "check", broken)
    newest, *_, oldest = ring.good_steps()
    with pytest.raises(SnapshotCorrupt, match="cannot be read from the disk"):
        ring.take(oldest)
    assert set(ring.take(newest).tensors[KEY].tolist()) == {float(newest)}


@pytest.fixture
def full_disk():
    """No file may become longer than a kilobyte; what is longer fails as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 10, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, ignored)


@pytest.mark.parametrize("memory", [1.0, 2.0])
def test_a_disk_that_fills_up_leaves_what_memory_holds_and_says_so(tmp_path, full_disk, memory):
    ring = lived(ring_with(memory, [tmp_path]), 400, num_elements=1000)
    assert 1 <= len(ring.good_steps()) <= memory
    assert weights_of(ring) == {float(s): {float(s)} for s in ring.good_steps()}
    assert ring.disk_bytes() == 0
    assert "could not be written: File too large" in ring.degraded
    assert "expected 4 snapshots" in ring.degraded
    assert "set TMPDIR to a folder on a disk" in ring.degraded


@pytest.mark.parametrize("memory", [0.0, 1.0, 2.0])
def test_what_was_written_before_the_disk_broke_stays(tmp_path, monkeypatch, memory):
    ring = lived(ring_with(memory, [tmp_path]), 400)

    def broken(*arguments):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(SpillFile, "write", broken)
    weight = torch.zeros(100)
    for step in range(400, 520):
        if is_due(step, ring.interval):
            ring.capture(step, {KEY: weight.fill_(step)}, {})
        ring.note_clean(step)
    assert weights_of(ring) == {float(s): {float(s)} for s in ring.good_steps()}
    assert len(ring.good_steps()) >= 3
    assert "Input/output error" in ring.degraded
    assert (ring.good_steps()[0] == 500) is (memory > 0)


def test_a_full_disk_is_one_note_and_the_run_goes_on(full_disk, tmp_path, monkeypatch):
    monkeypatch.setattr("heal.training_run.temporary_folders", lambda: [tmp_path])
    setup = regression(snapshot_memory_factor=2.0, snapshot_interval=5, quarantine_steps=2)
    healer = setup.run(60)
    (note,) = [note for note in healer.notes if "could not be written" in note]
    assert f"{tmp_path}" in note
    assert healer.snapshots()[0] >= 50


def test_a_disk_with_little_room_keeps_a_part_of_it_free(tmp_path, monkeypatch):
    ring = ring_with(1.0, [tmp_path])
    monkeypatch.setattr("heal.snapshots.free_bytes", lambda folder: 3 * 400 - ring.disk_bytes())
    lived(ring, 400)
    assert ring.disk_bytes() == 2 * 400
    assert len(ring.good_steps()) == 3
    assert "has room for 2 more" in ring.degraded


def test_ranks_of_a_host_share_its_memory(tmp_path, monkeypatch):
    ages = {}
    for ranks in (1, 4):
        ring = ring_with(4.0, [tmp_path])
        free = lambda ring=ring: 16 * 400 - 4 * ring.held_bytes()  # noqa: E731
        monkeypatch.setattr("heal.snapshots.available_bytes", free)
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
        lived(ring, 400)
        assert ring.held_bytes() <= (4 if ranks == 1 else 3) * 400
        ages[ranks] = ring.good_steps()
    assert ages[1] == ages[4]
    assert "free host memory" in ring.degraded


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="this system has no folder in memory")
def test_a_folder_in_memory_is_no_disk(tmp_path):
    assert folder_on_disk([Path("/dev/shm"), tmp_path / "missing", tmp_path]) == tmp_path
    assert folder_on_disk([Path("/dev/shm")]) is None


@pytest.mark.parametrize(("wait_share", "fewest", "most"), [(1e9, 15, 25), (1e-9, 1, 1)])
def test_a_slow_disk_gets_a_snapshot_only_after_its_share_of_time(
    tmp_path, monkeypatch, wait_share, fewest, most
):
    monkeypatch.setattr("heal.training_run.temporary_folders", lambda: [tmp_path])
    monkeypatch.setattr("heal.snapshots.PATIENCE", -1.0)  # any wait is a long one
    monkeypatch.setattr("heal.snapshots.WAIT_SHARE", wait_share)
    setup = regression(snapshot_memory_factor=0.5, snapshot_interval=5, quarantine_steps=2)
    healer = setup.healer()
    taken = set()

    def at_step(step):
        taken.add(healer.training.ring.newest_step())

    healer.run(setup.train_step, setup.loader, 100, progress=False, on_step=at_step)
    assert fewest <= len(taken) <= most


@pytest.mark.parametrize("name", ["wrong-sign updates, 60 steps", "LR + 3 % per step"])
def test_slow_damage_heals_with_memory_for_two_as_with_memory_for_eight(name):
    """With two snapshots in all, 10 and 20 steps old, the creeping rate ends at 1.2 times."""
    (kind,) = (kind for kind in KINDS if kind.name == name)
    undamaged = train(make("MLP", 32), None, 32, 500, "none").loss
    for memory in (2.0, 8.0):
        settings = {"snapshot_memory_factor": memory, "snapshot_interval": 10}
        ended = train(make("MLP", 32), kind, 32, 500, "heal", "run", **settings)
        assert ended.loss < 1.1 * undamaged, memory
        assert ended.rollbacks > 0
