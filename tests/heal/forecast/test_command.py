"""`python -m tools.forecast` from an empty folder: corpora are made, kept apart, and judged."""

import argparse
import json

import numpy as np
import pytest

from heal.lab.forecast.forecast_watch import SHIPPED, from_json, shipped
from tools.forecast import command, corpus, train
from tools.forecast.model_file import read

pytest.importorskip("sklearn")


@pytest.fixture
def small(monkeypatch):
    """Two architectures, one optimizer, short runs, few passes."""
    groups = corpus.groups

    def few(**counts):
        two, one = ["linear", "experts"], ["momentum"]  # one of them is of the exam
        return groups(**counts, steps=240, architectures=two, optimizers=one)

    monkeypatch.setattr(corpus, "groups", few)
    monkeypatch.setattr(corpus, "critical_lr", lambda *of_what: 0.3)
    monkeypatch.setattr(command, "QUICK", {"healthy": 140, "slow": 20, "instant": 1})
    monkeypatch.setattr(command, "FULL", {"healthy": 4, "slow": 1, "instant": 1})
    parts = (("architecture", "network", 2), ("run", "logistic", 2))
    monkeypatch.setattr(command, "PARTS", parts)
    monkeypatch.setattr(train, "POSITIVES", 2_000)
    monkeypatch.setattr(train, "NEGATIVES", 4_000)
    monkeypatch.setattr(train, "PASSES", 3)
    monkeypatch.setattr(train, "FEW_PASSES", 1)


def run(*words):
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return command.run(parser.parse_args([*words, "--processes", "1"]))


def test_a_model_is_trained_from_nothing_judged_as_it_is_and_told_so_in_its_card(
    small, tmp_path, capsys
):
    model, results = tmp_path / "model.json", tmp_path / "results.json"
    where = ["--quick", "--folder", str(tmp_path / "build")]
    assert run("train", *where, "--output", str(model)) == 0
    made = read(model)
    assert made.card["corpus"]["seed"] == command.CORPUS_SEED
    assert run("evaluate", *where, "--model", str(model), "--output", str(results), "--card") == 0
    told = json.loads(results.read_text())
    assert "coverage wanted 80 %" in capsys.readouterr().out
    assert set(told) >= {"network by architecture", "logistic by run", "exam", "fresh"}
    assert list(told["exam"]["folds"]) == ["experts"]
    assert told["fresh"]["runs"] == 2 * 161
    assert told["fresh"]["without_weight_norms"]["healthy_steps"] > 0
    assert told["alike"]["by_share"]["0.2"]["healthy_runs"] > 200
    after = read(model)
    assert after.layers == made.layers
    total = told["network by architecture"]["total"]
    assert after.card["metrics"]["held_out_architectures"]["detection"] == total["detection"]
    kept = sorted(path.name for path in (tmp_path / "build").iterdir())
    assert kept == [f"forecast-{seed}-140-20-1.npz" for seed in (2, 3, 5)]


def test_a_quick_corpus_is_not_taken_for_the_full_one(small, tmp_path, monkeypatch):
    monkeypatch.setattr(command, "QUICK", {"healthy": 3, "slow": 1, "instant": 0})
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    words = ["train", "--folder", str(tmp_path), "--processes", "1"]
    quick = parser.parse_args([*words, "--quick"])
    few = command.corpus_of(quick, 2, command.FULL)
    full = command.corpus_of(parser.parse_args(words), 2, command.FULL)
    assert (len(few), len(full)) == (2 * 4, 2 * 6)
    again = command.corpus_of(quick, 2, command.FULL)
    assert np.array_equal(again.records, few.records, equal_nan=True)
    # Other runs under a name that promises these.
    corpus.save(few, tmp_path / "forecast-2-4-1-1.npz")
    with pytest.raises(ValueError, match="holds 8 runs that are not the 12 asked for"):
        command.corpus_of(parser.parse_args(words), 2, command.FULL)


def test_a_corpus_that_cannot_be_read_is_told(small, tmp_path, capsys):
    (tmp_path / "forecast-2-4-1-1.npz").write_bytes(b"nothing")
    assert run("evaluate", "--folder", str(tmp_path)) == 1
    assert "forecast:" in capsys.readouterr().err


def test_a_model_that_cannot_be_read_is_told_before_the_work(tmp_path, capsys):
    missing = str(tmp_path / "none.json")
    assert run("evaluate", "--folder", str(tmp_path / "build"), "--model", missing) == 1
    assert "none.json" in capsys.readouterr().err
    assert not (tmp_path / "build").exists()


def test_the_shipped_model_is_what_is_judged_unless_told():
    assert from_json(json.loads(SHIPPED.read_text(encoding="utf-8"))) == shipped()
