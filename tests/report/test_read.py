import json

import pytest

from heal.journal import Journal
from heal.report.collect import read_run
from heal.report.read import MAX_LINE, Damage, NotARun, find_files, read_lines, seconds_of, whole
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


def test_ranks_and_rotated_files_are_found_oldest_first(tmp_path):
    for name in ("events.jsonl", "events.jsonl.1", "metrics.rank12.jsonl", "postmortem.rank3.json"):
        (tmp_path / name).touch()
    for stranger in ("events.jsonl.2", "events.rankx.jsonl", "notes.txt", "my-metrics.jsonl"):
        (tmp_path / stranger).touch()
    found = find_files(tmp_path)
    assert [path.name for path in found.events[0]] == ["events.jsonl.1", "events.jsonl"]
    assert found.ranks == [0, 3, 12]
    assert sum(len(paths) for paths in found.metrics.values()) == 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: None, "expected the run_dir .* does not exist"),
        (lambda path: path.write_text("x"), "expected the run_dir .* is a file"),
        (lambda path: path.mkdir(), "has no events.jsonl, metrics.jsonl or postmortem.json"),
        (lambda path: write(path / "events.jsonl", []), "the journal is empty"),
    ],
    ids=["missing", "file", "strange", "empty"],
)
def test_what_is_no_run_is_told_so(tmp_path, make, message):
    make(tmp_path / "run")
    with pytest.raises(NotARun, match=message):
        read_run(tmp_path / "run")


def test_a_journal_of_which_nothing_can_be_read_is_told_so(tmp_path):
    (tmp_path / "events.jsonl").write_bytes(b"\x00\xff garbage\n[1, 2]\n" + b"[" * 100_000)
    with pytest.raises(NotARun, match=r"damaged and not one line.*events.jsonl: 3 lines"):
        read_run(tmp_path)


def test_bad_lines_are_counted_and_the_rest_is_read(tmp_path):
    path = tmp_path / "events.jsonl"
    write(path, [started()])
    with open(path, "ab") as file:
        file.write(b'{"torn": \n\n"text"\n' + b'{"long": "' + b"x" * MAX_LINE + b'"}\n')
    write(path, [trouble("oom", 5, act("ClearCache"))])
    with open(path, "ab") as file:
        file.write(b'{"v":1,"event":"reco')
    damage = Damage()
    assert [line["event"] for line in read_lines(path, damage)] == ["started", "recovery"]
    assert damage.bad_lines == {"events.jsonl": 5}  # the long one comes in two parts
    assert damage.sentences() == ["events.jsonl: 5 lines could not be read."]


def test_a_file_that_cannot_be_opened_does_not_hide_the_others(tmp_path):
    sick_run(tmp_path)
    (tmp_path / "events.rank1.jsonl").mkdir()
    report = read_run(tmp_path)
    assert len(report.incidents) == 3
    assert list(report.damage.unreadable) == ["events.rank1.jsonl"]


def test_every_value_may_be_nonsense(tmp_path):
    nonsense = [None, True, "x", [], {}, -1, 10**400, 1e308, [[1]], "NaN", float("nan")]
    for name in ("time", "step", "event", "failure", "bad_step", "plan", "evidence", "seconds"):
        for value in nonsense:
            line = {**trouble("oom", 3, act("Rollback", before_step=1)), name: value}
            write(tmp_path / "events.jsonl", [line])
    for name in ("time", "step", "seen_at", "loss", "lr_scale", "series", "zclip/threshold"):
        write(tmp_path / "metrics.jsonl", [{**metrics(9, [1.0] * 10), name: v} for v in nonsense])
    for name in ("step", "loss", "norm", "lr", "seconds", "mean"):
        write(tmp_path / "metrics.jsonl", [metrics(9, [1.0] * 10, **{name: v}) for v in nonsense])
        write(tmp_path / "metrics.jsonl", [metrics(9, [1.0], **{name: [v] * 3}) for v in nonsense])
    (tmp_path / "postmortem.json").write_text(json.dumps({"exit_code": [], "last_step": "x"}))
    from heal.report.data import report_data
    from heal.report.page import make_page
    from heal.report.text import make_text

    report = read_run(tmp_path)
    json.dumps(report_data(report), allow_nan=False)
    assert make_page(report).isprintable() is False
    assert make_text(report, to_terminal=False)


def test_old_metrics_without_a_series_are_read_too(tmp_path):
    line = metrics(9, [2.5])
    del line["series"]
    write(tmp_path / "metrics.jsonl", [line])
    report = read_run(tmp_path)
    (row,) = report.curves[0].rows()
    assert (row[0], row[2], row[3]) == (9, 2.5, 0.5)


def test_the_rotated_file_is_read_before_the_present_one(tmp_path):
    write(tmp_path / "metrics.jsonl.1", calm_metrics(50))
    write(tmp_path / "metrics.jsonl", calm_metrics(50, first=50))
    steps = [row[0] for row in read_run(tmp_path).curves[0].rows()]
    assert steps == list(range(100))


def test_times_of_records_are_counted_back_from_the_line(tmp_path):
    write(tmp_path / "metrics.jsonl", [metrics(2, [1.0] * 3, ended=10, seconds=[1, 2, 3])])
    times = [row[1] for row in read_run(tmp_path).curves[0].rows()]
    assert [t - times[-1] for t in times] == [-5, -3, 0]


@pytest.mark.parametrize("text", ["", "yesterday", None, "9999-99-99", 5, "0001-01-01T00:00:00"])
def test_what_is_no_time_is_none(text):
    assert seconds_of(text) is None or isinstance(seconds_of(text), float)


def test_times_are_seconds_and_steps_are_whole():
    assert seconds_of(at(5)) - seconds_of(at(0)) == 5
    assert [whole(v) for v in (3, 4.0, True, "5", None, float("inf"), 10**400)] == [3, 4] + [
        None
    ] * 5


def test_the_postmortem_alone_makes_a_report(tmp_path):
    postmortem(tmp_path, exit_reason="oom", exit_code=44)
    report = read_run(tmp_path)
    assert (report.last_step, report.incidents) == (99, [])


@pytest.mark.parametrize("ranks", [1, 3])
def test_two_runs_in_one_folder_are_two_runs(tmp_path, ranks):
    two_runs(tmp_path, ranks)
    postmortem(tmp_path, last_step=49, timestamp=at(200))
    first, second = (read_run(tmp_path, run=number) for number in (1, 2))
    assert (first.number, first.runs, second.number, second.runs) == (1, 2, 2, 2)
    assert (first.last_step, second.last_step) == (99, 49)
    assert (len(first.incidents), len(second.incidents)) == (1, 0)
    assert (first.postmortem, second.postmortem is None) == (None, False)
    assert first.ranks == second.ranks == list(range(ranks))
    assert [row[0] for row in second.curves[0].rows()] == list(range(50))
    assert read_run(tmp_path).number == 2
    with pytest.raises(NotARun, match="expected a run from 1 to 2, got 3"):
        read_run(tmp_path, run=3)


def test_an_end_that_is_older_than_the_last_run_belongs_to_the_run_before(tmp_path):
    two_runs(tmp_path)
    postmortem(tmp_path, timestamp=at(50))
    assert read_run(tmp_path, run=1).postmortem is not None
    assert read_run(tmp_path, run=2).postmortem is None


def test_a_start_that_resumes_is_the_same_run(tmp_path):
    two_runs(tmp_path)
    resumed = {**started(seconds=101), "event": "resumed", "step": 100, "run": "second-0"}
    write(tmp_path / "events.jsonl", [resumed])
    assert read_run(tmp_path).runs == 1


def test_a_run_after_one_of_an_older_version_is_another(tmp_path):
    sick_run(tmp_path, ranks=2)
    postmortem(tmp_path, timestamp=at(50))
    write(tmp_path / "events.jsonl", [started(seconds=100) | {"run": "new"}])
    report = read_run(tmp_path)
    assert (report.number, report.runs, report.incidents) == (2, 2, [])
    assert len(read_run(tmp_path, run=1).incidents) == 3


def test_healer_gives_each_run_an_id(tmp_path):
    for steps in (3, 2):
        journal = Journal(tmp_path, rank=0)
        journal.event("note", 0, text="before the start")
        journal.event("started", 0)
        journal.metrics(steps, {"loss": 1.0, "seen_at": 0})
        journal.close()
    assert read_run(tmp_path).runs == 2
    assert [row[2] for row in read_run(tmp_path).curves[0].rows()] == [1.0]
