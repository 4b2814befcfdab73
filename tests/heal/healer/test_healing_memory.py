"""What healing knows goes with a checkpoint whole, whoever writes it."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from heal.actions import ScaleLr, SkipBatches, TightenClip
from heal.causes import Cause, Finding, Severity
from heal.exit_codes import ExitCode
from heal.json_lines import plain as plain_value
from heal.monitor import Seen
from tests.heal.linear_run import LAG, build, nan_step, observed, step_of
from tests.heal.runs import roll_back_after_skipped


def healed_run():
    """A run with something to remember: clipping, detectors, a lowered rate, an attempt."""
    model, _, healer = build(snapshot_interval=5, quarantine_steps=2)
    roll_back_after_skipped(healer, patience=2)
    step_of(model, healer, 12)
    nan_step(model, healer)
    nan_step(model, healer)
    step_of(model, healer, 12)
    assert healer.lr_scale < 1
    return healer


def plain(state):
    """The state with tensors as lists, to be compared; NaN equals NaN as text."""
    return json.dumps(state, default=torch.Tensor.tolist, sort_keys=True)


def test_a_new_healer_knows_all_that_the_old_one_did():
    old = healed_run()
    saved = old.memory.state_dict()
    _, _, new = build(snapshot_interval=5, quarantine_steps=2)
    assert plain(new.memory.state_dict()) != plain(saved)
    new.memory.load_state_dict(saved)
    assert plain(new.memory.state_dict()) == plain(saved)
    assert new.last_step == old.last_step
    assert new.lr_scale == old.lr_scale
    assert new.optimizers[0].lr_scale == old.lr_scale


def test_all_that_may_be_read_was_heard_before_it_is_saved():
    model, _, healer = build()
    step_of(model, healer, 20)
    assert observed(healer) < 20 - LAG  # nobody has asked: the rest of the mail waits
    healer.memory.values()
    assert observed(healer) == 20 - LAG


def test_what_was_saved_does_not_change_when_the_run_goes_on():
    model, _, healer = build()
    step_of(model, healer, 5)
    saved = healer.memory.state_dict()
    before = plain(saved)
    step_of(model, healer, 5)
    assert plain(saved) == before


def test_another_version_is_refused_before_anything_is_changed():
    old, (_, _, new) = healed_run(), build()
    before = plain(new.memory.state_dict())
    with pytest.raises(ValueError, match="expected version 2, got 1"):
        new.memory.load_state_dict({**old.memory.state_dict(), "version": 1})
    assert plain(new.memory.state_dict()) == before


@pytest.mark.parametrize("torn", ["clip", "loss", "history", "healing", "run", "step"])
def test_what_cannot_be_used_leaves_no_half_of_it(torn):
    old, (_, _, new) = healed_run(), build()
    before = plain(new.memory.state_dict())
    saved = old.memory.state_dict()
    del saved[torn]
    with pytest.raises(KeyError, match=torn):
        new.memory.load_state_dict(saved)
    assert plain(new.memory.state_dict()) == before
    assert new.optimizers[0].lr_scale == 1.0


@pytest.mark.parametrize("half", [np.float64(0.5), np.float32(0.5), torch.tensor(0.5)], ids=repr)
def test_numbers_that_a_hook_computed_can_be_read_again_without_running_code(half, tmp_path):
    model, _, healer = build()
    answer = TightenClip(half), ScaleLr(half), SkipBatches(np.int64(3), np.int64(4))
    healer.on_instability(lambda diagnosis, plan: answer if diagnosis.streak == 2 else None)
    step_of(model, healer, 5)
    nan_step(model, healer)
    nan_step(model, healer)
    step_of(model, healer, 5)
    torch.save(healer.memory.state_dict(), tmp_path / "healing.pt")
    _, _, new = build()
    new.memory.load_state_dict(torch.load(tmp_path / "healing.pt", weights_only=True))
    assert new.lr_scale == healer.lr_scale == pytest.approx(0.5, abs=0.1)
    ((tried,),) = [incident.plans for incident in new.recovery.history.incidents]
    assert [action["action"] for action in tried] == ["TightenClip", "ScaleLr", "SkipBatches"]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (np.int64(3), 3),
        (ExitCode.PREEMPTED, int(ExitCode.PREEMPTED)),
        (True, True),
        (None, None),
        ({"a": (np.float32(0.5), "b")}, {"a": [0.5, "b"]}),
        (np.arange(2), [0, 1]),
    ],
)
def test_plain_values_are_those_of_json(value, expected):
    found = plain_value(value)
    assert found == expected
    assert type(found) is type(expected)
    assert json.loads(json.dumps(found)) == expected


def test_what_was_found_while_saving_is_treated_after_the_resume():
    """The detector that found it has told it, and will not tell it again."""
    model, _, healer = build()
    step_of(model, healer, 5)
    found = Finding(
        cause=Cause.PLATEAU,
        step=3,
        bad_step=2,
        severity=Severity.WARN,
        evidence={"level": np.float32(0.5)},
    )
    healer.recovery.late = [Seen(3, [found, replace(found, cause=Cause.OVERFITTING)])]
    saved = json.loads(json.dumps(healer.memory.state_dict()["untreated"]))
    model, _, new = build()
    new.memory.load_state_dict({**healer.memory.state_dict(), "untreated": saved})
    assert not new.history
    step_of(model, new)
    assert [diagnosis.cause for _, diagnosis, _ in new.history] == [Cause.PLATEAU]
    assert new.history[0][1].evidence["level"] == 0.5


def test_batches_in_pieces_grow_back_when_they_would_have():
    _, _, healer = build(incident_steps=1)
    _, _, new = build(incident_steps=1)
    old, young = healer.micro, new.micro
    assert old.shrink()
    assert old.shrink()
    for _ in range(26):  # ten for the first growth, of twenty for the second
        old.note_clean()
    new.memory.resume(5, healer.memory.values())
    counts = []
    for _ in range(5):
        for micro in (old, young):
            micro.note_clean()
        counts.append((old.pieces, young.pieces))
    assert counts == [(2, 2), (2, 2), (2, 2), (1, 1), (1, 1)]


def test_a_note_of_a_run_is_of_its_step():
    model, _, healer = build()
    told = []
    healer.journal.event = lambda event, step, **fields: told.append((event, step))
    step_of(model, healer, 7)
    healer.note("the run is odd")
    assert ("note", 7) in told
