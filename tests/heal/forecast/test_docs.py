import importlib.util
from pathlib import Path

import pytest

from heal.lab.forecast.features import NAMES

ROOT = Path(__file__).parents[3]


def load():
    path = ROOT / "docs" / "update_forecast.py"
    spec = importlib.util.spec_from_file_location("update_forecast", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


FILLED = ["docs/forecast.md", "docs/probes.md", "heal/lab/forecast/CARD.md"]


@pytest.mark.parametrize("name", FILLED)
def test_the_tables_of_the_page_are_current(name):
    update = load()
    page = (ROOT / name).read_text(encoding="utf-8")
    assert "Not measured yet" not in page
    assert update.updated(name, page) == page, "run: python docs/update_forecast.py"


def test_every_feature_is_on_the_page():
    page = (ROOT / "docs" / "forecast.md").read_text(encoding="utf-8")
    assert all(f"| `{name}` |" in page for name in NAMES)


def test_a_page_without_a_place_for_a_table_is_an_error():
    with pytest.raises(SystemExit, match="no place for the table of features"):
        load().updated("docs/forecast.md", "# Forecast\n")


def test_the_sentences_count_what_the_table_shows():
    update = load()
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in update.told.architectures_table().splitlines()[2:]
    ]
    detections = [float(row[2][:-2]) for row in rows if row[2] != "-"]
    # To a tenth: a share of 94.96 % is shown as 95.0 and counted as below.
    sure = sum(share < 94.95 for share in detections)
    doubtful = sum(94.95 <= share <= 95.0 for share in detections)
    sentence = update.told.architectures_sentence()
    counted = int(sentence.split(" of ")[0].split()[-1])
    assert sure <= counted <= sure + doubtful
    loud = sum(float(row[3]) > 1.005 for row in rows)
    assert f". {loud} of {len(rows)} have more than one false" in sentence
