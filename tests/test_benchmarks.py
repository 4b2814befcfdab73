"""The benchmarks run, on tiny shapes; there is a file for every operator that users call."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import zclip
from benchmarks import update_readme
from benchmarks.tables import publish
from tests.bench.test_results import document, result
from zclip.bench.catalogue import OPS, RULES

ROOT = Path(__file__).parent.parent


def test_every_operator_and_rule_has_a_file():
    files = {path.stem.removeprefix("bench_") for path in (ROOT / "benchmarks").glob("bench_*.py")}
    assert set(OPS) - {"rule"} <= files
    assert {f"{rule}_" for rule in RULES if rule != "global_norm"} <= files


def test_they_run_check_and_print_one_table():
    words = ["-q", "benchmarks", "--shapes", "tiny", "--quick", "--benchmark-quiet"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *words, "-p", "no:cacheprovider"],
        cwd=ROOT,
        env={k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")},  # no worker
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    assert "one contender after the other" in done.stdout
    for case in (
        "clip_grad_norm_, tiny, float32, clipped",
        "adagc, tiny",
        "step, tiny",
        "flags, tiny",
    ):
        assert case in done.stdout


def test_whole_loops_are_compared_and_written_down(tmp_path):
    words = ["--work", "small MLP", "--rounds", "3", "--cpu-time", "--save", str(tmp_path)]
    words += ["--other", str(ROOT)]  # as any other checkout would be
    done = subprocess.run(
        [sys.executable, "benchmarks/bench_loop.py", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    lines = (tmp_path / "loop.md").read_text().splitlines()
    rows = [line for line in lines if line.startswith("| small MLP, 49,338 parameters")]
    kinds = ["healed", f"healed, version {zclip.__version__}", "healed, not clipped"]
    found = [line.split("|")[2].strip() for line in rows if "ARC" not in line]
    assert found == [*kinds, *kinds, *kinds, "healed, zclip.optim"]
    assert all(" 0 recoveries" in line for line in rows if "ARC" not in line)
    with_goal = [line.split("|")[2].strip() for line in rows if "<= 5 %" in line]
    assert with_goal == ["healed", "healed, not clipped"]


def test_every_figure_of_the_readme_comes_from_the_saved_results():
    page = (ROOT / "README.md").read_text()
    current = update_readme.updated(page, update_readme.figures(update_readme.RESULTS))
    assert page == current, "run: python -m benchmarks.update_readme"


def test_the_prose_of_the_readme_has_no_speed_figure_of_its_own():
    page = (ROOT / "README.md").read_text()
    typed = re.sub(r"<!-- (.+?): made by.+?<!-- end of \1 -->", "", page, flags=re.S)
    assert re.findall(r"\d[\d.]*(?:x\b| times\b| ?%| ms\b| GB/s)", typed) == []


def test_clipping_during_backward_is_compared_and_written_down(tmp_path):
    words = ["--quick", "--rounds", "1", "--save", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "benchmarks/bench_during_backward.py", *words],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    page = (tmp_path / "during_backward.md").read_text()
    assert page.count("torch clips") == 2
    assert page.count("during backward |") == 4
    assert "| AdamW in backward |" in page


def test_the_table_of_the_readme_has_the_rows_it_should():
    noisy = result(case=update_readme.ROWS[1], noise="load 9 on 2 cores")
    made = document(result(case=update_readme.ROWS[0]), noisy, result(case="another"))
    table = update_readme.table(made)
    assert f"| {update_readme.ROWS[0]} | 1.00 | torch foreach 3.00 | 3.00x |" in table
    assert "| another |" not in table
    assert f"| {noisy.case} |" not in table
    assert update_readme.compiled(made) == ""
    with pytest.raises(SystemExit, match="no place for the block 'table'"):
        update_readme.updated("# README", {"table": table})


def test_a_noisy_run_does_not_change_the_readme(tmp_path, monkeypatch, capsys):
    noisy = document(result(case=update_readme.ROWS[0], noise="load 9 on 2 cores"))
    (tmp_path / "bench.json").write_text(noisy.as_json())
    monkeypatch.setattr("sys.argv", ["update_readme", str(tmp_path)])
    before = (ROOT / "README.md").read_text()
    update_readme.main()
    assert (ROOT / "README.md").read_text() == before
    assert "left as it is: no result, load 9 on 2 cores" in capsys.readouterr().out


def test_a_table_is_written_into_a_folder_that_is_not_there_yet(tmp_path, capsys):
    path = tmp_path / "new" / "table.md"
    publish(path, ("| a |", "|---|"), [("1",)], "made by hand")
    assert path.read_text() == "| a |\n|---|\n| 1 |\n\nmade by hand.\n"
    assert capsys.readouterr().out == "made by hand\n"
