"""A save may be cut off at any write, flush or rename: a whole checkpoint is always left."""

import itertools
import os
import shutil
import signal

import pytest

from heal import checkpoint
from heal.checkpoint.files import list_folders
from tests.checkpoint.disk import File, Folder, RecordingDisk
from tests.checkpoint.scenes import assert_same, run, saved_at
from tests.forked import run_forked

OPERATIONS = ("writev", "fsync", "replace", "mkdir", "unlink", "rmdir", "open")


def save_once_more(directory):
    """Save step 3 beside step 1, which then has to go."""
    there = run()
    there.load(directory)
    there.train(2)
    there.save(directory, 3, keep=1)
    return there


def child_killed_at(directory, number, half):
    """Fork, save, and be killed at an operation; return whether the save was over before."""
    count = itertools.count()

    def counted(name, real):
        def call(*args, **kwargs):
            if next(count) == number:
                if half and name == "writev":
                    real(args[0], [memoryview(b"".join(args[1]))[: len(args[1][0]) // 2]])
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)

        return call

    def save():
        for name in OPERATIONS:
            setattr(os, name, counted(name, getattr(os, name)))
        save_once_more(directory)

    code = run_forked(save)
    assert code in (0, -signal.SIGKILL)
    return code == 0


@pytest.mark.parametrize(
    "half", [pytest.param(False, marks=pytest.mark.slow), True], ids=["before", "torn"]
)
def test_sigkill_at_every_operation_leaves_a_whole_checkpoint(tmp_path, half):
    origin = tmp_path / "origin"
    bits = saved_at(origin, 1)
    probe = tmp_path / "probe"
    shutil.copytree(origin, probe)
    bits[3] = save_once_more(probe).bits()
    assert [f.step for f in list_folders(probe)] == [3]
    left = []
    for number in itertools.count():
        there = tmp_path / "there"
        shutil.copytree(origin, there)
        finished = child_killed_at(there, number, half)
        again = run(seed=5)
        resumed = again.load(there)
        assert resumed is not None, f"nothing is left after a kill at operation {number}"
        assert_same(again.bits(), bits[resumed.step])
        left.append(resumed.step)
        # The next save works, and takes away what the crash left.
        again.train(1).save(there, 4, keep=1)
        assert [f.step for f in list_folders(there)] == [4]
        shutil.rmtree(there)
        if finished:
            break
    assert number > 25
    assert left == sorted(left), "once the new one is there it stays"
    assert {1, 3} == set(left)


def lose_power_at_every_operation(tmp_path, deaf_to=()):
    origin = tmp_path / "origin"
    bits = saved_at(origin, 1)
    seen = []

    def check():
        for names, data in itertools.product(("kept", "lost"), repeat=2):
            disk.left_after_a_crash(tmp_path / "left", names=names, data=data)
            again = run(seed=5)
            resumed = again.load(tmp_path / "left")
            where = f"after operation {disk.operations}, names {names}, data {data}"
            assert resumed is not None, f"nothing is left {where}"
            seen.append((resumed.step, names, data))
            if resumed.step == 1:
                assert_same(again.bits(), bits[1])

    disk = RecordingDisk(origin, check, deaf_to)
    with disk.watching():
        save_once_more(origin)
    assert {step for step, *_ in seen} == {1, 3}
    assert seen[-1][0] == seen[-4][0] == 3, "a save that has returned survives any loss of power"


def test_no_loss_of_power_leaves_less_than_a_whole_checkpoint(tmp_path):
    lose_power_at_every_operation(tmp_path)


@pytest.mark.parametrize("deaf_to", [File, Folder])
def test_a_drive_that_does_not_flush_is_noticed(tmp_path, deaf_to):
    with pytest.raises(AssertionError, match=r"nothing is left|survives any loss"):
        lose_power_at_every_operation(tmp_path, deaf_to)


def test_leftovers_of_a_crash_are_not_mistaken_for_a_checkpoint(tmp_path):
    saved_at(tmp_path, 1, 3)
    (tmp_path / "step-000003" / "COMMIT").unlink()
    there = run(seed=1)
    assert there.load(tmp_path).step == 1
    assert checkpoint.CheckpointStore(tmp_path).steps() == [1]
