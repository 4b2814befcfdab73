"""The command: what it prints and writes, how it ends, and what it says to bad input."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch

from zclip.bench import arguments, cli, suites
from zclip.bench.catalogue import Case
from zclip.bench.run import run_case
from zclip.version import __version__

TINY = ["--shapes", "tiny", "--rounds", "3"]


def run(*words):
    """Run the command here; return its exit code."""
    try:
        cli.main(list(words))
    except SystemExit as end:
        return end.code
    return 0


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr("zclip.bench.run.LEAST_SECONDS", 0.0)
    monkeypatch.setattr("zclip.bench.shapes.ELEMENTS_IN_TENSORS", 1000)


@pytest.fixture
def standard(monkeypatch):
    """The standard run, on shapes that fit into a test."""
    monkeypatch.setattr(suites, "QUICK", [Case("clip_grad_norm_", "tiny"), Case("flags", "tiny")])
    names = ("bytes-1000", "bytes-2000", "tensors-2", "tensors-3")
    points = [Case("clip_grad_norm_", name) for name in names]
    monkeypatch.setattr(suites, "sweeps", lambda quick: points)


def test_a_run_prints_a_table_and_writes_every_file(standard, tmp_path, capsys):
    assert run("--quick", "--save", str(tmp_path)) == 0
    printed = capsys.readouterr().out
    assert "flags tiny f32" in printed
    assert "checked against float64" in printed
    document = json.loads((tmp_path / "bench.json").read_text())
    assert document["complete"]
    assert document["version"] == __version__
    assert [r["case"] for r in document["results"]][:2] == [
        "clip_grad_norm_, tiny, float32",
        "flags, tiny, float32",
    ]
    assert "zclip" in (tmp_path / "bench.csv").read_text()
    assert (tmp_path / "bench.md").read_text().startswith("| work |")
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")


def test_a_rival_that_overflows_is_wrong_and_the_files_are_whole(tmp_path):
    words = ["--op", "grad_stats", "--values", "1e25", "--json", str(tmp_path / "made.json")]
    assert run(*TINY, *words) == 0
    (result,) = json.loads((tmp_path / "made.json").read_text())["results"]
    assert result["contenders"]["torch foreach"]["is_wrong"]
    assert not result["contenders"]["zclip"]["is_wrong"]


def test_every_combination_that_was_asked_for_is_measured(tmp_path, capsys):
    path = tmp_path / "x.json"
    words = ["--op", "grad_stats", "rule", "--rule", "zclip", "--dtype", "float32", "bfloat16"]
    assert run(*words, *TINY, "--backend", "reference", "--json", str(path), "--markdown") == 0
    assert capsys.readouterr().out.startswith("| work |")
    found = json.loads(path.read_text())["results"]
    assert [r["case"] for r in found] == [
        "grad_stats, tiny, float32",
        "grad_stats, tiny, bfloat16",
        "zclip, tiny, float32",
        "zclip, tiny, bfloat16",
    ]
    assert all("zclip[reference]" in r["contenders"] for r in found)


def test_a_result_of_ours_that_is_wrong_ends_with_1(monkeypatch, capsys):
    def wrong(*words):
        result = run_case(*words)
        result.ours.is_wrong = True
        return result

    monkeypatch.setattr(cli, "run_case", wrong)
    assert run(*TINY) == 1
    assert "WRONG: clip_grad_norm_, tiny, float32: zclip is off by" in capsys.readouterr().out


@pytest.mark.parametrize(("factor", "code"), [(9.0, 1), (1.0, 0)])
def test_comparing_flags_a_regression(monkeypatch, tmp_path, capsys, factor, code):
    def taking(milliseconds):
        def measured(*words):
            result = run_case(*words)
            result.noise = None
            for name, contender in result.contenders.items():
                contender.milliseconds = milliseconds if name == "zclip" else 1.0
            return result

        monkeypatch.setattr(cli, "run_case", measured)

    old = str(tmp_path / "old.json")
    taking(1.0)
    assert run(*TINY, "--json", old) == 0
    taking(factor)
    assert run(*TINY, "--compare", old) == code
    assert f"{code} regressions in 1 cases" in capsys.readouterr().out


@pytest.mark.parametrize(("signal_", "code"), [(KeyboardInterrupt, 130), (cli.Terminated, 143)])
def test_interrupting_keeps_what_was_measured(monkeypatch, tmp_path, capsys, signal_, code):
    calls = iter([run_case])

    def interrupted(*words):
        try:
            return next(calls)(*words)
        except StopIteration:
            raise signal_ from None

    monkeypatch.setattr(cli, "run_case", interrupted)
    path = tmp_path / "x.json"
    assert run("--op", "grad_stats", "flags", *TINY, "--json", str(path)) == code
    assert "Interrupted" in capsys.readouterr().out
    document = json.loads(path.read_text())
    assert (len(document["results"]), document["complete"]) == (1, False)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=["kill -9", "SIGTERM"])
def test_a_run_that_is_killed_half_way_leaves_a_whole_file(tmp_path, number):
    path = tmp_path / "x.json"
    words = ["--op", *arguments.OPS, "--dtype", *arguments.DTYPES, *TINY, "--json", str(path)]
    process = subprocess.Popen(
        [sys.executable, "-m", "zclip.bench", *words, "--threads", "1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    end = time.monotonic() + 120
    while not path.exists() and process.poll() is None and time.monotonic() < end:
        time.sleep(0.005)
    process.send_signal(number)
    printed = process.communicate(timeout=60)[0].decode()
    document = json.loads(path.read_text())
    assert 1 <= len(document["results"]) < 4 * len(arguments.OPS)
    assert not document["complete"]
    assert process.returncode == (-9 if number == signal.SIGKILL else 143)
    assert ("this is what was measured so far" in printed) == (number == signal.SIGTERM)


BAD_INPUT = {
    "--op frobnicate": "--op: expected one of clip_grad_norm_",
    "--dtype int8": "--dtype: expected one of float32, bfloat16",
    "--rule best": "--rule: expected one of global_norm, zclip",
    "--shapes gpt5": "shapes: expected one of gpt2-small",
    "--backend cuda": "--backend: expected one of auto, native",
    "--backend triton": "--backend triton needs a GPU",
    "--rival apex": "--rival: apex takes no part: the package apex is not installed",
    "--rival megatron": "rival: expected one of apex",
    "--rounds 1": "--rounds: expected at least 2, got 1",
    "--threads 0": "--threads: expected at least 1, got 0",
    "--device tpu": "--device: expected cpu or cuda, got tpu",
    "--device cuda": "torch sees no GPU here",
    "--op scale_ --clipped": "scale_",
    "--op step --rule zclip": "--rule: expected --op rule with it",
    "--rule agc --clipped": "cannot be made to clip every time",
    "--compare nowhere.json": "cannot read nowhere.json",
    "--model torch": "expected module:factory",
    "--model nowhere:build": "ModuleNotFoundError: No module named 'nowhere'",
    "--model torch.nn:Frobnicate": "AttributeError",
    "--model torch.nn:Linear": "TypeError",
    "--model builtins:list": "expected a torch.nn.Module, got list from list()",
    "--model torch.nn:ReLU": "got none of 0 parameters",
    "--model tests.bench.models:frozen": "got none of 2 parameters",
    "--model tests.bench.models:complex_": "got torch.complex64",
}


@pytest.mark.parametrize(("words", "message"), BAD_INPUT.items(), ids=BAD_INPUT)
def test_bad_input_gives_one_clear_line_and_2(words, message, capsys):
    if words == "--device cuda" and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert run(*words.split()) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert printed.err.count("\n") == 1
    assert printed.out == ""


def test_the_users_own_model_is_measured_in_its_own_dtype(tmp_path, capsys):
    path = tmp_path / "x.json"
    assert run("--model", "tests.bench.models:small", "--rounds", "3", "--json", str(path)) == 0
    (result,) = json.loads(path.read_text())["results"]
    assert result["case"] == "clip_grad_norm_, own model, bfloat16"
    assert (result["tensors"], result["bytes"]) == (3, 2 * (12 + 3 + 6))


def test_a_case_that_does_not_fit_is_left_out_and_said_so(monkeypatch, capsys):
    monkeypatch.setattr("zclip.bench.run._free_bytes", lambda device: 350_000_000)
    assert run("--shapes", "resnet-50", "tiny", "--rounds", "3") == 0
    printed = capsys.readouterr().out
    assert "resnet-50, float32: left out, it takes 0.4 GB and 0.3 are free" in printed
    assert "clip_grad_norm_ tiny f32" in printed


def test_a_run_in_which_nothing_fits_ends_with_2(monkeypatch, capsys):
    monkeypatch.setattr("zclip.bench.run._free_bytes", lambda device: 1000)
    assert run(*TINY) == 2
    printed = capsys.readouterr()
    assert "left out, it takes" in printed.out
    assert "nothing was measured" in printed.err


def test_a_rival_that_raises_is_left_out_and_said_so(monkeypatch, capsys):
    def broken(*words, **more):
        raise RuntimeError("no kernel for this\nand a long story")

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", broken)
    assert run(*TINY) == 0
    printed = capsys.readouterr().out
    for name in ("torch foreach", "torch loop"):
        assert f"{name} takes no part: RuntimeError: no kernel for this\n" in printed
    assert "long story" not in printed


def test_an_operator_of_ours_that_raises_is_not_passed_over(monkeypatch):
    def broken(*words):
        raise RuntimeError("ours")

    monkeypatch.setattr("zclip.clip_grad_norm_", broken)
    with pytest.raises(RuntimeError, match="ours"):
        run(*TINY)


def test_a_missing_rival_is_told_and_the_run_goes_on(capsys):
    assert run(*TINY) == 0
    assert "apex takes no part: the package apex is not installed" in capsys.readouterr().out


def test_threads_are_set_for_the_run(monkeypatch):
    seen = []
    monkeypatch.setattr(torch, "set_num_threads", seen.append)
    run(*TINY, "--threads", "1")
    assert seen == [1]


def test_the_list_names_everything_there_is(capsys):
    assert run("--list") == 0
    printed = capsys.readouterr().out
    for name in (*arguments.OPS, *arguments.RULES, *arguments.DTYPES, "gpt2-xl", "moe-10000"):
        assert name in printed


def test_the_signal_handler_from_before_is_put_back():
    before = signal.getsignal(signal.SIGTERM)
    run(*TINY)
    assert signal.getsignal(signal.SIGTERM) is before
