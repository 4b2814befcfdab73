"""Snapshots: what is in them, what they cost, and that they give back the same bytes."""

import pytest
import torch
from torch import nn

import zclip
from heal.snapshots import SnapshotCorrupt, SnapshotRing, is_due
from heal.training_state import RngState, StateMismatch, TrainingState, copied
from tests.heal.state.snapshot_states import OPTIMIZERS, assert_same, build, bytes_of, take, train


@pytest.mark.filterwarnings("ignore:.*is not fused")
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("warm", [0, 4], ids=["before any step", "after four"])
def test_a_rollback_replays_to_the_byte(optimizer, warm):
    state, ring = build(optimizer)
    train(state, warm)
    assert take(state, ring, warm)
    at_capture = bytes_of(state)
    train(state, 6)
    expected = bytes_of(state)
    ring.note_clean(warm), ring.note_clean(warm + 1)
    train(state, 3)

    snapshot = ring.take(warm)
    state.restore(snapshot.tensors, snapshot.values)
    snapshot.values["rng"].put_back()
    assert_same(bytes_of(state), at_capture)
    train(state, 6)
    assert_same(bytes_of(state), expected)


def test_optimizer_state_that_was_lost_is_made_again():
    state, ring = build()
    train(state, 3)
    take(state, ring, 3)
    ring.note_clean(3), ring.note_clean(4)
    expected = bytes_of(state)
    state.optimizers[0].state.clear()
    snapshot = ring.take(3)
    state.restore(snapshot.tensors, snapshot.values)
    assert_same(bytes_of(state), expected)


def test_a_snapshot_is_good_only_after_its_quarantine():
    state, ring = build(quarantine_steps=3)
    take(state, ring, 10)
    ring.note_clean(9)  # a step before the snapshot says nothing about it
    ring.note_clean(10)
    assert ring.good_steps() == []
    ring.note_clean(11)
    assert ring.good_steps() == [10]


def test_quarantines_are_a_quarter_of_the_steps_at_first_and_then_as_set():
    ring = SnapshotRing(interval=100, count=4, memory_fraction=4.0, quarantine_steps=20)
    assert [ring.quarantine_of(step) for step in (0, 1, 4, 8, 16, 64, 80, 500)] == [
        *(1, 1, 1, 2, 4, 16, 20, 20)
    ]


def test_snapshots_are_due_at_powers_of_two_and_then_at_every_interval():
    ring = SnapshotRing(interval=50, count=4, memory_fraction=4.0, quarantine_steps=20)
    due = [step for step in range(201) if is_due(step, ring.interval)]
    assert due == [0, 1, 2, 4, 8, 16, 32, 50, 100, 150, 200]


def test_nothing_taken_since_a_suspicion_is_good_until_it_is_settled():
    state, ring = build(quarantine_steps=3)
    take(state, ring, 10)
    take(state, ring, 12)
    for step in range(10, 13):
        ring.note_clean(step)
    ring.note_suspect(11)  # 10 is from before it
    for step in range(13, 20):
        ring.note_clean(step)
    assert ring.good_steps() == [10]
    assert ring.is_suspect
    ring.note_settled()
    assert not ring.is_suspect
    assert ring.good_steps() == [10]  # the quarantine of 12 begins anew
    for step in range(20, 23):
        ring.note_clean(step)
    assert ring.good_steps() == [12, 10]


def test_an_older_suspicion_is_not_forgotten_for_a_newer_one():
    state, ring = build(quarantine_steps=1)
    take(state, ring, 10)
    ring.note_suspect(5)
    ring.note_suspect(15)
    ring.note_clean(10)
    assert ring.good_steps() == []


def test_the_state_that_training_begins_with_needs_no_quarantine():
    state, ring = build(quarantine_steps=3)
    take(state, ring, 0, is_proven=True)
    ring.note_suspect(0)  # what happened, happened after
    assert ring.good_steps() == [0]


@pytest.mark.parametrize("is_proven", [False, True])
def test_a_state_with_a_nan_is_never_promoted(is_proven):
    state, ring = build(quarantine_steps=1)
    with torch.no_grad():
        state.model.head.bias[2] = torch.nan
    take(state, ring, 0, is_proven=is_proven)
    ring.note_clean(0)
    assert ring.good_steps() == []
    assert ring.newest_step() is None


@pytest.mark.parametrize("ruin", [torch.nan, torch.inf])
def test_running_statistics_that_are_ruined_are_never_promoted(ruin):
    state, ring = build(quarantine_steps=1)
    state.model.norm.running_var[2] = ruin
    take(state, ring, 0, is_proven=True)
    assert ring.good_steps() == []


@pytest.mark.parametrize("bit", range(0, 32, 5))
def test_a_flipped_bit_is_found_and_the_snapshot_dropped(bit):
    state, ring = build(quarantine_steps=0)
    take(state, ring, 0)
    ring.note_clean(0)
    copies = ring._kept[0].tensors
    copies["parameter", "embed.weight"].view(torch.int32)[1, 2] ^= 1 << bit
    with pytest.raises(SnapshotCorrupt, match=r"parameter embed\.weight"):
        ring.take(0)
    assert ring.good_steps() == []


def test_ages_are_geometric():
    _, ring = build(interval=10, count=4, memory_fraction=4.0, quarantine_steps=0)
    tensors = {("extra", "x"): torch.ones(3)}
    spans = []
    for step in range(0, 5000, 10):
        ring.capture(step, tensors, {})
        ring.note_clean(step)
        if step > 1000:
            good = ring.good_steps()
            assert len(good) == 4
            spans.append(good[0] - good[-1])
    assert min(spans) > 6 * 10
    assert max(spans) < 100 * 10


def test_the_last_good_snapshot_is_not_given_up_for_an_unproven_one():
    _, ring = build(interval=1, quarantine_steps=3)
    tensors = {("extra", "x"): torch.ones(3)}
    ring.capture(0, tensors, {})
    for step in range(3):
        ring.note_clean(step)
    for step in range(3, 30):
        ring.capture(step, tensors, {})
        assert ring.good_steps() == [0]


def test_the_newest_good_snapshot_is_never_older_than_an_interval_and_a_quarantine():
    ring = SnapshotRing(interval=50, count=4, memory_fraction=4.0, quarantine_steps=10)
    for step in range(1500):
        if is_due(step, ring.interval):
            ring.capture(step, {("extra", "x"): torch.ones(3)}, {}, is_proven=step == 0)
        good = ring.good_steps()
        assert step - good[0] <= min(50 + 10, step * 5 // 8 + 1)
        assert step < 10 or len(good) >= 3  # ages to choose from, while one is in quarantine
        ring.note_clean(step)


def test_snapshots_that_come_faster_than_they_are_proven_still_become_good():
    _, ring = build(interval=2, quarantine_steps=10)
    tensors = {("extra", "x"): torch.ones(3)}
    for step in range(60):
        if step % 2 == 0:
            ring.capture(step, tensors, {})
        ring.note_clean(step)
    assert ring.good_steps()[0] > 35


@pytest.mark.parametrize(("interval", "quarantine_steps"), [(10, 10), (10, 0), (7, 2), (50, 10)])
def test_a_good_snapshot_from_before_the_last_sound_check_is_kept(interval, quarantine_steps):
    _, ring = build(interval=interval, quarantine_steps=quarantine_steps)
    tensors = {("extra", "x"): torch.ones(3)}
    checked, newest = None, []
    for step in range(1000):
        if step and step % 100 == 0:
            checked = step
            ring.note_checked(step)
        if step % interval == 0:
            ring.capture(step, tensors, {}, is_proven=step == 0)
        ring.note_clean(step)
        good = ring.good_steps()
        assert checked is None or good[-1] <= checked
        newest.append(step - good[0])
    assert len(set(newest)) > 1
    assert max(newest) <= 100 + 2 * interval + quarantine_steps


def test_checks_leave_ages_geometric_where_several_snapshots_are_sound():
    # A failure that creeps for a hundred steps has to find a snapshot from before it.
    assert oldest_ages(checked=True) == oldest_ages(checked=False)


def oldest_ages(checked):
    _, ring = build(interval=50, quarantine_steps=10)
    ages = []
    for step in range(1000):
        if checked and step and step % 100 == 0:
            ring.note_checked(step)
        if step % 50 == 0:
            ring.capture(step, {("extra", "x"): torch.ones(3)}, {}, is_proven=step == 0)
        ring.note_clean(step)
        ages.append(step - ring.good_steps()[-1])
    return ages


def test_values_that_steps_may_change_are_copied():
    inside = [0.9, 0.95]
    held = copied((1, inside))
    inside[0] = 0.0
    assert held == (1, [0.9, 0.95])
    assert copied((0.9, 0.999)) == (0.9, 0.999)


def test_a_run_that_has_other_parameters_is_left_untouched():
    state, ring = build(quarantine_steps=0)
    take(state, ring, 0)
    ring.note_clean(0)
    state.model.extra = nn.Linear(2, 2)
    before = bytes_of(state)
    snapshot = ring.take(0)
    with pytest.raises(StateMismatch, match="parameter"):
        state.restore(snapshot.tensors, snapshot.values)
    assert_same(bytes_of(state), before)


def test_a_cache_made_in_the_first_forward_does_not_stop_a_rollback():
    state, ring = build(quarantine_steps=0)
    take(state, ring, 0)
    ring.note_clean(0)
    state.model.register_buffer("cache", torch.ones(5), persistent=False)
    state.model.norm.running_mean = torch.zeros(9)  # replaced by one of another size
    snapshot = ring.take(0)
    state.restore(snapshot.tensors, snapshot.values)
    assert state.model.norm.running_mean.shape == (6,)


def test_reading_the_generators_draws_nothing_from_them():
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    state = RngState.now()
    assert torch.equal(torch.rand(4), expected)
    state.put_back()
    assert torch.equal(torch.rand(4), expected)


def test_a_scaler_that_had_no_scale_yet_has_none_again():
    model = nn.Linear(2, 2)
    optimizer = zclip.wrap(torch.optim.SGD(model.parameters(), lr=0.1, fused=True), "zclip")
    scaler = torch.amp.GradScaler("cpu")
    state = TrainingState(model, [optimizer], [], scaler)
    young = ({k: t.clone() for k, t in state.tensors().items()}, state.values())
    scaler.scale(model(torch.ones(1, 2)).sum()).backward()
    scaler.step(optimizer)
    scaler.update(64.0)
    old = ({k: t.clone() for k, t in state.tensors().items()}, state.values())
    state.restore(*young)
    assert scaler.get_scale() == 65536.0
    state.restore(*old)
    assert scaler.get_scale() == 64.0


@pytest.mark.parametrize("place", [0, (1 << 18) - 1, 1 << 18, (1 << 19) + 5])
def test_a_change_in_any_piece_of_a_large_tensor_is_found_and_named(place):
    large, transposed = torch.randn((1 << 19) + 6), torch.randn(600, 700).t()
    tensors = {("parameter", 0): large, ("parameter", 1): transposed}
    ring = SnapshotRing(1, 2, 2.0, 0)
    assert ring.capture(1, tensors, {})
    ring.note_clean(1)
    snapshot = ring.take(1)  # intact
    for key, tensor in tensors.items():
        assert torch.equal(snapshot.tensors[key], tensor)
    snapshot.tensors["parameter", 0][place] += 1.0
    with pytest.raises(SnapshotCorrupt, match="parameter 0 changed"):
        ring.take(1)


def test_nan_in_the_last_piece_of_a_large_tensor_keeps_a_snapshot_from_being_good():
    large = torch.randn((1 << 19) + 6)
    large[-1] = float("nan")
    ring = SnapshotRing(1, 2, 2.0, 0)
    ring.capture(1, {("parameter", 0): large}, {})
    ring.note_clean(1)
    assert ring.good_steps() == []
