import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from heal.cli import main
from heal.journal import Journal
from heal.report.live import START_BYTES, LiveRun, Tail, closing_line, follow, quiet_words
from tests.report.journals import (
    act,
    at,
    calm_metrics,
    metrics,
    postmortem,
    sick_run,
    started,
    trouble,
    two_runs,
    write,
)

ROOT = Path(__file__).parents[2]


def test_a_tail_reads_lines_once_and_only_whole_ones(tmp_path):
    path = tmp_path / "events.jsonl"
    tail = Tail(path)
    assert tail.lines() == []
    write(path, [{"a": 1}])
    with open(path, "ab") as file:
        file.write(b'{"b"')
    assert tail.lines() == [{"a": 1}]
    with open(path, "ab") as file:
        file.write(b': 2}\nnonsense\n{"c": 3}\n')
    assert tail.lines() == [{"b": 2}, {"c": 3}]
    assert (tail.lines(), tail.bad_lines) == ([], 1)


def test_a_tail_follows_the_journal_through_rotations(tmp_path):
    journal = Journal(tmp_path, max_bytes=1500)
    tail, seen = Tail(tmp_path / "events.jsonl"), []
    for step in range(60):
        journal.event("note", step, text="x" * 50)
        if step % 3 == 0:
            seen += tail.lines()
    seen += tail.lines()
    assert [line["step"] for line in seen] == list(range(60))


def test_a_line_written_between_reading_and_rotation_is_not_lost(tmp_path):
    path = tmp_path / "events.jsonl"
    write(path, [{"a": 1}])
    tail = Tail(path)
    assert tail.lines() == [{"a": 1}]
    write(path, [{"b": 2}])
    path.rename(tmp_path / "events.jsonl.1")
    write(path, [{"c": 3}])
    assert tail.lines() == [{"b": 2}, {"c": 3}]


def test_a_tail_notices_a_file_that_was_begun_anew(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, [{"a": i} for i in range(9)])
    tail = Tail(path)
    assert len(tail.lines()) == 9
    write(path, [{"b": 1}], mode="w")
    assert tail.lines() == [{"b": 1}]
    path.unlink()
    assert tail.lines() == []
    write(path, [{"c": 1}])
    assert tail.lines() == [{"c": 1}]


def test_a_tail_of_a_long_file_begins_near_its_end(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, [{"i": i, "x": "y" * 1000} for i in range(3 * START_BYTES // 1000)])
    found = [line["i"] for line in Tail(path).lines()]
    assert 100 < len(found) < 1100
    assert found == list(range(found[0], 3 * START_BYTES // 1000))


def test_a_finished_run_prints_its_outcome_and_ends(tmp_path, capsys):
    assert main(["watch", str(sick_run(tmp_path))]) == 0
    out = capsys.readouterr().out
    assert "step 57: The loss was NaN or Inf. rolled back to the snapshot of step 40" in out
    assert "100 of 100 steps  loss 1.5  norm 0.5  lr x 1" in out
    assert "the run finished after 100 steps; heal acted 1 time." in out
    assert out.endswith(f"For the full report: heal report {tmp_path}\n")


def test_a_run_that_was_stopped_says_why(tmp_path, capsys):
    postmortem(tmp_path, exit_reason="nan", exit_code=41, exception_message="enough\x1b[2J")
    assert main(["watch", str(tmp_path)]) == 0
    told = capsys.readouterr().out
    assert "was stopped because of NaN or Inf (exit code 41: enough\ufffd[2J)" in told


def test_a_run_is_followed_from_before_its_folder_exists_to_its_end(tmp_path, capsys):
    folder = tmp_path / "later" / "run"
    happenings = iter(
        [
            lambda: None,
            lambda: folder.mkdir(parents=True),
            lambda: write(folder / "events.jsonl", [started()]),
            lambda: write(folder / "metrics.jsonl", calm_metrics(20)),
            lambda: write(folder / "events.jsonl", [trouble("oom", 15, act("ShrinkBatch"))]),
            lambda: write(folder / "metrics.jsonl", [metrics(29, ["NaN"] * 10)]),
            lambda: postmortem(folder, last_step=29),
        ]
    )
    follow(folder, sleep=lambda seconds: next(happenings)())
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{folder} does not exist yet: waiting (Ctrl-C ends)"
    assert lines[1] == "started on node0"
    assert lines[2].startswith("20 steps  loss 2.449")
    assert lines[3] == "step 15: Memory ran out. split batches into twice as many micro-batches"
    assert "loss NaN" in lines[-2]
    assert lines[-1].startswith("the run finished after 30 steps")


def test_an_old_ending_does_not_end_a_run_that_was_started_again(tmp_path):
    sick_run(tmp_path)
    postmortem(tmp_path, timestamp=at(50))
    write(tmp_path / "events.jsonl", [started(seconds=100)])
    run = LiveRun(tmp_path)
    run.poll()
    assert not run.ended
    postmortem(tmp_path, timestamp=at(200))
    run.poll()
    assert run.ended


def test_ranks_are_shown_and_the_slowest_counts(tmp_path, capsys):
    for rank, steps in ((0, 100), (1, 60)):
        suffix = f".rank{rank}" if rank else ""
        write(tmp_path / f"metrics{suffix}.jsonl", calm_metrics(steps))
        write(tmp_path / f"events{suffix}.jsonl", [started(rank), trouble("oom", 5, rank=rank)])
    postmortem(tmp_path)
    main(["watch", str(tmp_path), "--plain"])
    out = capsys.readouterr().out
    assert "rank 1, step 5: Memory ran out. logged" in out
    assert "60 steps" in out
    assert "2 ranks" in out


def test_the_screen_shows_progress_ranks_and_news(tmp_path):
    rich = pytest.importorskip("rich.console")
    from heal.report.live import screen_of

    sick_run(tmp_path / "[bold]run", ranks=3)
    run = LiveRun(tmp_path / "[bold]run")
    run.poll()
    console = rich.Console(width=80, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(screen_of(run))
    text = console.export_text()
    assert "[bold]run" in text  # names are no markup
    assert "acted 3, logged 3" in text
    assert "throughput" not in text
    assert "rank 2, step 90: Steps became slow. logged" in text
    assert max(map(len, text.splitlines())) <= 80


def test_silence_is_told():
    run = LiveRun(Path("x"), began=100.0)
    assert quiet_words(run, 130.0) == ""
    assert quiet_words(run, 700.0) == "nothing new for 10 min: busy, stuck or killed"
    assert closing_line(run).startswith("the run goes on")


@pytest.mark.parametrize("words", [["--interval", "0"], ["--interval", "nan"], ["--interval", "x"]])
def test_an_interval_that_makes_no_sense_is_refused(tmp_path, words, capsys):
    with pytest.raises(SystemExit) as raised:
        main(["watch", str(tmp_path), *words])
    assert raised.value.code == 2
    assert "expected 0.05 to 3600 seconds" in capsys.readouterr().err


def test_a_file_is_no_run(tmp_path, capsys):
    (tmp_path / "x").touch()
    assert main(["watch", str(tmp_path / "x")]) == 2
    assert "expected a folder, got the file" in capsys.readouterr().err


@pytest.mark.parametrize("is_there", [True, False])
def test_ctrl_c_ends_the_watching_without_a_traceback(tmp_path, is_there):
    folder = tmp_path / "run"
    if is_there:
        write(folder / "metrics.jsonl", calm_metrics(20))
    process = subprocess.Popen(
        [sys.executable, "-u", "-m", "heal", "watch", str(folder), "--interval", "0.05"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell starts what runs in the background with Ctrl-C ignored, tests of ours too.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    first = process.stdout.readline()
    assert ("20 steps" if is_there else "does not exist yet") in first
    time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=300)
    assert (process.returncode, err) == (0, "")
    assert "stopped watching; the run continues" in out


def test_the_newest_run_of_a_folder_is_shown(tmp_path, capsys):
    two_runs(tmp_path, ranks=2)
    postmortem(tmp_path, timestamp=at(200))
    main(["watch", str(tmp_path), "--plain"])
    assert capsys.readouterr().out.splitlines()[-2].startswith("50 steps")


def test_the_loss_is_drawn_as_a_sparkline(tmp_path, capsys):
    losses = [float(loss) for loss in (*range(40, 20, -1), *["nan"] * 2, *range(20, 2, -1))]
    write(tmp_path / "metrics.jsonl", [metrics(39, losses)])
    postmortem(tmp_path)
    main(["watch", str(tmp_path), "--plain"])
    assert "#****+++++=====-  ----:::::....." in capsys.readouterr().out
