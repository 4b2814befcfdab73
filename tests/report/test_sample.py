import math
import random

from heal.report.collect import COLUMNS, Sampler, keep, read_run
from heal.report.page import make_page
from tests.report.journals import act, long_metrics, started, trouble, write

LOSS = COLUMNS.index("loss")


def row(step, **values):
    usual = {"step": step, "time": float(step), "loss": 1.0, "norm": 1.0, "lr": 0.1}
    return tuple({**dict.fromkeys(COLUMNS), **usual, **values}[name] for name in COLUMNS)


def test_few_rows_are_all_kept():
    sampler = Sampler(1000)
    rows = [row(step) for step in range(900)]
    for one in rows:
        sampler.extend([one])
    assert list(sampler.rows()) == rows


def test_the_number_kept_is_bounded_and_the_order_stays():
    sampler = Sampler(1000)
    generator = random.Random(0)
    for start in range(0, 30_000, 10):
        sampler.extend([row(s, loss=generator.random()) for s in range(start, start + 10)])
    steps = [one[0] for one in sampler.rows()]
    assert sampler.count == 30_000
    assert 200 < len(steps) <= 2000
    assert steps == sorted(steps)
    assert (steps[0], steps[-1]) == (0, 29_999)


def test_no_spike_dip_nan_or_turn_is_lost_wherever_it_is():
    generator = random.Random(1)
    for trial in range(8):
        places = generator.sample(range(5000), 6)
        odd = [{"loss": 50.0}, {"loss": -5.0}, {"norm": 1e6}, {"norm": math.inf}, {"lr": 7.0}]
        odd.append({"loss": math.nan})
        special = dict(zip(places, odd, strict=True))
        sampler = Sampler(200)
        sampler.extend([row(step, **special.get(step, {})) for step in range(5000)])
        kept = {one[0] for one in sampler.rows()}
        assert set(places) <= kept, trial
        assert len(kept) < 1000


def test_a_rollback_and_a_change_of_the_micro_batch_keep_both_their_ends():
    rows = [row(s) for s in range(50)] + [row(s) for s in range(30, 80)]
    rows += [row(s, micro_batches=2) for s in range(80, 120)]
    steps = [one[0] for one in keep(rows)]
    assert steps[1:3] == [49, 30]
    assert 79 in steps
    assert 80 in steps


def test_a_page_of_a_long_run_is_small_and_shows_the_one_spike(tmp_path):
    long_metrics(tmp_path / "metrics.jsonl", 60_000, spike=43_210)
    write(
        tmp_path / "events.jsonl",
        [started(), *(trouble("nonfinite_loss", s, act("Skip")) for s in range(0, 60_000, 10))],
    )
    report = read_run(tmp_path)
    assert report.curves[0].count == 60_000
    assert report.curves[0].losses[3] == 1e4
    assert [r[0] for r in report.curves[0].rows() if r[LOSS] == 1e4] == [43_210]
    assert len(report.story.marks) <= 4000
    assert len(report.incidents) == 500
    page = make_page(report)
    assert len(page) < 5e6
    assert "5,500 incidents, the mildest, are left out" in page


def test_many_ranks_share_the_room(tmp_path):
    for rank in range(64):
        suffix = f".rank{rank}" if rank else ""
        long_metrics(tmp_path / f"metrics{suffix}.jsonl", 1000, spike=500 + rank)
    report = read_run(tmp_path)
    assert len(make_page(report)) < 5e6
    for rank, curves in report.curves.items():
        assert 500 + rank in [r[0] for r in curves.rows() if r[LOSS] == 1e4]
