"""CONTRIBUTING.md, followed word by word: a detector, an action and an integration."""

import os
import re
import shutil
import subprocess
import sys
from operator import attrgetter
from pathlib import Path

import pytest
import torch

from heal import Healer

ROOT = Path(__file__).parent.parent
COPIED = ("zclip", "csrc", "heal", "benchmarks", "tests", "docs", "tools", "pyproject.toml")
TEXT = (ROOT / "CONTRIBUTING.md").read_text()


def copy_with(patch, folder):
    """Copy the sources, and add what a patch adds."""
    for name in COPIED:
        path, ignored = ROOT / name, shutil.ignore_patterns("__pycache__", "build")
        if path.is_dir():
            shutil.copytree(path, folder / name, ignore=ignored)
        else:
            shutil.copy(path, folder)
    command = ["git", "apply", "-C1", ROOT / "docs" / patch]
    subprocess.run(command, cwd=folder, check=True)
    return folder


def run(folder, *words):
    return subprocess.run(
        [sys.executable, "-m", *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )


def touched_by(patch):
    return re.findall(r"^\+\+\+ b/(.+)$", (ROOT / "docs" / patch).read_text(), re.MULTILINE)


def section(title):
    return TEXT.split(f"## {title}\n")[1].split("\n## ")[0]


@pytest.mark.parametrize(
    ("title", "patch"),
    [("Adding a detector", "vanishing_gradients.patch"), ("Adding an action", "cap_lr.patch")],
)
def test_the_section_names_every_file_that_its_example_touches(title, patch):
    said = section(title)
    assert patch in said
    for path in touched_by(patch):
        folder = Path(path).parent.as_posix()
        assert path in said or f"{folder}/x.py" in said or f"{folder}/test_x.py" in said, path


@pytest.fixture(scope="module")
def with_detector(tmp_path_factory):
    return copy_with("vanishing_gradients.patch", tmp_path_factory.mktemp("detector"))


def test_a_detector_that_is_left_out_of_the_documentation_is_named(with_detector):
    done = run(with_detector, "pytest", "-q", "tests/heal/detectors/test_constants.py")
    assert "norms far below the first" in done.stdout


def test_a_detector_that_was_added_passes_its_tests_and_finds_its_symptom(with_detector):
    done = run(with_detector, "benchmarks.suspicions", "--seeds", "1", "--write")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "vanishing_gradients" in (with_detector / "docs/experiments.md").read_text()
    files = ("vanishing", "constants")
    done = run(
        with_detector, "pytest", "-q", *(f"tests/heal/detectors/test_{name}.py" for name in files)
    )
    assert done.returncode == 0, done.stdout[-3000:]


def test_an_action_that_was_added_passes_the_tests_of_all(tmp_path):
    folder = copy_with("cap_lr.patch", tmp_path)
    files = re.search(r"`pytest (tests/heal/test_actions[^`]+)`", section("Adding an action"))[1]
    done = run(folder, "pytest", "-q", *files.split())
    assert done.returncode == 0, done.stdout[-3000:]


def test_every_name_that_an_integration_is_told_to_call_exists():
    model = torch.nn.Linear(2, 1)
    healer = Healer(model, torch.optim.AdamW(model.parameters()))
    paths = set(re.findall(r"healer\.([\w.]+\w)", section("Adding an integration")))
    assert len(paths) > 20
    for path in paths:
        assert callable(attrgetter(path)(healer)) or path == "experiment.is_due", path


def test_the_example_of_an_integration_runs():
    exec(re.search(r"```python\n(.*?)```", section("Adding an integration"), re.DOTALL)[1], {})
