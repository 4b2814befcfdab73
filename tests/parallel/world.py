"""Runs every check of ``tests/parallel`` in real gloo processes, one start of a world for all.

Starting a world costs seconds, a check milliseconds. So ``torchrun`` starts each world once, its
ranks walk through the checks in the same order, and pytest reports what they wrote down.
"""

import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
SECONDS = 1200  # for a whole world, on a busy machine; a hang must not outlive this


@functools.cache
def run_world(size: int, *names: str) -> list[dict[str, dict]]:
    """Return for every rank what became of each check: ``{"error": str | None, "seconds": ...}``.

    Args:
        size: how many ranks.
        names: which checks; all of the quick ones if none is given.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc-per-node={size}", "-m", "tests.parallel.worker", folder, *names]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        log = Path(folder) / "log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                process.wait(SECONDS)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        reports = []
        for rank in range(size):
            path = Path(folder) / f"rank{rank}.json"
            reports.append(json.loads(path.read_text()) if path.exists() else {})
        reports[0].setdefault("log", {"error": log.read_text(errors="replace")[-8000:]})
        return reports
