"""What a run writes for its report: every record, where it ran, how far it wants to go."""

import math

from heal.journal import describe_machine, describe_training, read_events
from heal.monitor import MAX_RECORDS, Series
from heal.record import Record
from heal.report.collect import read_run
from tests.heal.runs import regression, roll_back_after_skipped


def test_records_are_taken_once_and_columns_that_do_not_change_are_told_once():
    series = Series()
    assert series.take() == {}
    for step in range(3):
        record = Record(step=step, loss=1.23456789 * step, norm=math.nan, lr=0.1, mean=5.0)
        series.note([record])
    taken = series.take()
    assert taken["series"]["step"] == [0, 1, 2]
    assert taken["series"]["loss"] == [0.0, 1.23457, 2.46914]
    assert (taken["series"]["lr"], taken["series"]["micro_batches"]) == (0.1, 1)
    assert all(math.isnan(norm) for norm in taken["series"]["norm"])
    assert taken["series"]["mean"] == 5.0
    assert series.take() == {}


def test_records_that_nobody_takes_do_not_pile_up():
    series = Series()
    for step in range(2 * MAX_RECORDS):
        series.note([Record(step=step)])
    assert len(series.take()["series"]["step"]) == MAX_RECORDS


def test_a_run_writes_every_step_its_goal_and_its_surroundings(tmp_path):
    setup = regression(zclip_enabled=True)
    setup.run(47, run_dir=tmp_path)
    report = read_run(tmp_path)
    rows = report.curves[0].rows()
    assert [row[0] for row in rows] == list(range(47))
    assert all(math.isfinite(v) for row in rows for v in row if v is not None)
    assert all(v is not None for v in rows[-1])
    assert report.story.goal == 47
    (start,) = report.story.sessions
    assert (start.line["model"], start.line["optimizer"]) == ("Sequential", "AdamW")
    assert start.line["settings"] == {**start.line["settings"], "check_interval": 10}
    assert start.line["parameters"] == sum(p.numel() for p in setup.model.parameters())
    assert report.incidents == []


def test_a_rollback_is_told_with_what_it_cost(tmp_path):
    setup = regression(nan_patience=2)
    calm, tries = setup.train_step, []

    def sick(batch):
        tries.append(batch)
        return calm(batch) * (math.nan if len(tries) in (31, 32) else 1.0)

    healer = setup.healer(run_dir=tmp_path)
    roll_back_after_skipped(healer, 2)
    healer.run(sick, setup.loader, 60, progress=False)
    events, _ = read_events(tmp_path / "events.jsonl")
    rollback = next(e for e in events if e.get("plan") and e["resumed_at"] < e["noticed_at"])
    (incident,) = read_run(tmp_path).incidents
    assert rollback["noticed_at"] > rollback["step"] >= rollback["resumed_at"]
    assert incident["lost_steps"] == rollback["noticed_at"] - rollback["resumed_at"]
    assert (incident["kind"], incident["outcome"]) == ("rollback", "healed")
    steps = [row[0] for row in read_run(tmp_path).curves[0].rows()]
    assert steps.count(rollback["resumed_at"]) == 2


def test_the_surroundings_hold_no_command_line_and_few_variables(monkeypatch):
    monkeypatch.setattr("sys.argv", ["/home/me/train.py", "--token=secret"])
    monkeypatch.setenv("API_KEY", "secret")
    monkeypatch.setenv("WORLD_SIZE", "8")
    told = describe_machine()
    assert "secret" not in str(told)
    assert (told["script"], told["world_size"]) == ("train.py", "8")


def test_a_model_without_shapes_is_described_all_the_same():
    class Lazy:
        def parameters(self):
            raise ValueError("no shape yet")

    from heal import HealingConfig

    told = describe_training(Lazy(), [], HealingConfig(lag=0))
    assert (told["settings"], told["parameters"]) == ({"lag": 0}, "unknown: no shape yet")
