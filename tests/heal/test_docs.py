import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def load():
    spec = importlib.util.spec_from_file_location("update", ROOT / "docs" / "update_healing.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_tables_of_the_page_are_current():
    update = load()
    page = update.PAGE.read_text()
    assert update.updated(page) == page, "run: python docs/update_healing.py"


def test_a_page_without_a_place_for_a_table_is_an_error():
    with pytest.raises(SystemExit, match="no place for the table of settings"):
        load().updated("# Healing\n")


def test_every_setting_cause_and_code_is_on_the_page():
    update = load()
    page = update.PAGE.read_text()
    for table in update.TABLES.values():
        assert table() in page
