import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def load():
    spec = importlib.util.spec_from_file_location("update", ROOT / "docs" / "update_healing.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("page", list(load().TABLES), ids=lambda page: page.name)
def test_the_tables_of_the_page_are_current(page):
    update = load()
    text = page.read_text()
    assert update.updated(page, text) == text, "run: python docs/update_healing.py"
    assert all(table() in text for table in update.TABLES[page].values())


def test_a_page_without_a_place_for_a_table_is_an_error():
    update = load()
    with pytest.raises(SystemExit, match="no place for the table of causes"):
        update.updated(update.HEALING, "# Healing\n")
