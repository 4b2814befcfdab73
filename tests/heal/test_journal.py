import json
import math
import os
import shutil
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import pytest

from heal.actions import HealingError, Rollback, Skip, action_to_json
from heal.causes import Cause, Severity
from heal.diagnose import Diagnosis
from heal.exit_codes import ExitCode
from heal.journal import (
    ExitReason,
    Journal,
    Notes,
    exit_reason,
    read_all,
    read_events,
    write_postmortem,
)

ROOT = Path(__file__).parents[2]
SEED_FIELDS = {
    "exit_reason",
    "exception_type",
    "last_step",
    "timestamp",
    "final_metrics",
    "recovery_actions",
    "running_time_seconds",
}


def strict(text):
    def fail(word):
        raise AssertionError(f"{word} is not JSON")

    return json.loads(text, parse_constant=fail)


def diagnosis(cause=Cause.DIVERGENCE, **evidence):
    return Diagnosis(cause, evidence, 0.9, Severity.ERROR, 80, 90)


def test_a_note_is_of_the_step_in_which_it_comes(tmp_path):
    steps = iter([0, 7])
    notes = Notes(Journal(tmp_path), lambda: next(steps))
    notes.add("the set-up is odd")
    notes.add("so is the run")
    told = [(event["step"], event["text"]) for event in read_events(tmp_path / "events.jsonl")[0]]
    assert told == [(0, "the set-up is odd"), (7, "so is the run")]


def test_events_are_lines_of_strict_json(tmp_path):
    journal = Journal(tmp_path / "new" / "run", rank=0)
    journal.event("note", 7, loss=math.nan, norm=math.inf, low=-math.inf, path=Path("a"), s={1})
    journal.event("note", step=8, text="two\nlines \u2028 \x00")
    lines = (tmp_path / "new" / "run" / "events.jsonl").read_bytes().splitlines()
    first, second = (strict(line) for line in lines)
    assert (first["loss"], first["norm"], first["low"]) == ("NaN", "Infinity", "-Infinity")
    assert (first["step"], first["event"], first["rank"], first["v"]) == (7, "note", 0, 1)
    assert first["time"].endswith("Z")
    datetime.fromisoformat(first["time"].replace("Z", "+00:00"))
    assert second["text"] == "two\nlines \u2028 \x00"
    assert journal.failed_writes == 0


def test_every_rank_has_a_file_of_its_own(tmp_path, monkeypatch):
    Journal(tmp_path, rank=0).event("a", 0)
    Journal(tmp_path, rank=3).event("b", 0)
    monkeypatch.setenv("RANK", "5")
    Journal(tmp_path).event("c", 0)
    monkeypatch.setenv("RANK", "none of your business")
    assert Journal(tmp_path).rank == 0
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["events.jsonl", "events.rank3.jsonl", "events.rank5.jsonl"]
    for paths in (sorted(tmp_path.iterdir()), sorted(tmp_path.iterdir(), reverse=True)):
        assert [event["event"] for event in read_all(paths)] == ["a", "b", "c"]


def test_events_of_the_same_moment_come_in_the_order_of_their_ranks(tmp_path, monkeypatch):
    monkeypatch.setattr("heal.journal.now", lambda: "2026-01-01T00:00:00Z")
    for rank in (2, 0, 1):
        Journal(tmp_path, rank=rank).event("same", 0)
    assert [event["rank"] for event in read_all(tmp_path.iterdir())] == [0, 1, 2]


def test_one_line_is_one_write(tmp_path, monkeypatch):
    journal, writes, write = Journal(tmp_path), [], os.write
    monkeypatch.setattr(os, "write", lambda fd, data: writes.append(data) or write(fd, data))
    for step in range(5):
        journal.event("note", step, text="x" * 5000)
    assert len(writes) == 5
    assert all(data.endswith(b"\n") and data.count(b"\n") == 1 for data in writes)


def test_a_torn_line_is_skipped_counted_and_not_joined_on_to(tmp_path):
    Journal(tmp_path).event("first", 1)
    path = tmp_path / "events.jsonl"
    with open(path, "ab") as file:
        file.write(b'{"v":1,"event":"torn","lo')
    assert [len(read_events(path)[0]), read_events(path)[1]] == [1, 1]
    Journal(tmp_path).event("second", 2)
    events, bad = read_events(path)
    assert ([event["event"] for event in events], bad) == (["first", "second"], 1)


def test_the_reader_survives_anything(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'\xff\xfe\n[1]\n"x"\n\n{"a": 1}\n' + b"\x00" * 10 + b"\n{")
    assert read_events(path) == ([{"a": 1}], 5)


def test_files_are_rotated(tmp_path):
    journal = Journal(tmp_path, max_bytes=2000)
    for step in range(50):
        journal.event("note", step, text="x" * 100)
    sizes = {path.name: path.stat().st_size for path in tmp_path.iterdir()}
    assert set(sizes) == {"events.jsonl", "events.jsonl.1"}
    assert max(sizes.values()) <= 2000
    newest = read_events(tmp_path / "events.jsonl")[0][-1]
    assert newest["step"] == 49


def test_metrics_have_a_file_of_their_own(tmp_path):
    journal = Journal(tmp_path)
    journal.metrics(3, {"healing/nan_count": 1.0, "healing/loss_spike_ratio": math.nan})
    (line,), _ = read_events(tmp_path / "metrics.jsonl")
    assert (line["step"], line["healing/nan_count"]) == (3, 1.0)
    assert line["healing/loss_spike_ratio"] == "NaN"


def test_a_disk_that_cannot_be_written_is_told_once(tmp_path, capsys):
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    journal = Journal(blocked)
    for step in range(3):
        journal.event("note", step)
    assert journal.postmortem(last_step=3) is None
    assert journal.failed_writes == 5
    assert capsys.readouterr().err.count("training goes on without") == 1


def test_a_full_disk_does_not_kill(tmp_path, monkeypatch):
    told = []
    journal = Journal(tmp_path, warn=told.append)

    def full(fd, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    journal.event("note", 1)
    monkeypatch.undo()
    journal.event("note", 2)
    assert len(told) == 1
    assert [event["step"] for event in read_events(tmp_path / "events.jsonl")[0]] == [2]


def test_a_line_that_was_written_in_part_is_told_of_and_costs_no_other(tmp_path, monkeypatch):
    told, write = [], os.write
    journal = Journal(tmp_path, warn=told.append)
    journal.event("first", 1)
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:40]))
    journal.event("torn", 2)
    journal.event("torn", 3)
    monkeypatch.undo()
    journal.event("whole", 4)
    journal.event("last", 5)
    events, bad = read_events(tmp_path / "events.jsonl")
    assert ([event["event"] for event in events], bad) == (["first", "whole", "last"], 2)
    assert journal.failed_writes == 2
    assert len(told) == 1
    assert "40 of" in told[0]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
@pytest.mark.parametrize("is_read", [False, True])
def test_a_pipe_in_the_place_of_a_file_is_told_of_and_waited_for_by_nobody(tmp_path, is_read):
    path = tmp_path / "events.jsonl"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK) if is_read else None
    source = (
        "import sys; from heal.journal import Journal;"
        "Journal(sys.argv[1], warn=lambda line: print(line)).event('note', 1)"
    )
    words = [sys.executable, "-c", source, str(tmp_path)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert "events.jsonl" in done.stdout
    if reader is not None:
        os.close(reader)


def test_what_cannot_be_told_does_not_kill_either(tmp_path):
    class Hostile:
        def __str__(self):
            raise ValueError("no")

    def deaf(line):
        raise RuntimeError("no")

    journal = Journal(tmp_path, warn=deaf)
    journal.event("note", 1, thing=Hostile())
    assert journal.failed_writes == 1


def test_a_link_is_not_followed(tmp_path):
    target = tmp_path / "precious"
    target.write_text("mine")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "events.jsonl").symlink_to(target)
    Journal(tmp_path / "run", warn=lambda line: None).event("note", 1)
    assert target.read_text() == "mine"


def test_recoveries_are_events_and_are_kept_for_the_postmortem(tmp_path):
    journal = Journal(tmp_path)
    done = {**action_to_json(Rollback(80)), "effect": True}
    journal.recovery(diagnosis(loss=math.nan), [done], lr_before=1.0, lr_after=0.5)
    journal.recovery(diagnosis(Cause.PLATEAU), [])
    journal.postmortem(last_step=90)
    events, _ = read_events(tmp_path / "events.jsonl")
    assert [event["event"] for event in events] == ["recovery", "alert"]
    (entry,) = strict((tmp_path / "postmortem.json").read_text())["recovery_actions"]
    assert (entry["failure"], entry["actions"], entry["step"]) == ("divergence", ["rollback"], 90)
    assert entry["diagnosis"] == Cause.DIVERGENCE.about.summary
    assert (entry["plan"], entry["lr_after"]) == ([done], 0.5)
    assert entry["evidence"] == {"loss": "NaN"}


def test_the_postmortem_has_the_fields_of_the_seed(tmp_path):
    journal = Journal(tmp_path)
    error = HealingError("enough", ExitCode.BUDGET_SPENT)
    path = journal.postmortem(
        exception=error,
        exit_code=error.exit_code,
        last_step=847,
        final_metrics={"loss": math.nan, "grad_norm": 42.3},
        running_time_seconds=1847.3,
        seed=17,
    )
    page = strict(path.read_text())
    assert set(page) >= SEED_FIELDS
    assert (page["last_step"], page["running_time_seconds"], page["seed"]) == (847, 1847.3, 17)
    assert page["final_metrics"] == {"loss": "NaN", "grad_norm": 42.3}
    assert page["exception_type"] == "heal.actions.HealingError"
    assert (page["exit_reason"], page["exit_code"]) == ("unrecoverable", 41)
    assert page["timestamp"].endswith("Z")
    assert [p.name for p in tmp_path.iterdir()] == ["postmortem.json"]


def test_without_a_folder_only_a_failure_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    journal = Journal(None)
    journal.event("note", 1)
    journal.metrics(1, {"a": 1.0})
    assert journal.postmortem(last_step=5) is None
    journal.draft_postmortem(exit_reason="exited", exit_code=None, last_step=5)
    assert list(tmp_path.iterdir()) == []
    journal.postmortem(last_step=5, exception=ValueError("x"))
    assert [path.name for path in tmp_path.iterdir()] == ["postmortem.json"]


def test_a_postmortem_that_fails_leaves_the_old_one(tmp_path, monkeypatch):
    journal = Journal(tmp_path, warn=lambda line: None)
    journal.postmortem(last_step=1)
    monkeypatch.setattr(os, "fsync", lambda fd: (_ for _ in ()).throw(OSError("torn")))
    assert journal.postmortem(last_step=2) is None
    assert strict((tmp_path / "postmortem.json").read_text())["last_step"] == 1
    assert [path.name for path in tmp_path.iterdir()] == ["postmortem.json"]


def test_a_run_dir_that_was_removed_is_made_again_for_the_postmortem(tmp_path):
    journal = Journal(tmp_path / "runs" / "one")
    shutil.rmtree(tmp_path / "runs")
    path = journal.postmortem(last_step=1)
    assert path == tmp_path / "runs" / "one" / "postmortem.json"
    assert strict(path.read_text())["exit_reason"] == "completed"


def test_a_failure_that_cannot_be_written_to_the_run_dir_goes_to_the_working_directory(
    tmp_path, monkeypatch
):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    blocked = tmp_path / "run"
    blocked.write_text("not a folder")
    journal = Journal(blocked, warn=lambda line: None)
    assert journal.postmortem(last_step=1) is None
    assert list((tmp_path / "here").iterdir()) == []
    path = journal.postmortem(last_step=1, exception=ValueError("x"))
    assert path == tmp_path / "here" / "postmortem.json"
    assert strict(path.read_text())["exception_type"] == "ValueError"


def test_other_ranks_do_not_overwrite_the_first(tmp_path):
    for rank in (0, 2):
        write_postmortem(Journal(tmp_path, rank), exit_reason="completed", last_step=rank)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "postmortem.json",
        "postmortem.rank2.json",
    ]


@pytest.mark.parametrize(
    ("exc", "last_cause", "reason"),
    [
        (None, "divergence", ExitReason.COMPLETED),
        (KeyboardInterrupt(), "", ExitReason.SIGINT),
        (SystemExit(0), "", ExitReason.COMPLETED),
        (SystemExit(3), "", ExitReason.EXITED),
        (ValueError("x"), "", ExitReason.EXCEPTION),
        (RuntimeError("CUDA error: out of memory"), "", ExitReason.OOM),
        (HealingError("x", ExitCode.NONFINITE), "", ExitReason.NAN),
        (HealingError("x", ExitCode.OUT_OF_MEMORY), "", ExitReason.OOM),
        (HealingError("x", ExitCode.PREEMPTED), "", ExitReason.SIGTERM),
        (HealingError("x", ExitCode.BUDGET_SPENT), "divergence", ExitReason.DIVERGENCE),
        (HealingError("x", ExitCode.BUDGET_SPENT), "nonfinite_loss", ExitReason.NAN),
        (HealingError("x", ExitCode.BAD_DATA), "data_error", ExitReason.UNRECOVERABLE),
    ],
)
def test_why_a_run_ended(exc, last_cause, reason):
    assert exit_reason(exc, last_cause) is reason


def test_a_word_that_is_no_reason_is_worked_out(tmp_path):
    journal = Journal(tmp_path)
    journal.recovery(diagnosis(Cause.NONFINITE_LOSS), [action_to_json(Skip())])
    halt = HealingError("x", ExitCode.BUDGET_SPENT)
    path = journal.postmortem(exit_reason="halt", exception=halt, last_step=1)
    assert strict(path.read_text())["exit_reason"] == "nan"
    path = journal.postmortem(exit_reason="sigterm", exception=halt, last_step=1)
    assert strict(path.read_text())["exit_reason"] == "sigterm"


def test_events_survive_kill_nine(tmp_path):
    source = (
        "import os, sys; from heal.journal import Journal; j = Journal(sys.argv[1]);"
        "[j.event('note', step) for step in range(100)]; os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", source, str(tmp_path)], cwd=ROOT)
    events, bad = read_events(tmp_path / "events.jsonl")
    assert ([event["step"] for event in events], bad) == (list(range(100)), 0)


def test_a_halt_tells_what_was_raised_first(tmp_path):
    halt = HealingError("no smaller pieces", ExitCode.OUT_OF_MEMORY)
    halt.__cause__ = MemoryError("no room")
    page = strict(Journal(tmp_path).postmortem(exception=halt, last_step=1).read_text())
    assert (page["exception_type"], page["exception_message"]) == ("MemoryError", "no room")
    assert page["halted_because"] == "no smaller pieces"


def test_a_draft_is_written_and_not_told(tmp_path):
    journal, told = Journal(tmp_path), []
    journal.subscribe(lambda kind, line: told.append(kind))
    journal.draft_postmortem(exit_reason=ExitReason.EXITED, exit_code=None, last_step=1)
    page = strict((tmp_path / "postmortem.json").read_text())
    assert (page["exit_reason"], page["exit_code"], told) == ("exited", None, [])
    journal.postmortem(last_step=1)
    assert told == ["postmortem"]
