"""The gallery: its runs show what its page says, and its images are there and small."""

import re

import pytest

from heal.report.collect import read_run
from heal.report.data import summarise, worst_tensors
from tools.make_gallery import IMAGES, RUNS, SHOTS, train, watch_screen

PAGE = (IMAGES.parent / "gallery.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gallery")
    for name, (damage, faults) in RUNS.items():
        train(folder / name, damage, faults)
    return folder


def test_every_image_is_shown_and_small():
    shown = set(re.findall(r"images/([\w-]+)\.png", PAGE))
    assert shown == {name for name, *_ in SHOTS}
    assert all((IMAGES / f"{name}.png").stat().st_size < 100_000 for name in shown)


def test_the_damaged_run_is_healed_and_names_the_weight_that_was_damaged(folder):
    report = read_run(folder / "damaged")
    assert "1 incident: 1 healed." in summarise(report)["sentences"]
    assert "1 experiment: 1 showed damaged weights." in summarise(report)["sentences"]
    assert [entry["tensor"] for entry in worst_tensors(report)] == ["2.weight"]
    assert "\nloss \u2588" in watch_screen(folder / "damaged")


def test_the_other_runs_are_as_the_page_says(folder):
    skipped, healthy = (summarise(read_run(folder / name)) for name in ("skipped", "healthy"))
    assert "2 incidents: 2 skipped on the device." in skipped["sentences"]
    assert "No incidents: healing changed nothing." in healthy["sentences"]
