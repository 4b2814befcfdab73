"""Files are whole, tables fit, noise is no result, and a regression is told from a slow day."""

import csv
import io
import json

import pytest
from rich.console import Console

from zclip.bench import compare, plots, results, tables
from zclip.bench.results import Document, Measured, Result
from zclip.bench.work import OURS


def measured(milliseconds, **more):
    fields = {
        "milliseconds": milliseconds,
        "spread": 0.1,
        "rounds": 9,
        "gigabytes_per_second": 4.0,
        "roofline": 0.9,
        "host_microseconds": 12.0,
        "launches": 2,
        "syncs": 0,
        "peak_bytes": 4096,
        "error": 1e-8,
        "is_wrong": False,
    }
    return Measured(**{**fields, **more})


def result(ours=1.0, rival=3.0, shapes="vit-b", noise=None, case=None, **more):
    contenders = {OURS: measured(ours), "torch foreach": measured(rival), **more}
    best = results.fastest_rival(contenders)
    return Result(
        case=case or f"clip_grad_norm_, {shapes}, float32",
        op="clip_grad_norm_",
        shapes=shapes,
        dtype="float32",
        rule=None,
        clips=False,
        tensors=10,
        bytes=4_000_000,
        contenders=contenders,
        rival=best,
        ratio=contenders[best].milliseconds / ours,
        read_gigabytes_per_second=20.0,
        load=0.5,
        others=0.01,
        noise=noise,
    )


def document(*found, machine="here"):
    return Document(["zclip-bench"], {"machine": machine}, list(found))


def shown(doc, width=80):
    console = Console(file=io.StringIO(), width=width)
    tables.show(doc, console)
    return console.file.getvalue()


def test_the_ratio_is_against_the_fastest_rival_that_is_right():
    one = result(rival=9.0, slow=measured(20.0), wrong=measured(2.0, is_wrong=True))
    assert (one.rival, one.ratio) == ("torch foreach", 9.0)
    another = result(**{f"{OURS}[reference]": measured(0.5)})
    assert another.rival == "torch foreach"


def test_a_noisy_run_is_not_called_a_result():
    noisy = document(result(noise="load 9 on 2 cores"), result(shapes="resnet-50"))
    for text in (shown(noisy), tables.markdown(noisy)):
        assert "3.00x?" in text
        assert "no result: load 9 on 2 cores" in text
    calm = document(result())
    assert "?" not in shown(calm) + tables.markdown(calm)


def test_the_table_fits_a_terminal_of_80_columns():
    text = shown(document(result(ours=1234.56, rival=4567.89, shapes="llama-8b-block")))
    assert "…" not in text
    assert "off by 1e-08 at most" in text


def test_points_of_a_sweep_are_for_the_plot_unless_there_is_nothing_else():
    both = document(result(), result(shapes="bytes-1000"))
    assert "bytes-1000" not in shown(both) + tables.markdown(both)
    assert "bytes-1000" in shown(document(result(shapes="bytes-1000")))


def test_a_document_comes_back_from_its_file(tmp_path):
    path = tmp_path / "deep" / "bench.json"
    before = document(result())
    results.write_whole(path, before.as_json())
    assert results.read_document(path) == before
    assert [p.name for p in path.parent.iterdir()] == ["bench.json"]


def test_writing_that_is_interrupted_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "bench.json"
    results.write_whole(path, "old")

    def interrupted(number):
        raise KeyboardInterrupt

    monkeypatch.setattr(results.os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        results.write_whole(path, "new")
    assert [p.name for p in tmp_path.iterdir()] == ["bench.json"]
    assert path.read_text() == "old"


def test_the_csv_has_one_line_per_contender():
    rows = list(csv.DictReader(io.StringIO(document(result()).as_csv())))
    assert [row["contender"] for row in rows] == [OURS, "torch foreach"]
    assert float(rows[1]["milliseconds"]) == 3.0


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot read"),
        ("{", "cannot read"),
        ("[]", "is not a document"),
        ('{"schema": 1}', "is not a document"),
        ('{"schema": 2, "results": [{"case": 1}]}', "is damaged"),
    ],
)
def test_a_file_that_cannot_be_compared_with_is_one_clear_line(tmp_path, content, message):
    path = tmp_path / "old.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ValueError, match=message):
        results.read_document(path)


CHANGES = {
    "twice as slow": (result(ours=2.0), "regression"),
    "a slow day: the rival is slower too": (result(ours=2.0, rival=6.0), "same"),
    "the rival became faster, we did not change": (result(ours=1.0, rival=1.5), "same"),
    "faster": (result(ours=0.5), "faster"),
    "within the tolerance": (result(ours=1.09), "same"),
    "noise": (result(ours=2.0, noise="load 9"), "not judged: load 9"),
}


@pytest.mark.parametrize(("new", "verdict"), CHANGES.values(), ids=CHANGES)
def test_a_regression_is_told_from_a_slow_day(new, verdict):
    (change,) = compare.compare(document(result()), document(new))
    assert change.verdict == verdict


def test_on_another_machine_only_ratios_are_compared():
    there = document(result(ours=9.0, rival=12.0), machine="there")
    assert compare.compare(document(result()), there)[0].is_regression
    alone = result(ours=9.0)
    del alone.contenders["torch foreach"]
    changes = compare.compare(document(result()), document(alone, machine="there"))
    assert "another machine" in changes[0].verdict


def test_a_case_that_is_new_is_not_compared():
    assert compare.compare(document(result()), document(result(shapes="resnet-50"))) == []


def test_the_plot_has_bars_and_both_curves():
    points = [result(shapes=f"{kind}-{10**n}") for kind in ("bytes", "tensors") for n in (3, 4)]
    whole = plots.plot(document(result(), *points))
    assert whole.startswith(b"\x89PNG")
    assert len(whole) > len(plots.plot(document(result())))
    assert b"<svg" in plots.plot(document(*points), ".svg")
    with pytest.raises(ValueError, match=r"--plot: Format 'doc' is not supported"):
        plots.plot(document(result()), ".doc")


def test_json_is_strict():
    with pytest.raises(ValueError, match="not JSON compliant"):
        document(result(ours=float("nan"))).as_json()
    json.loads(document(result()).as_json())
