import pytest

from heal import actions
from heal.causes import Cause
from heal.report.collect import read_run
from heal.report.data import summarise, worst_tensors
from heal.report.page import make_page
from heal.report.story import KINDS
from heal.report.text import make_text
from heal.report.words import action_kind, action_words, clean, duration, show, title
from tests.report.journals import (
    act,
    calm_metrics,
    metrics,
    postmortem,
    sick_run,
    started,
    trouble,
    write,
)

ROLLBACK = act("Rollback", before_step=40)


def told(folder, *events, steps=200):
    write(folder / "events.jsonl", [started(), *events])
    write(folder / "metrics.jsonl", calm_metrics(steps))
    return read_run(folder).incidents


def test_a_sick_run_is_told_as_three_incidents(tmp_path):
    refused, undone, slow = read_run(sick_run(tmp_path)).incidents
    assert (refused["kind"], refused["lost_steps"], refused["outcome"]) == (
        "refused",
        1,
        "contained",
    )
    assert (undone["first_step"], undone["last_step"], undone["resumed_at"]) == (55, 57, 40)
    assert undone["lost_steps"] == 20  # the two refused steps were among those done again
    assert undone["lost_seconds"] == pytest.approx(20 * 0.1 + 3 * 0.25)
    assert [a["times"] for a in undone["actions"]] == [2, 1, 1, 1]
    assert undone["actions"][1]["text"] == "rolled back to the snapshot of step 40"
    assert undone["outcome_text"] == "Training passed step 57 and went on."
    assert (slow["kind"], slow["outcome"], slow["actions"]) == ("alert", "noted", [])


def test_what_every_rank_tells_is_counted_once(tmp_path):
    one = read_run(sick_run(tmp_path / "one")).incidents
    four = read_run(sick_run(tmp_path / "four", ranks=4)).incidents
    assert [i["lost_steps"] for i in four] == [i["lost_steps"] for i in one]
    assert [i["actions"] for i in four] == [i["actions"] for i in one]
    assert all(i["ranks"] == [0, 1, 2, 3] for i in four)


def test_causes_that_follow_each_other_are_one_incident_and_the_act_decides(tmp_path):
    (only,) = told(
        tmp_path,
        trouble("lr_spike", 60),
        trouble("loss_spike", 61),
        trouble("weight_corruption", 62, ROLLBACK, bad_step=58, resumed_at=40),
    )
    assert only["failures"] == ["lr_spike", "loss_spike", "weight_corruption"]
    assert only["what"].startswith("The learning rate jumped, then the loss jumped, then weights")
    assert (only["kind"], only["cause"]) == ("rollback", "It was weight_corruption.")


def test_causes_of_other_families_and_far_ones_are_incidents_of_their_own(tmp_path):
    found = told(
        tmp_path,
        trouble("nonfinite_loss", 60, act("Refuse")),
        trouble("data_error", 61, act("SkipBatches", first_step=61, last_step=61)),
        trouble("nonfinite_loss", 90, act("Refuse")),
    )
    assert [i["first_step"] for i in found] == [60, 61, 90]
    assert (found[1]["skipped_batches"], found[1]["lost_steps"]) == (1, 0)


def test_trouble_that_returns_after_a_rollback_is_the_same_incident(tmp_path):
    (only,) = told(
        tmp_path,
        trouble("loss_spike", 60, ROLLBACK, resumed_at=40, noticed_at=63),
        trouble("loss_spike", 62, ROLLBACK, resumed_at=30, noticed_at=65),
    )
    assert (only["came_back"], only["lost_steps"]) == (1, 23 + 35)
    assert "came back 1 time" in only["outcome_text"]


def test_a_halt_ends_the_run_and_a_new_start_takes_it_further(tmp_path):
    halt = trouble("nonfinite_loss", 99, act("Halt", reason="enough", exit_code=41))
    (ended,) = told(tmp_path / "a", halt, steps=100)
    assert (ended["kind"], ended["outcome"]) == ("halt", "ended")
    (resumed,) = told(tmp_path / "b", halt, started(seconds=20), steps=200)
    assert resumed["outcome"] == "resumed"


def test_a_new_start_does_not_join_what_was_before(tmp_path):
    refused = trouble("nonfinite_loss", 60, act("Refuse"))
    assert len(told(tmp_path, refused, started(seconds=20), {**refused, "time": "x"})) == 2


def test_trouble_at_the_last_step_is_open(tmp_path):
    (live,) = told(tmp_path, trouble("oom", 99, act("ShrinkBatch", halving=1)), steps=100)
    assert (live["outcome"], "yet" in live["outcome_text"]) == ("open", True)
    postmortem(tmp_path, last_step=99)
    (over,) = read_run(tmp_path).incidents
    assert over["outcome_text"] == "The run ended too soon after it to know."


def test_an_action_without_effect_is_told_so(tmp_path):
    (only,) = told(tmp_path, trouble("oom", 9, act("ShrinkBatch", halving=1, effect=False)))
    assert only["actions"][0]["text"].endswith("(no effect)")


def test_the_summary_tells_the_story(tmp_path):
    summary = summarise(read_run(sick_run(tmp_path)))
    text = " ".join(summary["sentences"])
    assert summary["state"] == "finished"
    assert "The run took 100 steps in 11.9 s and finished." in text.replace("12 s", "11.9 s")
    assert (
        "3 incidents: 1 rolled back (loss not checked), 1 skipped on the device, 1 logged" in text
    )
    assert "Gradients held NaN or Inf; the loss was NaN or Inf; steps became slow." in text
    assert "Together they cost 21 steps, 3.4 s (17.5% of the work)." in text
    assert "The loss fell from 3 to 1.5" in text


@pytest.mark.parametrize(
    ("page", "state", "words"),
    [
        (None, "open", "has no recorded end: it is still running, or it was killed"),
        ({}, "finished", "and finished."),
        ({"exit_reason": "nan", "exit_code": 41}, "stopped", "(exit code 41 BUDGET_SPENT)"),
        ({"exit_reason": "exception", "exit_code": 1}, "stopped", "by an error (exit code 1)"),
        ({"exit_reason": "\x1b[2J"}, "stopped", "ended (\ufffd[2J)"),
    ],
)
def test_how_the_run_ended_is_told(tmp_path, page, state, words):
    write(tmp_path / "metrics.jsonl", calm_metrics(100))
    if page is not None:
        postmortem(tmp_path, **page)
    summary = summarise(read_run(tmp_path))
    assert (summary["state"], words in summary["sentences"][0]) == (state, True)
    assert "No incidents" in summary["sentences"][1]


def test_a_rank_without_an_ending_is_named(tmp_path):
    sick_run(tmp_path, ranks=3)
    (tmp_path / "postmortem.rank1.json").unlink()
    first = summarise(read_run(tmp_path))["sentences"][0]
    assert "3 ranks" in first
    assert first.endswith("and finished. No end was recorded by rank 1.")


def test_a_goal_not_reached_and_a_second_start_are_told(tmp_path):
    goal = {**started(), "event": "goal", "steps": 500}
    write(tmp_path / "events.jsonl", [started(), goal, started(seconds=5)])
    write(tmp_path / "metrics.jsonl", [metrics(9, [1.0] * 10)])
    first = summarise(read_run(tmp_path))["sentences"][0]
    assert "took 10 of 500 steps" in first
    assert "It was started 2 times." in first


def test_every_cause_has_a_title():
    titles = {title(cause.value) for cause in Cause}
    assert len(titles) == len(Cause)
    assert title("of_another_version") == "Of another version"


def test_nothing_that_is_shown_steers_a_terminal():
    assert clean("a\x1b[31m\u202eb\ud800\u2028c\nd") == "a\ufffd[31m\ufffdb\ufffd\ufffdc d"
    assert show({"a": [1.23456, "NaN", None, True]}) == "a 1.235, NaN, -, yes"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.5, "0.50 s"),
        (5, "5.0 s"),
        (99, "99 s"),
        (600, "10 min"),
        (7300, "2.0 h"),
        (2e5, "2.3 days"),
    ],
)
def test_durations_read_as_people_say_them(seconds, text):
    assert duration(seconds) == text


def test_an_anchor_and_the_alarm_of_a_probe_are_told_in_words():
    action = {"action": "AnchorWeights", "strength": 0.5, "steps": 100, "effect": True}
    told = action_words(action, None)
    assert told == "held the weights near the snapshot (strength 0.5, for 100 steps)"
    assert action_kind(action) == "soften"
    assert title("probe_alarm") == "A probe raised its alarm"


@pytest.mark.parametrize("action", actions.ACTIONS, ids=lambda action: action.__name__)
def test_every_action_has_a_phrase_of_its_own(action):
    assert action_words({"action": action.__name__}, None) != action.__name__
    assert action_kind({"action": action.__name__}) in KINDS


def test_steps_taken_before_a_halt_is_known_are_no_later_start(tmp_path):
    """Records come some steps late."""
    halt = trouble("nonfinite_loss", 399, act("Halt", reason="enough", exit_code=43))
    (ended,) = told(tmp_path, {**halt, "noticed_at": 402}, steps=402)
    assert (ended["outcome"], ended["outcome_text"]) == ("ended", "The run stopped here.")


def test_a_loss_that_is_back_at_its_start_is_said_to_have_learned_nothing(tmp_path):
    back = trouble("loss_spike", 1, act("Rollback", before_step=0), resumed_at=0)
    end = {"step": 104, "event": "outcome", "healed": False, "loss": 1.6, "loss_before": 1.6}
    (incident,) = told(tmp_path, back, {**back, **end, "has_learned": False})
    assert incident["outcome_text"] == (
        "Not recovered: 1.6 before, 1.6 after; nothing has been learned since the run began."
    )


@pytest.mark.parametrize(
    ("suspicion", "answer", "shown"),
    [
        ("not_learning", "other data", "that the weights have learned"),
        ("not_learning", "undecided", "that the weights have learned nothing"),
        ("loss_spike", "recovered", "damage that passed by itself"),
    ],
)
def test_an_experiment_is_said_to_have_shown_what_it_has_shown(tmp_path, suspicion, answer, shown):
    told(tmp_path, experiment(60, suspicion, answer, 2.0, 2.0, snapshots=[50, 30]))
    report = read_run(tmp_path)
    assert f"1 experiment: 1 showed {shown}." in summarise(report)["sentences"]
    text = " ".join(make_text(report, to_terminal=False).split())
    assert f"Experiment: {shown}. On the same batch" in text
    assert "with those of step 30." in text  # whose losses these are


@pytest.mark.parametrize(("healed", "outcome"), [(True, "healed"), (False, "unhealed")])
def test_healed_means_that_the_loss_came_back(tmp_path, healed, outcome):
    back = trouble("loss_spike", 40, act("Rollback", before_step=30), resumed_at=30)
    end = {"step": 90, "event": "outcome", "healed": healed, "loss": 13.4, "loss_before": 3.0}
    later = trouble("plateau", 80)
    incident = told(tmp_path, back, {**later, **end}, later)[0]
    assert incident["outcome"] == outcome
    assert incident["outcome_text"].endswith(": 3 before, 13.4 after.")
    assert (incident["loss_before"], incident["loss_after"]) == (3.0, 13.4)


def experiment(step, suspicion, answer, now, old, **more):
    line = {**started(), "event": "experiment", "step": step, "suspicion": suspicion}
    compared = {"losses_now": [now], "losses_old": [old], "snapshots": [30]}
    return {**line, "answer": answer, "since": 30, "why": "because", **compared, **more}


def test_an_experiment_is_shown_with_its_incident_and_by_itself(tmp_path):
    damaged = experiment(60, "loss_spike", "damaged", 9.5, 3.25)
    act_on = trouble("loss_spike", 58, ROLLBACK, resumed_at=30)
    other = experiment(150, "divergence", "other data", 4.0, 4.5)
    lines = [damaged, {**damaged, "rank": 1}, act_on, other]
    (incident,) = told(tmp_path, *lines)
    (text,) = incident["experiments"]
    assert text == (
        "Experiment: damaged weights. On the same batch the loss was 9.5 with the current weights "
        "and 3.25 with those of step 30."
    )
    sentences = summarise(read_run(tmp_path))["sentences"]
    assert "2 experiments: 1 showed damaged weights, 1 showed other data." in sentences
    text, _, _ = make_page(read_run(tmp_path)).partition('<script type="application/json"')
    assert text.count("Experiment: damaged weights.") == 2  # at its incident, and in the table
    assert "Experiment: other data." in make_text(read_run(tmp_path), to_terminal=False)


def test_an_experiment_of_nonsense_is_readable(tmp_path):
    odd = experiment(60, None, ["x"], {}, "x", losses_old=5, snapshots=None)
    told(tmp_path, odd)
    assert "Experiment: " in make_page(read_run(tmp_path))


def test_an_outcome_belongs_to_the_incident_that_it_names(tmp_path):
    back = [trouble("loss_spike", s, ROLLBACK, resumed_at=s - 10) for s in (40, 120)]
    ends = [
        {**started(), "event": "outcome", "first_step": f, "healed": h, "loss": 5, "loss_before": 3}
        for f, h in ((40, False), (120, True))
    ]
    found = told(tmp_path, *back, *ends)
    assert [i["outcome"] for i in found] == ["unhealed", "healed"]
    assert "2 incidents: 1 healed, 1 not recovered." in summarise(read_run(tmp_path))["sentences"]


def test_a_nan_loss_names_no_tensor(tmp_path):
    bad_loss = trouble("nonfinite_loss", 40, act("Refuse"))
    bad_gradient = trouble("nonfinite_gradient", 90, act("Refuse"))
    told(tmp_path, bad_loss, bad_gradient)
    (entry,) = worst_tensors(read_run(tmp_path))
    assert entry["failures"] == {"nonfinite_gradient": 1}


@pytest.mark.parametrize("name", ["logging_failed", "telling_failed"])  # the latter until 0.1
def test_a_recovery_that_could_not_be_logged_is_shown_under_both_of_its_names(tmp_path, name):
    failed = {**started(seconds=3), "event": name, "step": 7, "error": "OSError('full')"}
    told(tmp_path, failed, steps=20)
    assert "OSError(" in make_page(read_run(tmp_path))
