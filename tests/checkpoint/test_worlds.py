"""Several ranks save and load together: real processes over gloo, started once for all checks."""

import functools
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CHECKS = {
    "resharding": 4,
    "fallback": 2,
    "replicas": 2,
    "failures": 2,
    "thread": 2,
    "healer": 2,
    "recompute": 2,
}


@functools.cache
def world(size):
    """Run all checks of a world; return their names as they succeeded, and what was said."""
    names = [name for name, wanted in CHECKS.items() if wanted == size]
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "tests.checkpoint.worker",
                    str(r),
                    str(size),
                    folder,
                    *names,
                ],
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for r in range(size)
        ]
        try:
            said = [process.communicate(timeout=240) for process in ranks]
        finally:
            for process in ranks:
                process.kill()
    return said[0][0].split(), "\n".join(errors for _, errors in said)


@pytest.mark.parametrize("check", CHECKS)
def test_ranks_agree_on(check):
    succeeded, errors = world(CHECKS[check])
    assert check in succeeded, errors[-6000:]
