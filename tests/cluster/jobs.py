"""Starts real ranks, sends them real signals, and never waits for ever."""

import contextlib
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
SECONDS = 300  # for a whole job, on a busy machine; a hang must not outlive this


def environment(**more):
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **more}


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch._dynamo", "tests.cluster.trainer", "tests.cluster.healed"])


def _run(log, told, function, folder, arguments):
    """What a rank does: it has a log, an environment and a session of its own."""
    os.setsid()
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.environ.update(told)
    function(folder, *arguments)


class Job:
    """Ranks that all call ``function(folder, *arguments)``, forked off a process with torch loaded.

    Use it as a context: whatever happens, no rank survives the block.
    """

    def __init__(self, folder, size, function, *arguments):
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        port = str(free_port())
        self.ranks = []
        for rank in range(size):
            told = {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank)}
            told |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
            log = str(self.folder / f"log{rank}")
            given = (log, told, function, str(folder), arguments)
            self.ranks.append(_context.Process(target=_run, args=given))
            self.ranks[-1].start()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        for process in self.ranks:
            process.kill()
            process.join()

    def wait(self, seconds=SECONDS):
        """The exit codes of all ranks; negative numbers are signals."""
        until = time.monotonic() + seconds
        for process in self.ranks:
            process.join(max(0.1, until - time.monotonic()))
            assert process.exitcode is not None, f"a rank hangs:\n{self.logs()}"
        return [process.exitcode for process in self.ranks]

    def is_alive(self, rank):
        return self.ranks[rank].is_alive()

    def send(self, rank, number):
        os.kill(self.ranks[rank].pid, number)

    def logs(self):
        texts = [path.read_text(errors="replace") for path in sorted(self.folder.glob("log*"))]
        return "\n---\n".join(text[-4000:] for text in texts)

    def wait_for(self, condition, seconds=SECONDS):
        """Wait until ``condition()`` is true, and return what it returned."""
        until = time.monotonic() + seconds
        while not (result := condition()):
            assert time.monotonic() < until, f"waited in vain:\n{self.logs()}"
            assert all(p.exitcode in (None, 0) for p in self.ranks), self.logs()
            time.sleep(0.01)
        return result

    def steps(self):
        """The last step that each rank wrote down."""
        return [read_step(self.folder, rank) for rank in range(len(self.ranks))]


def read_step(folder, rank):
    try:
        return int((Path(folder) / f"step{rank}").read_text() or -1)
    except (FileNotFoundError, ValueError):
        return -1


def read_json(path):
    return json.loads(Path(path).read_text())


def torchrun(folder, size, module, *arguments, restarts=3):
    """Start torchrun in a session of its own; the caller ends it."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={size}", f"--max-restarts={restarts}", "--monitor-interval=0.1"]
    return subprocess.Popen(
        [*command, "-m", module, str(folder), *map(str, arguments)],
        cwd=ROOT,
        env=environment(),
        stdout=(folder / "log").open("ab"),
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def end(process):
    """End a launcher and all that it started."""
    for pid in [*children(process.pid), process.pid]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


def children(pid):
    """The processes that one started, by Linux's own account."""
    try:
        return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return []
