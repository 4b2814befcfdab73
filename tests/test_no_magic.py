"""The packages leave the user's process alone: what they must know, they are given."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAGIC = {
    "frames": r"_getframe|_current_frames|currentframe|\bf_back\b|\bf_locals\b|\bf_lasti\b",
    "bytecode": r"^\s*(import|from) dis\b|co_code\b",
    "who refers to what": r"get_referrers|get_objects\(",
    "another class for an object": r"__class__\s*=[^=]",
}
HOOKS = r"signal\.signal\(|\.excepthook\s*=[^=]|settrace\(|setprofile\("
MAY_HOOK = {
    "heal/exits.py",  # inside of with, run and train
    "heal/cluster/shutdown.py",  # what these install, and what a user enters by hand
    "zclip/bench/cli.py",  # a program of its own
}


def lines_with(pattern):
    """Every line of the packages that matches, with its file."""
    for package in ("heal", "zclip"):
        for path in sorted((ROOT / package).rglob("*.py")):
            for number, line in enumerate(path.read_text().splitlines(), 1):
                if re.search(pattern, line):
                    yield path.relative_to(ROOT).as_posix(), f"{number}: {line.strip()}"


@pytest.mark.parametrize("kind", MAGIC)
def test_no_package_looks_into(kind):
    assert list(lines_with(MAGIC[kind])) == []


def test_signals_and_exception_hooks_are_set_in_few_places():
    assert {file for file, _ in lines_with(HOOKS)} == MAY_HOOK


@pytest.mark.parametrize(
    ("kind", "line"),
    [
        ("frames", "asking = sys._getframe(2)"),
        ("frames", "frames = sys._current_frames()"),
        ("bytecode", "import dis"),
        ("who refers to what", "holders = gc.get_referrers(optimizer)"),
        ("another class for an object", "block.__class__ = Other"),
    ],
)
def test_the_patterns_find_what_they_are_for(kind, line):
    assert re.search(MAGIC[kind], line)
