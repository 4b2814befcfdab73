"""The table of docs/trainers.md: some of its cells in every run, all of them in `make soak`."""

import importlib.util
from pathlib import Path

import pytest

from tests.heal.trainers import matrix, tiny

ROOT = Path(__file__).parents[3]
QUICK_ONES = {("Trainer", "divergence")}
CELLS = [
    (name, failure)
    if (name, failure) in QUICK_ONES
    else pytest.param(name, failure, marks=pytest.mark.slow)
    for name in tiny.TRAINERS
    for failure in matrix.FAILURES
]


@pytest.mark.parametrize(("name", "failure"), CELLS)
def test_a_failure_is_found_and_healed(name, failure, tmp_path):
    cell = matrix.run(name, failure, tmp_path)
    assert (cell.detected, cell.healed) == (True, True), cell


def load():
    spec = importlib.util.spec_from_file_location("update", ROOT / "docs" / "update_trainers.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_has_a_row_for_every_trainer_and_a_column_for_every_failure():
    page = load().PAGE.read_text()
    _, _, rest = page.partition(load().BEGIN)
    table = rest.partition(load().END)[0]
    head = next(line for line in table.splitlines() if line.startswith("| trainer"))
    assert all(f"| {failure} " in head for failure in matrix.FAILURES)
    assert all(f"\n| {name} |" in table for name in [*tiny.TRAINERS, "PPO"])


def test_a_page_without_a_place_for_the_table_is_an_error():
    with pytest.raises(SystemExit, match="no place for the table"):
        load().updated("# Trainers\n", "| |")
