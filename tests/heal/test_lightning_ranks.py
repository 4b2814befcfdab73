"""Healing under Lightning's DDP, in two real processes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow  # three processes that import Lightning
def test_two_ranks_heal_alike(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node=2", "-m", "tests.heal.lightning_ranks"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=400
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("both ranks agree") == 2
