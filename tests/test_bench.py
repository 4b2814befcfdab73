"""The benchmark measures what it says, checks it, and says so when the machine is too busy."""

import itertools
import json

import pytest
import torch

from zclip.bench import cases, cli, measure, results, shapes
from zclip.bench.cases import OURS, Case


@pytest.fixture
def small_models(monkeypatch):
    """The same cases on shapes that fit into a test."""
    tiny = {name: [(30, 10)] * 5 for name in shapes.MODELS}
    monkeypatch.setattr(cases, "MODELS", tiny)


@pytest.mark.parametrize("name", cases.CASES)
def test_every_case_runs_and_is_right(small_models, name):
    case = cases.CASES[name]()
    case.check()
    assert OURS in case.contenders
    assert len(case.contenders) > 1
    assert case.errors.get(OURS, 0.0) < 1e-6


def test_the_shapes_are_those_of_the_models():
    assert shapes.elements(shapes.MODELS["gpt2"]) == 124_439_808
    assert shapes.elements(shapes.MODELS["98M in 150 tensors"]) == 98_100_000


def test_clipping_every_time_really_clips_every_time(small_models):
    case = cases.CASES["clipped"]()
    norms = [float(case.contenders[n]()) for n in (OURS, "torch") * 20]
    # Each call finds the norm that the one before it left: always above the next limit.
    assert all(after < before for before, after in itertools.pairwise(norms[1:]))


def test_contenders_take_turns():
    order = []
    contenders = {name: lambda name=name: order.append(name) for name in "ab"}
    timings = measure.interleaved(contenders, rounds=4, seconds=60.0)
    assert order == ["a", "b", *"ab", *"ba", *"ab", *"ba"]
    assert timings["a"].rounds == 4


def test_a_time_limit_ends_the_rounds():
    timings = measure.interleaved({"a": lambda: None}, rounds=10_000, seconds=0.0)
    assert timings["a"].rounds == measure.FEWEST_ROUNDS


def timing(milliseconds, spread=0.0):
    return measure.Timing(milliseconds / 1e3, spread, 9)


def result_of(timings, load=0.0):
    case = Case("work", 2.0, 4_000_000, 10, {})
    return results.Result.of(case, timings, load)


def test_the_ratio_is_against_the_fastest_rival():
    result = result_of({OURS: timing(1.0), "slow": timing(9.0), "fast": timing(3.0)})
    assert (result.rival, result.ratio) == ("fast", pytest.approx(3.0))
    assert result.gigabytes_per_second == pytest.approx(4.0)
    assert result.microseconds_per_tensor == pytest.approx(100.0)


@pytest.mark.parametrize(
    ("spread", "load", "noise"), [(0.1, 0.5, False), (0.9, 0.5, True), (0.1, 1e6, True)]
)
def test_a_noisy_run_is_not_called_a_result(spread, load, noise):
    result = result_of({OURS: timing(1.0, spread), "rival": timing(3.0)}, load)
    assert result.is_noise == noise
    assert ("?" in " ".join(result.cells())) == noise


def test_the_command_prints_a_table_and_writes_json(small_models, tmp_path, capsys):
    cli.main(["--quick", "--only", "unclipped", "flags", "--save", str(tmp_path)])
    printed = capsys.readouterr().out
    assert "unclipped" in printed
    assert "…" not in printed, "cut off in a terminal of 80 columns"
    document = json.loads((tmp_path / "bench.json").read_text())
    assert [r["case"] for r in document["results"]] == [
        "98M float32, unclipped",
        "98M float32, NaN/Inf flags",
    ]
    assert (tmp_path / "bench.md").read_text().startswith("| work |")


def test_interrupting_keeps_what_was_measured(small_models, tmp_path, monkeypatch, capsys):
    def interrupt():
        raise KeyboardInterrupt

    monkeypatch.setitem(cases.CASES, "flags", interrupt)
    cli.main(["--quick", "--only", "unclipped", "flags", "--json", str(tmp_path / "x.json")])
    assert "Interrupted" in capsys.readouterr().out
    assert len(json.loads((tmp_path / "x.json").read_text())["results"]) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "frobnicate"], "invalid choice: 'frobnicate'"),
        (["--rounds", "1"], "--rounds must be at least 2, got 1"),
        (["--threads", "0"], "--threads must be at least 1, got 0"),
    ],
)
def test_a_wrong_argument_gives_one_clear_line(arguments, message, capsys):
    with pytest.raises(SystemExit):
        cli.main(arguments)
    assert message in capsys.readouterr().err


def test_threads_are_set_for_the_run(small_models, monkeypatch):
    seen = []
    monkeypatch.setattr(torch, "set_num_threads", seen.append)
    cli.main(["--quick", "--only", "small", "--threads", "1"])
    assert seen == [1]
