"""Trackers get every number and every decision, and cannot hurt the run."""

import json
import math
import os
import sqlite3
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from heal.causes import Cause, Severity
from heal.diagnose import Diagnosis
from heal.integrations.trackers import (
    KNOWN,
    PATIENCE,
    Level,
    TensorBoardTracker,
    alert_for,
    attach,
    finite_numbers,
    make_trackers,
)
from heal.journal import Journal
from tests.heal.runs import regression

ROOT = Path(__file__).parents[2]
SEED_METRICS = {
    "healing/recovery_attempts",
    "healing/nan_count",
    "healing/loss_spike_ratio",
    "zclip/raw_grad_norm",
    "zclip/clipped_grad_norm",
    "zclip/z_score",
    "zclip/total_clips",
}


class Recorder:
    """A tracker that remembers, and raises when asked to."""

    def __init__(self, fails=()):
        self.calls = []
        self.fails = fails

    def start(self, config):
        self._note("start", dict(config))

    def log(self, metrics, step):
        self._note("log", dict(metrics), step)

    def alert(self, level, title, text):
        self._note("alert", level, title, text)

    def close(self):
        self._note("close")

    def _note(self, name, *what):
        self.calls.append((name, *what))
        if name in self.fails:
            raise OSError(f"no network for {name}")

    def of(self, name):
        return [call[1:] for call in self.calls if call[0] == name]


def poisoned(at=20, **options):
    """A healed run with one NaN batch; returns its healer."""
    setup = regression(**options.pop("config", {}))
    inner, calls = setup.train_step, []

    def train_step(batch):
        calls.append(1)
        return inner(batch) * (math.nan if len(calls) == at else 1.0)

    setup.train_step = train_step
    return setup.run(60, **options)


def diagnosis(severity):
    return Diagnosis(Cause.DIVERGENCE, {}, 0.9, severity, 80, 90)


def test_a_tracker_gets_the_numbers_of_the_seed_and_every_decision(tmp_path):
    tracker = Recorder()
    healer = poisoned(trackers=tracker, run_dir=tmp_path)
    assert tracker.calls[0][0] == "start"
    assert tracker.calls[-1][0] == "close"
    names = set().union(*(metrics for metrics, _ in tracker.of("log")))
    assert names >= SEED_METRICS
    assert [step for _, step in tracker.of("log")] == [9, 19, 29, 39, 49, 59, 59]
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    events = [event for event in events if event["event"] not in ("started", "goal")]
    decisions = [event for event in events if event["event"] in ("recovery", "alert")]
    alerts = tracker.of("alert")
    assert len(decisions) == len(healer.history) >= 1
    assert len(alerts) == len(events) + 1  # the last one tells that the run ended
    assert alerts[0][:2] == (Level.WARN, "healing: nonfinite_loss")
    assert "skip" in alerts[0][2]
    assert alerts[-1][:2] == (Level.INFO, "healing: run ended, completed")
    assert tracker.of("start")[0][0]["nan_patience"] == healer.config.nan_patience


def test_a_run_without_a_folder_is_tracked_too(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tracker = Recorder()
    poisoned(trackers=[tracker])
    assert len(tracker.of("alert")) == 2
    assert list(tmp_path.iterdir()) == []


def test_other_ranks_are_silent():
    tracker = Recorder()
    poisoned(trackers=[tracker], rank=1)
    assert tracker.calls == []


@pytest.mark.parametrize("fails", ["start", "log", "alert", "close"])
def test_a_tracker_that_raises_is_noted_once_and_the_others_go_on(fails):
    broken, whole = Recorder(fails=(fails,)), Recorder()
    healer = poisoned(trackers=[whole, broken])
    assert healer.last_step == 59
    assert whole.calls[-1] == ("close",)  # nothing about the other once it is closed
    assert sum("Recorder" in note for note in healer.notes) == 1
    assert len(whole.of("log")) == 7
    assert len(broken.of(fails)) <= PATIENCE


def test_a_tracker_that_recovers_is_kept():
    tracker = Recorder(fails=("log",))
    journal = Journal(None, 0)
    attach(journal, tracker, {}, lambda text: None)
    for step in range(PATIENCE - 1):
        journal.metrics(step, {"a": 1.0})
    tracker.fails = ()
    journal.metrics(8, {"a": 1.0})
    tracker.fails = ("log",)
    journal.metrics(9, {"a": 1.0})
    tracker.fails = ()
    journal.metrics(10, {"a": 1.0})
    assert [step for _, step in tracker.of("log")] == [0, 1, 8, 9, 10]


def test_a_subscriber_that_raises_gets_no_more_and_the_journal_goes_on(tmp_path, capsys):
    journal, seen = Journal(tmp_path), []

    def subscriber(kind, line):
        seen.append(kind)
        raise RuntimeError("a bug")

    journal.subscribe(subscriber)
    journal.event("note", 1)
    journal.event("note", 2)
    assert seen == ["events"]
    assert len((tmp_path / "events.jsonl").read_text().splitlines()) == 2
    assert capsys.readouterr().err.count("a bug") == 1


@pytest.mark.parametrize("fact", ["started", "goal", "resumed"])
def test_what_needs_no_reader_is_no_alert(fact):
    journal, tracker = Journal(None, 0), Recorder()
    attach(journal, tracker, {}, print)
    journal.event(fact, 3)
    assert tracker.of("alert") == []
    journal.event("note", 3, text="but this one does")
    assert len(tracker.of("alert")) == 1


@pytest.mark.parametrize(
    ("severity", "level"),
    [
        (Severity.INFO, Level.INFO),
        (Severity.WARN, Level.WARN),
        (Severity.ERROR, Level.ERROR),
        (Severity.FATAL, Level.ERROR),
    ],
)
def test_an_alert_is_as_loud_as_the_diagnosis_is_grave(severity, level):
    journal, tracker = Journal(None, 0), Recorder()
    attach(journal, tracker, {}, print)
    journal.recovery(diagnosis(severity), [])
    assert tracker.of("alert")[0][0] is level


@pytest.mark.parametrize(
    ("reason", "level"),
    [("completed", Level.INFO), ("sigterm", Level.WARN), ("oom", Level.ERROR)],
)
def test_the_end_is_as_loud_as_its_reason(reason, level, tmp_path):
    journal, tracker = Journal(tmp_path, 0), Recorder()
    attach(journal, tracker, {}, print)
    journal.postmortem(exit_reason=reason, last_step=3, exception=MemoryError("no room"))
    ((seen, title, text),) = tracker.of("alert")
    assert seen is level
    assert reason in title
    assert "no room" in text


def test_events_about_healing_itself_are_warnings():
    event = {"v": 1, "time": "", "rank": 0, "step": 4, "event": "hook_failed", "error": "E()"}
    assert alert_for(event) == (Level.WARN, "healing: hook_failed", "step 4: error: E()")


def test_an_alert_says_what_was_done_in_words():
    event = {"step": 91, "event": "recovery", "failure": "loss_spike", "severity": "ERROR"}
    event |= {"diagnosis": "The loss jumped.", "actions": ["rollback"], "resumed_at": 50}
    event |= {"plan": [{"action": "Rollback", "before_step": 52, "effect": True}]}
    assert alert_for(event) == (
        Level.ERROR,
        "healing: loss_spike",
        "step 91: The loss jumped. Action: rolled back to the snapshot of step 50. Next step: 50.",
    )
    level, _, text = alert_for({**event, "plan": [], "resumed_at": None, "severity": "INFO"})
    assert (level, text) == (Level.INFO, "step 91: The loss jumped. Action: logged only.")


def test_experiments_and_outcomes_are_sentences_with_short_numbers():
    seen = {"step": 129, "event": "experiment", "answer": "damaged", "snapshots": [50]}
    seen |= {"losses_now": [6.8058953285217285, 1.8630722761154175], "losses_old": [0.96, 1.2195]}
    level, _, text = alert_for(seen)
    assert level is Level.INFO
    assert text == (
        "step 129: Experiment: damaged weights. On the same batch the loss was 1.863 with the "
        "current weights and 1.22 with those of step 50."
    )
    outcome = {"step": 160, "event": "outcome", "loss": 1.1304140090942383, "loss_before": 1.25}
    assert alert_for({**outcome, "healed": True})[::2] == (
        Level.INFO,
        "step 160: The loss came back: 1.25 before, 1.13 after.",
    )
    assert alert_for({**outcome, "healed": False})[0] is Level.ERROR


def test_no_metric_appears_for_the_first_time_at_the_end():
    tracker = Recorder()
    poisoned(trackers=[tracker])
    *before, (last, _) = tracker.of("log")
    assert set(last) <= set().union(*(metrics for metrics, _ in before))


def test_only_finite_numbers_are_logged_and_ours_have_a_prefix():
    shown = {"time": "now", "step": 3, "seen_at": 1, "loss": 2.0, "lr_scale": 1, "zclip/z_score": 3}
    odd = {"healing/eval_gap": math.nan, "a": math.inf, "b": "word", "c": True, "d": None}
    assert finite_numbers({**shown, **odd}) == {
        "healing/loss": 2.0,
        "healing/lr_scale": 1.0,
        "zclip/z_score": 3.0,
    }


def test_an_unknown_tracker_is_an_error_that_lists_the_known():
    with pytest.raises(
        ValueError, match="expected one of trackio, tensorboard, wandb, mlflow, got 'wandbb'"
    ):
        make_trackers("tensorboard,wandbb")
    with pytest.raises(TypeError, match=r"object with start.* which lacks log, alert, close"):
        make_trackers([type("Half", (), {"start": print})()])
    with pytest.raises(TypeError, match="is a class"):
        make_trackers([Recorder])
    with pytest.raises(TypeError, match="got 7, which lacks start"):
        make_trackers(7)
    with pytest.raises(ValueError, match="'wandbb'"):
        regression().healer(trackers="wandbb")


def test_names_objects_and_nothing_are_taken():
    recorder = Recorder()
    assert make_trackers(None) == make_trackers("") == make_trackers(()) == []
    made = make_trackers(["tensorboard", recorder, "tensorboard"])
    assert [type(tracker).__name__ for tracker in made] == ["TensorBoardTracker", "Recorder"]
    assert make_trackers(recorder) == [recorder]
    assert make_trackers(" tensorboard , ", project="p", name="n")[0].log_dir == Path("runs/p/n")


def test_a_tracker_that_is_not_installed_is_named(monkeypatch):
    monkeypatch.setattr("heal.integrations.trackers.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"'mlflow' needs the package mlflow.*pip install mlflow"):
        make_trackers("mlflow")


def test_no_tracker_is_imported_unless_used():
    source = (
        "import sys, heal, heal.integrations.trackers as t; from heal import Healer; "
        "t.make_trackers('trackio,tensorboard'); "
        f"print(sorted({set(KNOWN)!r} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.strip() == "[]", done.stderr


def test_tensorboard_can_be_read_back(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    poisoned(trackers=TensorBoardTracker(tmp_path))
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert set(events.Tags()["scalars"]) >= SEED_METRICS
    nan_counts = [(point.step, point.value) for point in events.Scalars("healing/nan_count")]
    assert nan_counts[0] == (9, 0.0)
    assert nan_counts[-1] == (59, 1.0)
    shown = [t.tensor_proto.string_val[0].decode() for t in events.Tensors(TEXT)]
    assert shown[0].startswith("**WARN** healing: nonfinite_loss")
    assert shown[-1].startswith("**INFO** healing: run ended")


TEXT = "healing/alerts/text_summary"


def test_a_writer_of_the_user_is_used_and_left_open(tmp_path):
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(tmp_path))
    tracker = TensorBoardTracker(writer=writer)
    tracker.start({})
    tracker.close()
    writer.add_scalar("still/open", 1.0, 1)
    writer.close()


TRACKIO = """
import sys, trackio
from heal.causes import Cause, Severity
from heal.diagnose import Diagnosis
from heal.integrations.trackers import attach
from heal.journal import Journal

def run(notes=[]):
    journal = Journal(None, 0)
    attach(journal, "trackio", {"nan_patience": 5}, notes.append)
    journal.metrics(9, {"healing/nan_count": 0.0, "zclip/z_score": 1.5})
    for step, severity in enumerate(list(Severity)):
        trouble = Diagnosis(Cause.DIVERGENCE, {}, 0.9, severity, step, step)
        journal.recovery(trouble, [{"action": "Rollback"}])
    journal.metrics(5, {"healing/nan_count": 2.0})
    journal.postmortem(last_step=9)
    assert notes == []

run()
own = trackio.init(project="mine", name="mine")
run()
assert trackio.context_vars.current_run.get() is own
trackio.finish()
assert "torch" not in sys.modules
"""


def test_trackio_works_offline(tmp_path):
    environment = {**os.environ, "TRACKIO_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    environment |= {"HF_HUB_OFFLINE": "1", "HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", TRACKIO], capture_output=True, text=True, cwd=ROOT, env=environment
    )
    assert done.returncode == 0, done.stderr
    for project in ("self-healing", "mine"):
        with sqlite3.connect(tmp_path / f"{project}.db") as store:
            alerts = store.execute("SELECT level, title FROM alerts ORDER BY timestamp").fetchall()
            rows = store.execute("SELECT step, metrics FROM metrics ORDER BY id").fetchall()
        assert [level for level, _ in alerts] == ["info", "warn", "error", "error", "info"]
        assert {title for _, title in alerts[:-1]} == {"healing: divergence"}
        assert alerts[-1][1] == "healing: run ended, completed"
        counts = [(step, json.loads(row).get("healing/nan_count")) for step, row in rows]
        assert counts == [(9, 0.0), (5, 2.0)]


@pytest.fixture
def fakes(monkeypatch):
    """Stand-ins with the recorded signatures of W&B and MLflow."""
    monkeypatch.syspath_prepend(str(Path(__file__).with_name("fake_packages")))
    for name in ("wandb", "mlflow", "mlflow.entities"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield import_module
    for name in ("wandb", "mlflow", "mlflow.entities"):
        sys.modules.pop(name, None)


def test_wandb_gets_numbers_on_our_own_axis_and_alerts(fakes):
    poisoned(trackers="wandb")
    wandb = fakes("wandb")
    kinds = [call[0] for call in wandb.CALLS]
    assert kinds[:3] == ["init", "define_metric", "define_metric"]
    assert kinds[-1] == "finish"
    logged = [call[1] for call in wandb.CALLS if call[0] == "log"]
    assert [line["healing/step"] for line in logged] == [9, 19, 29, 39, 49, 59, 59]
    assert set(logged[-1]) >= SEED_METRICS
    levels = [call[3].value for call in wandb.CALLS if call[0] == "alert"]
    assert levels == ["WARN", "INFO"]


def test_a_wandb_run_of_the_user_is_used_and_not_ended(fakes):
    wandb = fakes("wandb")
    wandb.init(project="mine")
    poisoned(trackers="wandb")
    kinds = [call[0] for call in wandb.CALLS]
    assert kinds.count("init") == 1
    assert "finish" not in kinds


def test_wandb_goes_on_with_the_same_run_after_it_was_closed(fakes):
    (tracker,) = make_trackers("wandb", project="p")
    for _ in range(2):
        tracker.start({})
        tracker.close()
    wandb = fakes("wandb")
    began = [call[1:4] for call in wandb.CALLS if call[0] == "init"]
    assert began == [("p", "made-up", None), ("p", "made-up", "allow")]


def test_mlflow_gets_numbers_in_batches_and_alerts_as_a_file(fakes):
    poisoned(trackers="mlflow")
    mlflow = fakes("mlflow")
    assert ("create_experiment", "self-healing") in mlflow.CALLS
    assert mlflow.CALLS[-1] == ("set_terminated", "run-1")
    batches = [call for call in mlflow.CALLS if call[0] == "log_batch"]
    params, numbers = batches[0][3], {m.key for batch in batches for m in batch[2]}
    assert "healing.nan_patience" in {param.key for param in params}
    assert numbers >= SEED_METRICS | {"healing/alerts/warn", "healing/alerts/info"}
    text = [call[2] for call in mlflow.CALLS if call[0] == "log_text"][-1]
    assert [line.split()[0] for line in text.splitlines()] == ["WARN", "INFO"]
    tags = [call[3] for call in mlflow.CALLS if call[0] == "set_tag"]
    assert tags[0].startswith("WARN healing: nonfinite_loss")


def test_an_mlflow_run_of_the_user_is_used_and_not_ended(fakes):
    from types import SimpleNamespace

    mlflow = fakes("mlflow")
    mlflow.ACTIVE = SimpleNamespace(info=SimpleNamespace(run_id="theirs"))
    poisoned(trackers="mlflow")
    kinds = [call[0] for call in mlflow.CALLS]
    assert "create_run" not in kinds
    assert "set_terminated" not in kinds
    assert {call[1] for call in mlflow.CALLS if call[0] == "log_batch"} == {"theirs"}
