"""A signal to one rank stops all of them after the same step, and nothing hangs."""

import contextlib
import ctypes
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from heal.cluster import ShutdownHandler
from heal.exit_codes import ExitCode
from tests.cluster import trainer
from tests.cluster.jobs import Job

FOR_EVER = 10_000_000  # steps


@pytest.fixture
def sigusr1():
    """Whatever a test does to this signal is undone."""
    before = signal.getsignal(signal.SIGUSR1)
    yield
    signal.signal(signal.SIGUSR1, before)


def stop_one_rank(folder, seed):
    """Signal a random rank of two or three at a random step; return when the last one left."""
    chance = random.Random(seed)
    size = chance.choice([2, 3])
    number = chance.choice([signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
    with Job(folder, size, trainer.main, FOR_EVER, 0.005) as job:
        after = chance.randrange(1, 30)
        job.wait_for(lambda: min(job.steps()) >= after)
        time.sleep(chance.random() * 0.02)
        job.send(chance.randrange(size), number)
        codes = job.wait()
        stopped = [(job.folder / f"stopped{rank}").read_text() for rank in range(size)]
        assert codes == [ExitCode.PREEMPTED] * size, job.logs()
    assert len(set(stopped)) == 1, "the ranks stopped after different steps or with other weights"
    step = int(stopped[0].split()[0])
    assert (folder / f"step-{step + 1:06d}" / "COMMIT").exists()


@pytest.mark.parametrize("seed", range(3))
def test_a_signal_to_one_rank_stops_all_after_the_same_step(tmp_path, seed):
    stop_one_rank(tmp_path, seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 200))
def test_a_signal_to_one_rank_stops_all_after_the_same_step_a_hundred_times(tmp_path, seed):
    stop_one_rank(tmp_path, seed)


def test_a_signal_sets_a_flag_and_nothing_else(sigusr1):
    with ShutdownHandler(signals=["SIGUSR1"]) as shutdown:
        assert not shutdown.should_stop()
        os.kill(os.getpid(), signal.SIGUSR1)
        assert shutdown.signal == signal.SIGUSR1
        assert shutdown.should_stop()


def test_the_handler_from_before_is_called_too_and_comes_back(sigusr1):
    heard = []

    def before(number, frame):
        heard.append(number)

    signal.signal(signal.SIGUSR1, before)
    with ShutdownHandler(signals=["SIGUSR1"]) as shutdown:
        os.kill(os.getpid(), signal.SIGUSR1)
        assert heard == [signal.SIGUSR1]
        assert shutdown.should_stop()
    assert signal.getsignal(signal.SIGUSR1) is before


def test_a_handler_that_came_later_is_left_in_place(sigusr1):
    def later(number, frame):
        pass

    with ShutdownHandler(signals=["SIGUSR1"]):
        signal.signal(signal.SIGUSR1, later)
    assert signal.getsignal(signal.SIGUSR1) is later


def test_the_healer_is_told(sigusr1):
    class Healer:
        asked = 0

        def request_stop(self):
            self.asked += 1

    healer = Healer()
    with ShutdownHandler(healer, signals=["SIGUSR1"]):
        os.kill(os.getpid(), signal.SIGUSR1)
    assert healer.asked == 1


def test_an_event_loop_that_listened_before_still_hears(sigusr1):
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    before = signal.set_wakeup_fd(writer)
    try:
        with ShutdownHandler(signals=["SIGUSR1"]):
            os.kill(os.getpid(), signal.SIGUSR1)
            assert os.read(reader, 1) == bytes([signal.SIGUSR1])
    finally:
        assert signal.set_wakeup_fd(before) == writer
        os.close(reader)
        os.close(writer)


@pytest.mark.parametrize("first", [0, 1])
def test_handlers_may_be_left_in_any_order(sigusr1, first):
    before = signal.getsignal(signal.SIGUSR1)
    handlers = [ShutdownHandler(signals=["SIGUSR1"], shutdown_timeout_sec=0) for _ in range(2)]
    for handler in handlers:
        handler.install()
    handlers[first].finish()
    os.kill(os.getpid(), signal.SIGUSR1)
    assert [handler.signal for handler in handlers] == [0, signal.SIGUSR1][:: 1 - 2 * first]
    handlers[1 - first].finish()
    assert signal.getsignal(signal.SIGUSR1) == before
    assert signal.set_wakeup_fd(-1) == -1


def test_a_later_handler_that_calls_ours_after_the_block_calls_the_one_from_before(sigusr1):
    seen = []
    signal.signal(signal.SIGUSR1, lambda number, frame: seen.append("before"))
    with ShutdownHandler(signals=["SIGUSR1"]) as shutdown:
        ours = signal.getsignal(signal.SIGUSR1)
        signal.signal(signal.SIGUSR1, lambda number, frame: ours(number, frame))
    os.kill(os.getpid(), signal.SIGUSR1)
    assert (seen, shutdown.signal) == (["before"], 0)


def test_an_event_loop_that_came_later_keeps_its_descriptor_and_may_put_ours_back(sigusr1):
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with ShutdownHandler(signals=["SIGUSR1"]):
        ours = signal.set_wakeup_fd(writer)
    assert signal.set_wakeup_fd(ours) == writer
    with ShutdownHandler(signals=["SIGUSR1"]) as again:
        os.kill(os.getpid(), signal.SIGUSR1)
        assert again.should_stop()
    signal.set_wakeup_fd(-1)
    for descriptor in (reader, writer):
        os.close(descriptor)
    os.close(ours)  # ends the thread that passed signals on


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"shutdown_timeout_sec": -1}, "shutdown_timeout_sec: expected 0"),
        ({"shutdown_timeout_sec": float("nan")}, "shutdown_timeout_sec: .* got nan"),
        ({"signals": ["SIGNONSENSE"]}, "signals: .* got 'SIGNONSENSE'"),
    ],
)
def test_wrong_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        ShutdownHandler(**arguments)


def lock_up(folder, seconds):
    """Never come back from C, whatever the signal, as in a collective that hangs."""
    with ShutdownHandler(shutdown_timeout_sec=seconds, run_dir=folder):
        Path(folder, "ready").touch()
        mutex = ctypes.create_string_buffer(64)  # zeros: a mutex that nobody holds yet
        for _ in range(2):
            ctypes.CDLL(None).pthread_mutex_lock(mutex)


@pytest.fixture
def stuck(tmp_path):
    """Starts a rank whose main thread is stuck, and returns its job."""
    with contextlib.ExitStack() as jobs:

        def start(seconds):
            job = jobs.enter_context(Job(tmp_path, 1, lock_up, seconds))
            job.wait_for(lambda: (tmp_path / "ready").exists())
            return job

        yield start


def test_a_rank_that_does_not_stop_in_time_says_where_it_is_and_exits(stuck, tmp_path):
    job = stuck(0.5)
    job.send(0, signal.SIGTERM)
    assert job.wait() == [ExitCode.SHUTDOWN_TIMEOUT]
    assert "asked to stop 0.5 s ago" in job.logs()
    assert "lock_up" in (tmp_path / "shutdown.rank0.txt").read_text()


def test_a_second_signal_ends_even_a_rank_that_is_stuck(stuck):
    job = stuck(0)
    job.send(0, signal.SIGTERM)
    time.sleep(1.5)  # what comes within a second is an echo
    assert job.is_alive(0), "no deadline was set, and one signal is not two"
    job.send(0, signal.SIGUSR1)
    assert job.wait() == [128 + signal.SIGUSR1]


def test_an_echo_of_the_first_signal_does_not_end_the_save(stuck):
    job = stuck(0)
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGTERM):
        job.send(0, number)
    time.sleep(1.5)
    assert job.is_alive(0)


def test_only_the_main_thread_may_catch_signals():
    caught = []

    def enter():
        try:
            ShutdownHandler().install()
        except RuntimeError as error:
            caught.append(str(error))

    thread = threading.Thread(target=enter, name="loader")
    thread.start()
    thread.join()
    assert "'loader'" in caught[0]
    assert "main thread" in caught[0]


AFTER_THE_END = """
import os, signal, time, torch
from heal import Healer, HealingConfig
from heal.actions import HealingError
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1, fused=True)
healer = Healer(model, optimizer, config=HealingConfig(shutdown_timeout_sec=1.5))
def stop(step):
    if step == 3:
        os.kill(os.getpid(), signal.SIGTERM)
try:
    healer.run(lambda b: model(b).mean(), [torch.ones(1, 2)] * 50, 50, progress=False, on_step=stop)
except HealingError:
    time.sleep(3)
    print("still here")
"""


def run_script(folder, script):
    return subprocess.run(
        [sys.executable, "-c", script],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_a_healer_that_has_saved_all_lets_the_process_live(tmp_path):
    done = run_script(tmp_path, AFTER_THE_END)
    assert (done.returncode, done.stdout) == (0, "still here\n"), done.stderr


AFTER_THE_BLOCK = """
import os, signal, sys, time
from heal.cluster import ShutdownHandler
with ShutdownHandler(shutdown_timeout_sec=1.5) as shutdown:
    os.kill(os.getpid(), signal.SIGTERM)
    assert shutdown.should_stop()
time.sleep(3)
print("still here")
"""


def test_code_after_the_block_is_not_ended(tmp_path):
    done = run_script(tmp_path, AFTER_THE_BLOCK)
    assert (done.returncode, done.stdout) == (0, "still here\n"), done.stderr


AFTER_A_LATE_SIGNAL = """
import os, signal, time, torch
from heal import Healer, HealingConfig
from heal.actions import HealingError
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1, fused=True)
healer = Healer(model, optimizer, config=HealingConfig(shutdown_timeout_sec=1.5))
try:
    with healer:
        for step, batch in enumerate(healer.batches([torch.ones(1, 2)] * 4)):
            loss = model(batch).mean()
            loss.backward()
            healer.step(loss)
            optimizer.zero_grad()
            if step == 3:
                os.kill(os.getpid(), signal.SIGTERM)
except HealingError:
    time.sleep(3)
print("still here")
"""


def test_code_after_a_healer_that_was_closed_is_not_ended(tmp_path):
    done = run_script(tmp_path, AFTER_A_LATE_SIGNAL)
    assert (done.returncode, done.stdout) == (0, "still here\n"), done.stderr


def test_no_thread_outlives_the_block(sigusr1):
    with ShutdownHandler(signals=["SIGUSR1"]) as shutdown:
        os.kill(os.getpid(), signal.SIGUSR1)
        assert shutdown.should_stop()
        inside = threads_of_heal()
    assert {thread.name for thread in inside} == {"heal-shutdown", "heal-deadline"}
    for thread in inside:
        thread.join(60)
    assert not threads_of_heal()


def test_a_handler_that_is_entered_again_has_a_deadline_again(tmp_path):
    script = AFTER_THE_BLOCK.replace("time.sleep(3)", "with shutdown:\n    time.sleep(60)")
    script = script.replace("    assert", "    shutdown.request_stop()\n    assert")
    script = script.replace("    time.sleep(60)", "    shutdown.request_stop(); time.sleep(60)")
    assert run_script(tmp_path, script).returncode == ExitCode.SHUTDOWN_TIMEOUT


def threads_of_heal():
    return [thread for thread in threading.enumerate() if thread.name.startswith("heal-")]
