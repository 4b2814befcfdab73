"""A rank that stands still is survived if it goes on, and named if it does not."""

import signal
import tempfile
import threading
import time

import pytest

from heal.cluster.watchdog import HangWatchdog, Standing, find_suspects, where_is
from heal.exit_codes import ExitCode
from tests.cluster import ranks
from tests.cluster.jobs import Job

PAUSE = 0.005  # seconds between two steps
HANG_SECONDS = 5.0  # without a step; far more than one takes on a busy machine


def test_a_rank_stopped_for_five_seconds_is_survived(tmp_path):
    with Job(tmp_path, 2, ranks.watched_training, 60.0, PAUSE) as job:
        job.wait_for(lambda: min(job.steps()) >= 5)
        job.send(1, signal.SIGSTOP)
        time.sleep(5)
        before = max(job.steps())
        job.send(1, signal.SIGCONT)
        job.wait_for(lambda: min(job.steps()) >= before + 5)
        assert not list(tmp_path.glob("hang*"))


@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_stopped_for_ever_is_named_by_all_others(tmp_path, victim):
    with Job(tmp_path, 3, ranks.watched_training, HANG_SECONDS, PAUSE) as job:
        job.wait_for(lambda: min(job.steps()) >= 5)
        job.send(victim, signal.SIGSTOP)
        others = [rank for rank in range(3) if rank != victim]
        for rank in others:
            job.ranks[rank].join(300)
            assert job.ranks[rank].exitcode == ExitCode.HUNG, job.logs()
    for rank in others:
        said = (tmp_path / f"hang.rank{rank}.txt").read_text()
        assert f": rank {victim} did not arrive" in said
        if victim != 0:  # rank 0 keeps the store here, and took it along
            assert f"rank {victim}: does not run (stopped or dead)" in said
        assert "watched_training" in said, "the stack is missing"


def test_a_rank_that_sleeps_in_its_own_code_is_named_and_all_dump_their_stacks(tmp_path):
    with Job(tmp_path, 3, ranks.watched_training, HANG_SECONDS, PAUSE) as job:
        job.wait_for(lambda: min(job.steps()) >= 5)
        (tmp_path / "sleep1").touch()
        assert job.wait() == [ExitCode.HUNG] * 3, job.logs()
    for rank in range(3):
        said = (tmp_path / f"hang.rank{rank}.txt").read_text()
        assert ": rank 1 did not arrive" in said
        assert "in doze_off" in said
    assert "doze_off" in (tmp_path / "hang.rank1.txt").read_text().partition("no progress")[0]


def standings(*entries):
    return [Standing(rank, *entry, at="somewhere") for rank, entry in enumerate(entries)]


def test_blame_goes_to_the_stopped_then_to_the_late_then_to_those_who_do_not_wait():
    earlier = [(7, 1), (7, 1), (7, 1)]
    for later, guilty in [
        ([(7, 4), (7, 1), (6, 4)], (1,)),  # its watchdog does not count on
        ([(7, 4), (7, 4), (6, 4)], (2,)),
        ([(7, 4), (7, 4), (7, 4)], ()),
        ([(7, 1), (7, 1), (7, 1)], ()),
    ]:
        assert find_suspects(standings(*earlier), standings(*later))[1] == guilty
    waiting = [Standing(r, 7, 4, "here", waits=r != 1) for r in range(3)]
    assert find_suspects(standings(*earlier), waiting)[1] == (1,)


def test_a_loop_that_beats_is_left_alone_and_one_that_never_began_too(tmp_path):
    with HangWatchdog(2.0, run_dir=tmp_path) as busy, HangWatchdog(2.0, run_dir=tmp_path) as new:
        for step in range(30):
            busy.beat(step)
            time.sleep(0.1)
        assert busy.report is None
        assert new.report is None
    assert not list(tmp_path.iterdir())


def test_a_single_process_hears_of_its_own_hang(tmp_path):
    heard = []
    with HangWatchdog(0.2, run_dir=tmp_path, on_hang=heard.append) as watchdog:
        watchdog.beat(3)
        until = time.monotonic() + 300
        while not heard and time.monotonic() < until:
            time.sleep(0.01)
    assert heard[0].noticed_by == 0
    assert heard[0].seconds >= 0.2
    assert heard[0].standings[0].step == 3
    assert "test_a_single_process_hears" in (tmp_path / "hang.rank0.txt").read_text()


def test_a_timeout_that_is_not_positive_is_refused():
    with pytest.raises(ValueError, match="timeout_seconds: expected more than 0, got 0"):
        HangWatchdog(0)


class Pausing:
    """Threads that stand still until the block is left."""

    def __init__(self, count=1):
        self.gate, self.ready = threading.Event(), threading.Semaphore(0)
        self.threads = [threading.Thread(target=self.pause) for _ in range(count)]

    def pause(self):
        self.ready.release()
        self.gate.wait()

    def __enter__(self):
        for thread in self.threads:
            thread.start()
            self.ready.acquire()
        return self.threads

    def __exit__(self, *_):
        self.gate.set()
        for thread in self.threads:
            thread.join()


def test_the_line_of_another_thread_is_found_and_a_thread_that_has_ended_is_not():
    with Pausing() as (thread,):
        until = time.monotonic() + 60
        while "in wait" not in where_is(thread.ident)[0] and time.monotonic() < until:
            time.sleep(0.01)
        at, waits = where_is(thread.ident)
        ident = thread.ident
    assert at.rpartition(":")[0] == threading.__file__
    assert not waits
    assert where_is(ident) == ("the end of the thread", False)


def test_a_thread_beyond_those_that_can_be_listed_is_not_taken_for_ended():
    with Pausing(120):
        at, _ = where_is(threading.main_thread().ident)
    assert "the end of the thread" not in at


def test_a_stack_that_cannot_be_written_does_not_end_the_watch(monkeypatch):
    def full(*args, **kwargs):
        raise OSError("no space left on device")

    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    assert where_is(threading.get_ident()) == ("a place that cannot be read", False)
