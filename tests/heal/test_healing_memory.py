"""What healing knows goes with a checkpoint whole, whoever writes it."""

import json

import pytest
import torch

from tests.heal.linear_run import LAG, build, heard_of, nan_step, step_of


def healed_run():
    """A run with something to remember: clipping, detectors, a lowered rate, an attempt."""
    model, _, healer = build(nan_patience=2, snapshot_interval=5, quarantine_steps=2)
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
    saved = old.parts.memory.state_dict()
    _, _, new = build(nan_patience=2, snapshot_interval=5, quarantine_steps=2)
    assert plain(new.parts.memory.state_dict()) != plain(saved)
    new.parts.memory.load_state_dict(saved)
    assert plain(new.parts.memory.state_dict()) == plain(saved)
    assert new.last_step == old.last_step
    assert new.lr_scale == old.lr_scale
    assert new.optimizers[0].lr_scale == old.lr_scale


def test_all_that_may_be_read_was_heard_before_it_is_saved():
    model, _, healer = build()
    step_of(model, healer, 20)
    assert heard_of(healer) < 20 - LAG  # nobody has asked: the rest of the mail waits
    healer.parts.memory.values()
    assert heard_of(healer) == 20 - LAG


def test_what_was_saved_does_not_change_when_the_run_goes_on():
    model, _, healer = build()
    step_of(model, healer, 5)
    saved = healer.parts.memory.state_dict()
    before = plain(saved)
    step_of(model, healer, 5)
    assert plain(saved) == before


def test_another_version_is_refused_before_anything_is_changed():
    old, (_, _, new) = healed_run(), build()
    before = plain(new.parts.memory.state_dict())
    with pytest.raises(ValueError, match="version 1; wanted 2"):
        new.parts.memory.load_state_dict({**old.parts.memory.state_dict(), "version": 1})
    assert plain(new.parts.memory.state_dict()) == before
