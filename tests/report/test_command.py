import json
import os

import pytest

from heal.cli import main
from tests.report.journals import sick_run, two_runs, write


def test_the_page_is_written_into_the_run(tmp_path, capsys):
    assert main(["report", str(sick_run(tmp_path))]) == 0
    assert (tmp_path / "report.html").read_text().startswith("<!doctype html>")
    assert "open it in a browser" in capsys.readouterr().out


def test_the_page_goes_where_it_is_told(tmp_path, capsys):
    run, path = sick_run(tmp_path / "run"), tmp_path / "page.html"
    assert main(["report", str(run), "--output", str(path)]) == 0
    assert main(["report", str(run), "-o", "-"]) == 0
    assert path.read_text() in capsys.readouterr().out
    assert not (run / "report.html").exists()


def test_what_cannot_be_written_is_one_line_and_another_way(tmp_path, capsys):
    run = sick_run(tmp_path / "run")
    assert main(["report", str(run), "-o", str(tmp_path / "no" / "page.html")]) == 1
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert f"report: {tmp_path}/no/page.html: No such file" in told
    assert "--output says where to write instead" in told


@pytest.mark.parametrize("words", [["--text"], ["--json"], []])
@pytest.mark.parametrize("kind", ["missing", "file", "empty", "garbage"])
def test_bad_input_is_one_clear_line_and_a_code(tmp_path, capsys, kind, words):
    path = tmp_path / "run"
    if kind == "file":
        path.write_text("x")
    elif kind == "empty":
        path.mkdir()
    elif kind == "garbage":
        write(path / "events.jsonl", [])
        (path / "events.jsonl").write_bytes(b"\x00\x01" * 500)
    assert main(["report", str(path), *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("heal report: ")
    assert err.count("\n") == 1


def test_damage_is_told_beside_the_report(tmp_path, capsys):
    sick_run(tmp_path)
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write("torn")
    assert main(["report", str(tmp_path), "--json"]) == 0
    out, err = capsys.readouterr()
    assert err == "heal report: metrics.jsonl: 1 line could not be read.\n"
    assert json.loads(out)["damage"] == ["metrics.jsonl: 1 line could not be read."]


def test_json_is_strict_and_whole(tmp_path, capsys):
    def refuse(word):
        raise AssertionError(f"{word} is not JSON")

    assert main(["report", str(sick_run(tmp_path, ranks=2)), "--json"]) == 0
    data = json.loads(capsys.readouterr().out, parse_constant=refuse)
    assert data["summary"]["totals"]["lost_steps"] == 21
    assert [i["kind"] for i in data["incidents"]] == ["refused", "rollback", "alert"]
    assert [r["rank"] for r in data["ranks"]] == [0, 1]
    columns = data["ranks"][0]["columns"]
    assert len({len(values) for values in columns.values()}) == 1
    assert columns["loss"].count("NaN") == 5


@pytest.mark.parametrize("width", ["20", "40", "80", "200"])
def test_the_text_fits_the_terminal(tmp_path, capsys, monkeypatch, width):
    monkeypatch.setenv("COLUMNS", width)
    assert main(["report", str(sick_run(tmp_path)), "--text"]) == 0
    text = capsys.readouterr().out
    assert "[rolled back (loss not checked)] step 55 to 57: The loss was NaN or Inf" in " ".join(
        text.split()
    )
    assert max(map(len, text.splitlines())) <= min(100, max(40, int(width)))
    assert "\x1b" not in text


def test_the_text_has_colours_on_a_terminal_only(tmp_path, monkeypatch):
    from heal.report.collect import read_run
    from heal.report.text import make_text

    report = read_run(sick_run(tmp_path))
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    assert "\x1b[" in make_text(report)
    assert "\x1b[" not in make_text(report, to_terminal=False)


def test_a_report_is_made_without_rich_and_without_torch(tmp_path):
    import subprocess
    import sys

    source = (
        "import sys; sys.modules['rich'] = sys.modules['torch'] = None; from heal.cli import main\n"
        f"sys.exit(main(['report', {str(sick_run(tmp_path))!r}, '--text']))"
    )
    root = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
    done = subprocess.run(
        [sys.executable, "-c", source], cwd=root, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "3 incidents: " in done.stdout


@pytest.mark.parametrize("form", ["--text", "--json"])
def test_only_a_page_is_for_a_browser(tmp_path, capsys, form):
    run, path = sick_run(tmp_path / "run"), tmp_path / "report.txt"
    assert main(["report", str(run), form, "-o", str(path)]) == 0
    printed = capsys.readouterr().out
    assert str(path) in printed
    assert "browser" not in printed


def test_a_run_of_the_folder_can_be_chosen(tmp_path, capsys):
    two_runs(tmp_path)
    assert main(["report", str(tmp_path), "--text"]) == 0
    assert "The run (run 2 of 2 in its folder) took 50 steps" in capsys.readouterr().out
    assert main(["report", str(tmp_path), "--run", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["summary"]["totals"]["steps"] == 100
    assert main(["report", str(tmp_path), "--run", "3"]) == 2
    assert "expected a run from 1 to 2, got 3" in capsys.readouterr().err
