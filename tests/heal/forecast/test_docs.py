import importlib.util
from pathlib import Path

import pytest

from heal.forecast.names import NAMES

ROOT = Path(__file__).parents[3]


def load():
    path = ROOT / "docs" / "update_forecast.py"
    spec = importlib.util.spec_from_file_location("update_forecast", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["forecast.md", "probes.md"])
def test_the_tables_of_the_page_are_current(name):
    update = load()
    page = (ROOT / "docs" / name).read_text(encoding="utf-8")
    assert update.updated(name, page) == page, "run: python docs/update_forecast.py"


def test_every_feature_is_on_the_page():
    page = (ROOT / "docs" / "forecast.md").read_text(encoding="utf-8")
    assert all(f"| `{name}` |" in page for name in NAMES)


def test_a_page_without_a_place_for_a_table_is_an_error():
    with pytest.raises(SystemExit, match="no place for the table of features"):
        load().updated("forecast.md", "# Forecast\n")
