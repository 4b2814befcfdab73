"""Calm records may wait, but not while a plan is made that depends on them."""

import pytest
import torch

from heal import HealingConfig
from heal.actions import Rollback
from heal.causes import Cause, Finding, Severity
from heal.monitor import Seen
from tests.heal.linear_run import LAG, build, nan_step, observed, step_of


class Finds:
    """A detector that finds one thing, in the record of its step."""

    def __init__(self, finding):
        self.finding = finding

    def observe(self, record):
        return self.finding if record.step == self.finding.step else None

    def state(self):
        return {}

    def load_state(self, state):
        pass


def divergence(step):
    severity = Severity.ERROR
    return Finding(
        cause=Cause.DIVERGENCE, step=step, bad_step=step - 1, severity=severity, evidence={}
    )


def plateau(step):
    severity = Severity.WARN
    return Finding(cause=Cause.PLATEAU, step=step, bad_step=step, severity=severity, evidence={})


@pytest.mark.parametrize(
    ("interval", "places", "check", "quarantine", "newest"),
    [(20, 1.0, 55, 10, 40), (20, 1.0, 95, 10, 80), (50, 2.0, 65, 10, 50), (5, 2.0, 39, 2, 35)],
)
def test_a_check_that_finds_damage_knows_of_every_clean_step(
    interval, places, check, quarantine, newest
):
    """The snapshot that it returns to is out of its quarantine only by records that waited."""
    model, optimizer, healer = build(
        snapshot_interval=interval,
        snapshot_memory_factor=places,
        check_interval=check,
        quarantine_steps=quarantine,
    )
    for step in range(check):
        if step == check - 1:
            optimizer.state[model.weight]["exp_avg"][0, 0] = float("nan")
        step_of(model, healer)
    ((at, _, plan),) = healer.history
    assert at == check
    assert Rollback(before_step=newest) in plan
    assert healer.last_step == newest - 1


def test_an_optimizer_that_fails_half_way_returns_to_the_newest_that_can_be_known_good():
    model, optimizer, healer = build(snapshot_interval=8, quarantine_steps=3)
    step_of(model, healer, 21)
    assert 16 not in healer.training.ring.good_steps()  # the records that prove it wait
    inner = optimizer.step

    def fails():
        inner()
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    with healer.attempt():
        healer.guarded.optimizers[0].inner.step = fails
        step_of(model, healer)
    rolled = [a for _, _, plan in healer.history for a in plan if isinstance(a, Rollback)]
    assert rolled
    assert healer.last_step == 15


def test_snapshots_returns_all_that_are_good():
    model, _, healer = build(snapshot_interval=8, quarantine_steps=3)
    step_of(model, healer, 13)
    assert healer.snapshots()[0] == 8
    assert healer.newest_snapshot().step == 8


def test_what_is_found_on_the_way_is_treated_in_the_next_step():
    model, _, healer = build(snapshot_interval=50)
    healer.add_detector("finds", Finds(divergence(25)))
    step_of(model, healer, 30)
    assert observed(healer) < 25
    healer.snapshots()  # polls, and must not change the run
    assert observed(healer) == 30 - LAG
    assert not healer.history
    assert healer.last_step == 29
    step_of(model, healer)
    ((_, diagnosis, _),) = healer.history
    assert diagnosis.step == 25


def test_a_snapshot_holds_what_detectors_know_of_every_step_before_it():
    model, _, healer = build(snapshot_interval=7, quarantine_steps=0)
    step_of(model, healer, 14)
    held = healer.training.ring.of_step(14).values["healing"]["counter"]["seen"]
    assert held == 14 - LAG


@pytest.mark.parametrize("interval", [10, 13, 50])
def test_a_check_that_raises_keeps_no_detector_from_observing(interval):
    model, _, healer = build(check_interval=interval)

    def raises(step):
        raise RuntimeError("no such measure")

    healer.monitor.health.post = raises
    step_of(model, healer, 120)
    healer.snapshots()  # polls the rest
    assert observed(healer) == 120 - LAG
    assert healer.guarded.mailbox.dropped == 0
    assert healer.notes == ["healing failed and was left out: RuntimeError('no such measure')"]


def test_detectors_that_raise_lose_no_more_than_those_records():
    model, _, healer = build()
    step_of(model, healer, 10)
    observe = healer.monitor.watch.observe_all
    healer.monitor.watch.observe_all = lambda records: 1 / 0
    step_of(model, healer, 30)
    healer.monitor.watch.observe_all = observe
    step_of(model, healer, 30)
    healer.snapshots()  # polls the rest
    assert healer.guarded.mailbox.dropped == 0
    assert 30 <= observed(healer) < 70 - LAG
    assert healer.latest.step == 69 - LAG


def test_checkpoints_are_saved_when_due_and_do_not_hurry_the_records(tmp_path):
    saves = {"checkpoint_interval": 16, "checkpoint_async": False}
    model, _, healer = build(tmp_path / "saved", **saves)
    step_of(model, healer, 15)
    assert observed(healer) < 15 - LAG  # the last ones wait
    step_of(model, healer, 18)
    assert healer.durable.store.steps() == [32, 16]
    assert observed(healer) == 32 - LAG


def test_what_was_found_in_steps_that_were_undone_is_forgotten():
    model, optimizer, healer = build(snapshot_interval=8, quarantine_steps=3)
    healer.add_detector("finds", Finds(divergence(18)))
    step_of(model, healer, 21)
    inner = optimizer.step

    def fails():
        optimizer.step = inner
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    with healer.attempt():
        optimizer.step = fails
        step_of(model, healer)
    model.zero_grad()
    step_of(model, healer)
    assert [diagnosis.cause for _, diagnosis, _ in healer.history] == [Cause.OUT_OF_MEMORY]


def test_trouble_soon_after_a_rollback_is_reported_at_once():
    model, optimizer, healer = build(snapshot_interval=8, quarantine_steps=3, check_interval=13)
    for step in range(13):
        if step == 12:
            optimizer.state[model.weight]["exp_avg"][0, 0] = float("nan")
        step_of(model, healer)
    assert healer.last_step == 7  # rolled back
    step_of(model, healer, 3)
    nan_step(model, healer)  # step 11
    step_of(model, healer, LAG)
    assert healer.history[-1][1].cause is Cause.NONFINITE_LOSS
    assert healer.history[-1][0] == 11 + LAG + 1


def test_parameters_that_freeze_have_a_snapshot_taken_in_that_step():
    model, _, healer = build()
    step_of(model, healer, 13)
    model.bias.requires_grad_(False)
    step_of(model, healer)
    assert healer.training.ring.newest_step() == 14


def test_the_hardware_is_looked_at_when_that_is_due(monkeypatch):
    monkeypatch.setattr(HealingConfig, "gpu_health_check_interval", 7)
    model, _, healer = build()
    looked = []
    healer.monitor.cluster._look_at_gpu = looked.append
    step_of(model, healer, 23)
    assert looked == [7, 14, 21]


def test_a_checkpoint_that_is_asked_for_holds_what_detectors_can_know(tmp_path):
    model, _, healer = build(tmp_path / "saved")
    step_of(model, healer, 17)
    healer.save_checkpoint()
    assert observed(healer) == 17 - LAG


def test_a_model_that_cannot_be_looked_at_keeps_no_detector_from_observing():
    model, _, healer = build()

    def raises():
        raise RuntimeError("no such shape")

    healer.state.has_changed_shape = raises
    step_of(model, healer, 45)
    assert healer.last_step == 44
    healer.snapshots()  # polls the rest
    assert observed(healer) == 45 - LAG
    assert "healing failed and was left out: RuntimeError('no such shape')" in healer.notes


def test_what_was_found_on_the_way_is_noted_when_the_run_ends():
    model, _, healer = build(snapshot_interval=50)
    healer.add_detector("finds", Finds(plateau(13)))
    step_of(model, healer, 17)
    healer.recovery.catch_up()
    healer.finish()
    assert (Cause.PLATEAU.value, 13) in healer.recovery.history.suspects


def test_what_was_found_is_kept_when_polling_fails():
    _, _, healer = build(snapshot_interval=50)
    healer.recovery.late = [Seen(13, [plateau(13)])]

    def raises(lag=None):
        raise RuntimeError("no mail")

    healer.guarded.mailbox.poll = raises
    healer.recovery.catch_up()
    assert [seen.step for seen in healer.recovery.late] == [13]
    assert "RuntimeError('no mail')" in healer.notes[0]


def test_a_detector_that_raises_keeps_no_other_from_observing():
    model, _, healer = build()

    class Raises:
        def observe(self, record):
            raise RuntimeError("no idea")

        def state(self):
            return {}

        def load_state(self, state):
            pass

    detectors = healer.monitor.watch.detectors
    healer.monitor.watch.detectors = {"first": Raises(), **detectors}
    step_of(model, healer, 45)
    healer.snapshots()  # polls the rest
    assert observed(healer) == 45 - LAG
    assert healer.notes == ["healing failed and was left out: RuntimeError('no idea')"]


def test_a_thaw_between_the_first_batch_and_the_first_step_is_in_the_first_snapshot():
    model, optimizer, healer = build()
    model.bias.requires_grad_(False)
    for batch in healer.batches([torch.ones(2, 4)] * 3):
        model.bias.requires_grad_(True)
        model(batch).square().mean().backward()
        healer.step()
        optimizer.zero_grad()
    assert healer.snapshots()[-1] == 0
    assert ("parameter", "bias") in healer.training.ring.of_step(0).tensors


def test_trouble_after_a_resume_in_the_midst_of_a_run_is_reported_in_time(tmp_path):
    model, _, healer = build(tmp_path / "saved")
    for step in range(70):
        step_of(model, healer)
        if step == 29:
            healer.save_checkpoint()
    assert healer.resume() == 30
    step_of(model, healer, 3)
    nan_step(model, healer)  # step 33
    step_of(model, healer, LAG)
    assert healer.history[-1][1].cause is Cause.NONFINITE_LOSS
    assert healer.guarded.mailbox.dropped == 0


def test_an_evaluation_is_compared_with_all_losses_that_can_be_known():
    model, _, healer = build()
    step_of(model, healer, 18)
    healer.observe_eval(1.0)
    assert observed(healer) == 18 - LAG


def test_no_snapshot_takes_the_place_of_one_that_an_open_suspicion_may_need():
    model, _, healer = build(snapshot_interval=8)
    step_of(model, healer, 13)
    before = healer.snapshots()
    ring = healer.training.ring
    ring.note_suspect(11)
    step_of(model, healer, 20)
    assert healer.snapshots() == before
    ring.note_settled()
    step_of(model, healer)
    assert ring.newest_step() == 34  # the one that was put off
