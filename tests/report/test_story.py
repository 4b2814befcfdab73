import pytest

from heal import actions
from heal.causes import Cause
from heal.report.collect import read_run
from heal.report.data import summarise
from heal.report.story import KIND_OF_ACTION
from heal.report.words import action_words, clean, duration, show, title
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
    assert undone["actions"][1]["text"] == "returned to the snapshot of step 40"
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
    assert (live["outcome"], "not yet" in live["outcome_text"]) == ("open", True)
    postmortem(tmp_path, last_step=99)
    (over,) = read_run(tmp_path).incidents
    assert over["outcome_text"] == "The run ended before it could show."


def test_an_action_without_effect_is_told_so(tmp_path):
    (only,) = told(tmp_path, trouble("oom", 9, act("ShrinkBatch", halving=1, effect=False)))
    assert only["actions"][0]["text"].endswith("(without effect)")


def test_the_summary_tells_the_story(tmp_path):
    summary = summarise(read_run(sick_run(tmp_path)))
    text = " ".join(summary["sentences"])
    assert summary["state"] == "finished"
    assert "The run took 100 steps in 11.9 s and finished." in text.replace("12 s", "11.9 s")
    assert "It met trouble 3 times: gradients were not numbers; the loss was not a number" in text
    assert (
        "1 was rolled back, 1 was contained before any harm was done and 1 was only noted" in text
    )
    assert "cost 21 steps (17.5% of the work)" in text
    assert "The loss fell from 3 to 1.5" in text


@pytest.mark.parametrize(
    ("page", "state", "words"),
    [
        (None, "open", "has left no ending: it is still going, or it was killed"),
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
    assert "It met no trouble" in summary["sentences"][1]


def test_a_rank_without_an_ending_is_named(tmp_path):
    sick_run(tmp_path, ranks=3)
    (tmp_path / "postmortem.rank1.json").unlink()
    first = summarise(read_run(tmp_path))["sentences"][0]
    assert "3 ranks" in first
    assert first.endswith("and finished. Rank 1 left no ending.")


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
    assert KIND_OF_ACTION["AnchorWeights"] == "soften"
    assert title("probe_alarm") == "A probe raised its alarm"


@pytest.mark.parametrize("action", actions.ACTIONS, ids=lambda action: action.__name__)
def test_every_action_has_a_phrase_of_its_own(action):
    assert action_words({"action": action.__name__}, None) != action.__name__


@pytest.mark.parametrize(("healed", "outcome"), [(True, "healed"), (False, "unhealed")])
def test_healed_means_that_the_loss_came_back(tmp_path, healed, outcome):
    back = trouble("loss_spike", 40, act("Rollback", before_step=30), resumed_at=30)
    end = {"step": 90, "event": "outcome", "healed": healed, "loss": 13.4, "loss_before": 3.0}
    later = trouble("plateau", 80)
    incident = told(tmp_path, back, {**later, **end}, later)[0]
    assert incident["outcome"] == outcome
    assert "13.4" in incident["outcome_text"]
    assert "was 3 before" in incident["outcome_text"]
