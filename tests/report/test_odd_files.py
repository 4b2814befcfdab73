"""Pipes, devices and links in a run folder neither hang nor redirect what reads and writes it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.report.journals import calm_metrics, write

ROOT = Path(__file__).parents[2]


def heal(*words):
    done = subprocess.run(
        [sys.executable, "-m", "heal", *map(str, words)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.fixture
def run_dir(tmp_path):
    folder = tmp_path / "run"
    write(folder / "metrics.jsonl", calm_metrics(20))
    return folder


@pytest.mark.parametrize("name", ["events.jsonl", "postmortem.json", "metrics.rank1.jsonl"])
def test_a_pipe_in_the_run_folder_is_named_and_does_not_hang_the_report(run_dir, name):
    os.mkfifo(run_dir / name)
    code, out, err = heal("report", run_dir, "--text")
    assert code == 0
    assert f"{name}: expected a regular file" in err
    assert "20 steps" in out


def test_a_link_to_a_device_is_not_read(run_dir):
    (run_dir / "events.jsonl").symlink_to("/dev/zero")
    code, _, err = heal("report", run_dir, "--text")
    assert code == 0
    assert "events.jsonl: expected a regular file" in err


@pytest.mark.parametrize("name", ["events.jsonl", "metrics.rank1.jsonl"])
def test_a_pipe_does_not_hang_the_watch(run_dir, name):
    (run_dir / "postmortem.json").write_text('{"exit_reason": "completed", "last_step": 21}')
    os.mkfifo(run_dir / name)
    code, out, _ = heal("watch", run_dir, "--plain")
    assert code == 0
    assert "20 steps" in out


def test_a_report_that_is_a_link_is_replaced_and_its_target_is_untouched(run_dir, tmp_path):
    precious = tmp_path / "precious"
    precious.write_text("mine")
    (run_dir / "report.html").symlink_to(precious)
    code, _, err = heal("report", run_dir)
    assert (code, err) == (0, "")
    assert precious.read_text() == "mine"
    assert not (run_dir / "report.html").is_symlink()
    assert "<html" in (run_dir / "report.html").read_text()
    assert sorted(path.name for path in run_dir.iterdir()) == ["metrics.jsonl", "report.html"]


def test_a_report_is_not_written_into_a_pipe(run_dir):
    os.mkfifo(run_dir / "report.html")
    code, _, err = heal("report", run_dir)
    assert code == 1
    assert "expected a regular file" in err
