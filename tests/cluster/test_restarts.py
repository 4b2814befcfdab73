"""Ranks die, and the run ends with the very weights of one that was never disturbed."""

import functools
import json
import os
import random
import signal
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from heal.cluster import resolve_resume_path
from heal.cluster.launch import Lobby, RanksMissing, find_place
from tests.cluster import ranks, trainer
from tests.cluster.jobs import SECONDS, Job, end, read_json, read_step, torchrun

STEPS = 40


@functools.cache
def undisturbed(size):
    """The weights at the end of a run that nobody touched."""
    with tempfile.TemporaryDirectory() as folder, Job(folder, size, trainer.main, STEPS) as job:
        assert job.wait() == [0] * size, job.logs()
        return (job.folder / "done0").read_text()


def attempts(folder, rank=0):
    path = Path(folder, f"attempts{rank}")
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def wait_until(condition, process, folder):
    until = time.monotonic() + SECONDS
    while not condition():
        log = Path(folder, "log").read_text(errors="replace")[-6000:]
        assert process.poll() is None, log
        assert time.monotonic() < until, log
        time.sleep(0.005)


def kill_one_rank(folder, seed):
    """SIGKILL a random rank at a random moment; return the seconds until all trained again."""
    chance = random.Random(seed)
    size = 2
    process = torchrun(folder, size, "tests.cluster.trainer", STEPS, 0.02)
    try:
        after = chance.randrange(0, STEPS * 3 // 4)
        wait_until(lambda: read_step(folder, 0) >= after, process, folder)
        time.sleep(chance.random() * 0.03)
        victim = chance.randrange(size)
        killed = time.time()
        os.kill(attempts(folder, victim)[-1]["pid"], signal.SIGKILL)
        code = process.wait(SECONDS)
    except subprocess.TimeoutExpired:
        raise AssertionError(Path(folder, "log").read_text(errors="replace")[-6000:]) from None
    finally:
        end(process)
    log = Path(folder, "log").read_text(errors="replace")[-6000:]
    assert code == 0, log
    assert {Path(folder, f"done{rank}").read_text() for rank in range(size)} == {undisturbed(size)}
    tried = attempts(folder)
    assert len(tried) == 2, f"resumed on restart {len(tried) - 1}, not on the first:\n{log}"
    assert tried[1]["start"] >= after - trainer.SAVE_EVERY
    return tried[1]["time"] - killed


@pytest.mark.parametrize("seed", range(2))
def test_after_kill_9_of_a_rank_the_run_ends_bit_by_bit_as_if_undisturbed(tmp_path, seed):
    kill_one_rank(tmp_path, seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 200))
def test_after_kill_9_a_hundred_times(tmp_path, seed, record_property):
    record_property("seconds_to_resume", kill_one_rank(tmp_path, seed))


def test_a_run_goes_on_with_more_ranks_and_with_fewer(tmp_path):
    for size, upto in ((2, 10), (3, 20)):
        with Job(tmp_path, size, trainer.main, 10_000_000, 0.005) as job:
            job.wait_for(lambda job=job, upto=upto: min(job.steps()) >= upto)
            job.send(0, signal.SIGTERM)
            assert set(job.wait()) == {75}, job.logs()
        for rank in range(size):
            (tmp_path / f"step{rank}").unlink()
    last = max(int(path.name.removeprefix("step-")) for path in tmp_path.glob("step-*"))
    with Job(tmp_path, 2, trainer.main, last + 10) as job:
        assert job.wait() == [0, 0], job.logs()
    tried = attempts(tmp_path)
    assert [attempt["size"] for attempt in tried] == [2, 3, 2]
    assert tried[0]["start"] < tried[1]["start"] < tried[2]["start"] == last
    assert len({attempt["name"] for attempt in tried}) == 3
    digests = {(tmp_path / f"done{rank}").read_text() for rank in range(2)}
    assert len(digests) == 1


@pytest.mark.parametrize(("victim", "where"), [(0, "write_own"), (1, "write_own"), (0, "commit")])
def test_a_rank_that_dies_while_saving_keeps_nobody_waiting(tmp_path, victim, where):
    with Job(tmp_path, 2, ranks.die_while_saving, victim, where) as job:
        codes = job.wait()
        assert (codes[victim], codes[1 - victim]) == (9, 1), job.logs()
    assert resolve_resume_path(tmp_path).name == "step-000001"


def test_the_side_group_is_made_while_all_are_there(tmp_path):
    with Job(tmp_path, 2, ranks.join_and_look) as job:
        assert job.wait() == [0, 0], job.logs()
    assert [read_json(tmp_path / f"told{rank}") for rank in range(2)] == [1, 1]


def agree(store, rank, size, seconds=120.0):
    return Lobby(store, size, timedelta(seconds=seconds)).agree(rank)


@pytest.fixture
def store():
    return dist.HashStore()


def together(store, size, **extra):
    """The names that ranks in threads of their own agree on."""
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(lambda rank: agree(store, rank, size, **extra), range(size)))


def test_ranks_that_start_together_agree_on_a_name(store):
    assert len(set(together(store, 4))) == 1


def test_the_name_is_new_each_time_though_the_store_is_old(store):
    names = [together(store, size)[0] for size in (3, 3, 2, 4, 3)]
    assert len(set(names)) == 5


def test_a_rank_that_died_while_joining_does_not_count(store):
    """It said hello and was offered a place; the one that replaces it gets another offer."""
    with pytest.raises(RanksMissing):
        agree(store, 1, 2, seconds=0.05)
    with pytest.raises(RanksMissing, match=r"expected 2 ranks within 0\.05 s, got fewer: rank 1"):
        agree(store, 0, 2, seconds=0.05)
    assert len(set(together(store, 2))) == 1


def test_a_rank_that_accepted_a_host_that_died_takes_the_next_offer(store):
    with ThreadPoolExecutor(3) as pool:
        waiting = pool.submit(agree, store, 1, 3)
        with pytest.raises(RanksMissing, match="rank 2 did not come"):
            agree(store, 0, 3, seconds=0.3)
        others = [pool.submit(agree, store, rank, 3) for rank in (0, 2)]
        assert len({each.result() for each in [waiting, *others]}) == 1


TORCHRUN = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "a", "MASTER_PORT": "29500"}
SLURM = {
    "SLURM_JOB_ID": "4711",
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_JOB_NODELIST": "gpu[07-08]",
    "SLURM_RESTART_COUNT": "2",
}


def test_the_place_is_that_of_torchrun():
    place = find_place({**TORCHRUN, **SLURM, "TORCHELASTIC_RESTART_COUNT": "3", "LOCAL_RANK": "1"})
    assert (place.rank, place.world_size, place.local_rank, place.restart) == (1, 4, 1, 3)
    assert (place.master_addr, place.master_port, place.store_is_hosted) == ("a", 29500, False)


def test_without_torchrun_the_place_is_that_of_slurm():
    place = find_place(SLURM)
    assert (place.rank, place.world_size, place.local_rank, place.restart) == (5, 8, 1, 2)
    assert (place.master_addr, place.master_port) == ("gpu07", 24711)
    assert find_place({**SLURM, "MASTER_PORT": "1234"}).master_port == 1234


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({}, "expected RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT in the environment"),
        (
            {**TORCHRUN, "RANK": "one"},
            "RANK in the environment: expected a whole number, got 'one'",
        ),
        ({"SLURM_JOB_ID": "1"}, "RANK, WORLD_SIZE"),
    ],
)
def test_what_is_missing_is_named(environment, message):
    with pytest.raises(RuntimeError, match=message):
        find_place(environment)
