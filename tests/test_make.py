"""The commands of the Makefile: a worker that crashes fails the run, and nothing waits for it."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]

CRASHES = """
import os, time

def test_one():
    time.sleep(0.2)

def test_crash():
    os._exit(49)

def test_three():
    pass
"""
PASSES = """
import time

def test_one():
    time.sleep(0.3)

def test_two():
    time.sleep(0.3)
"""


def test_a_worker_that_crashes_fails_the_run_and_does_not_hang_it(tmp_path):
    (tmp_path / "test_a.py").write_text(CRASHES)
    for name in "bcde":
        (tmp_path / f"test_{name}.py").write_text(PASSES)
    words = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options_of_make_test()]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode in (1, 3)  # 3: xdist fails while it stops the other worker
    assert "crashed while running 'test_a.py::test_crash'" in done.stdout


def options_of_make_test():
    """What ``make test`` gives to pytest."""
    line = re.search(
        r"^test:.*\n\t.*-m pytest (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE
    )
    return shlex.split(line.group(1).replace("$(WORKERS)", "2"))
