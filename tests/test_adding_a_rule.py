"""The rule on docs/rules.md, added to a copy of the sources as CONTRIBUTING.md says.

The extension of the copy is the one that is installed here, which does not know the rule: so this
is also what happens to a rule that was merged for some backends only.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PATCH = ROOT / "docs/moving_average.patch"
MOST_SOURCES = 7


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """A copy of the sources with the rule in it."""
    copy = tmp_path_factory.mktemp("rule")
    for name in ("zclip", "csrc", "tests", "heal", "CONTRIBUTING.md", "pyproject.toml"):
        path, ignored = ROOT / name, shutil.ignore_patterns("__pycache__", "build")
        if path.is_dir():
            shutil.copytree(path, copy / name, ignore=ignored)
        else:
            shutil.copy(path, copy)
    subprocess.run(["git", "apply", PATCH], cwd=copy, check=True)
    return copy


def run_tests(sources, *words):
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *words],
        cwd=sources,
        env={**os.environ, "PYTHONPATH": str(sources)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_rule_touches_seven_sources_and_a_test():
    touched = re.findall(r"^\+\+\+ b/(.+)$", PATCH.read_text(), re.MULTILINE)
    assert len([path for path in touched if not path.startswith("tests/")]) <= MOST_SOURCES


def test_its_tests_pass_where_the_compiled_code_does_not_know_it(sources):
    files = ["tests/test_moving_average_.py", "tests/test_rules_agree.py", "tests/test_layers.py"]
    chosen = "(moving_average and not simt) or fake or number_the_rules"
    done = run_tests(sources, *files, "-k", chosen)
    assert done.returncode == 0, done.stdout[-3000:]
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) > 15


@pytest.mark.slow
def test_its_tests_pass_on_the_kernels_that_have_it(sources):
    files = ["tests/test_moving_average_.py", "tests/test_rules_agree.py"]
    done = run_tests(sources, *files, "-k", "moving_average and simt")
    assert done.returncode == 0, done.stdout[-3000:]
