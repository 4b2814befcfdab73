"""A killed run goes on bit by bit; a save that fails kills nothing; the last rung holds."""

import functools
import json
import math
import os
import resource
import signal
import threading

import pytest
import torch
from torchdata.stateful_dataloader import StatefulDataLoader

from heal.actions import HealingError, Rollback
from heal.checkpoint import saving
from heal.exit_codes import ExitCode
from heal.training_state import StateMismatch
from tests.forked import run_forked
from tests.heal.runs import assert_same, fingerprint, language, regression

STEPS = 40
SYNC = {"checkpoint_async": False, "checkpoint_keep": 9}


class Killed(BaseException):
    pass


def kill_at(step):
    def on_step(number):
        if number == step:
            raise Killed

    return on_step


def train(setup, folder, steps=STEPS, on_step=None, **options):
    healer = setup.healer(checkpoint_dir=folder)
    healer.exits.dismiss()
    first = healer.resume()
    healer.run(setup.train_step, setup.loader, steps, progress=False, on_step=on_step, **options)
    return first, healer


def stateful(seed=0, **config):
    setup = regression(seed, **config)
    setup.loader = StatefulDataLoader(setup.loader.dataset, batch_size=16, shuffle=True)
    return setup


def scheduled(seed=0, **config):
    setup = regression(seed, **config)
    setup.scheduler = torch.optim.lr_scheduler.OneCycleLR(setup.optimizer, 1e-2, 60)
    return setup


@pytest.mark.parametrize("build", [regression, language, stateful, scheduled])
@pytest.mark.parametrize(
    ("interval", "killed"),
    [(7, 22), (16, 20)],
    ids=["within an epoch", "at its end"],  # 16 batches are an epoch
)
def test_a_run_that_was_killed_ends_as_the_one_that_was_not(tmp_path, build, interval, killed):
    undisturbed = build(checkpoint_interval=interval, checkpoint_async=False)
    train(undisturbed, tmp_path / "other")
    expected = fingerprint(undisturbed)  # with the generators, which all runs share
    first = build(checkpoint_interval=interval, checkpoint_async=False)
    with pytest.raises(Killed):
        train(first, tmp_path / "own", on_step=kill_at(killed))
    again = build(seed=5, checkpoint_interval=interval, checkpoint_async=False)
    if build in (regression, scheduled):
        again.loader = first.loader  # the data itself comes from the seed too
    else:
        again.loader = type(first.loader)(first.loader.dataset, batch_size=16, shuffle=True)
    resumed_at, healer = train(again, tmp_path / "own")
    assert resumed_at == killed // interval * interval
    assert healer.notes == []
    assert_same(fingerprint(again), expected)


def test_accumulated_gradients_and_more_kills_than_one(tmp_path):
    undisturbed = regression(checkpoint_interval=3, checkpoint_async=False)
    train(undisturbed, tmp_path / "other", accumulate=2)
    expected = fingerprint(undisturbed)
    for killed in (4, 11, 12, 25, 33):
        again = regression(checkpoint_interval=3, checkpoint_async=False)
        with pytest.raises(Killed):
            train(again, tmp_path / "own", on_step=kill_at(killed), accumulate=2)
    again = regression(checkpoint_interval=3, checkpoint_async=False)
    assert train(again, tmp_path / "own", accumulate=2)[0] == 33
    assert_same(fingerprint(again), expected)


@pytest.mark.parametrize("asynchronous", [True, False])
def test_sigkill_in_the_midst_of_training_costs_nothing_but_time(tmp_path, asynchronous):
    undisturbed = regression(checkpoint_interval=2, checkpoint_async=asynchronous)
    train(undisturbed, tmp_path / "other")
    expected = fingerprint(undisturbed)

    def train_until(killed):
        def die(step):
            if step == killed:
                os.kill(os.getpid(), signal.SIGKILL)

        setup = regression(checkpoint_interval=2, checkpoint_async=asynchronous)
        train(setup, tmp_path / "own", on_step=die)

    for killed in (9, 23, 30):
        assert run_forked(functools.partial(train_until, killed)) == -signal.SIGKILL
    again = regression(checkpoint_interval=2, checkpoint_async=asynchronous)
    first, _ = train(again, tmp_path / "own")
    assert 0 < first <= 30
    assert_same(fingerprint(again), expected)


def test_saving_changes_nothing_about_a_healthy_run(tmp_path):
    bare = regression()
    bare.bare(STEPS)
    expected = fingerprint(bare)
    saved = regression(checkpoint_interval=5)
    train(saved, tmp_path)
    assert_same(fingerprint(saved), expected)


def test_the_end_of_a_run_is_saved_too_and_old_ones_go(tmp_path):
    _, healer = train(
        regression(checkpoint_interval=10, checkpoint_keep=2, checkpoint_async=False), tmp_path, 25
    )
    assert healer.durable.steps() == [25, 20]


def test_a_run_that_is_told_to_stop_saves_its_last_step_and_goes_on_from_there(tmp_path):
    undisturbed = regression()
    undisturbed.run(STEPS)
    expected = fingerprint(undisturbed)
    first = regression(checkpoint_interval=0)
    healer = first.healer(checkpoint_dir=tmp_path)
    healer.exits.dismiss()

    def stop(step):
        if step == 20:
            healer.request_stop()

    with pytest.raises(HealingError) as halt:
        healer.run(first.train_step, first.loader, STEPS, progress=False, on_step=stop)
    assert halt.value.exit_code == ExitCode.PREEMPTED
    again = regression(checkpoint_interval=0)
    resumed_at, _ = train(again, tmp_path)
    assert 20 < resumed_at < 26
    assert_same(fingerprint(again), expected)


def test_a_full_disk_is_told_and_training_goes_on(tmp_path):
    undisturbed = regression()
    undisturbed.run(STEPS)
    expected = fingerprint(undisturbed)
    limited = regression(checkpoint_interval=5, checkpoint_async=False)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    healer = limited.healer(checkpoint_dir=tmp_path / "c", run_dir=tmp_path / "journal")

    def fill(step):
        size = 2000 if step == 12 else before[0]
        if step in (12, 28):
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
            limited_journal.append(step)

    limited_journal: list[int] = []
    try:
        healer.run(limited.train_step, limited.loader, STEPS, progress=False, on_step=fill)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert limited_journal == [12, 28]
    assert_same(fingerprint(limited), expected)
    durable = healer.durable
    assert durable.failures >= 2
    assert any("checkpoint of step 15 failed" in note for note in healer.notes)
    assert durable.steps() == [40, 35, 30]
    for step in durable.steps():
        durable.store.verify(step)


def test_every_save_and_every_failure_is_in_the_journal(tmp_path):
    setup = regression(checkpoint_interval=10, checkpoint_async=False)
    healer = setup.healer(checkpoint_dir=tmp_path / "c", run_dir=tmp_path / "journal")
    healer.run(setup.train_step, setup.loader, 15, progress=False)
    (tmp_path / "c" / "step-000015" / "COMMIT").write_text("")
    again = regression(checkpoint_interval=10)
    healer = again.healer(checkpoint_dir=tmp_path / "c", run_dir=tmp_path / "journal")
    assert healer.resume() == 10
    assert any("step-000015 cannot be used" in note for note in healer.notes)
    healer.close()
    lines = (tmp_path / "journal" / "events.jsonl").read_text().splitlines()
    events = [(e["event"], e["step"]) for e in map(json.loads, lines)]
    assert ("checkpoint", 10) in events
    assert ("checkpoint", 15) in events
    assert ("resumed", 10) in events


def spoil_memory(healer):
    """Flip a bit in every snapshot in memory."""
    for snapshot in healer.training.ring._kept:
        tensor = next(t for key, t in snapshot.tensors.items() if key[0] == "parameter")
        tensor.view(torch.int32).view(-1)[0] ^= 1 << 10


def test_without_an_intact_snapshot_the_run_returns_to_its_checkpoint(tmp_path):
    undisturbed = regression(after_rollback="replay_data")
    undisturbed.run(60)
    expected = fingerprint(undisturbed)
    setup = regression(after_rollback="replay_data", checkpoint_interval=20, **SYNC)
    healer = setup.healer(checkpoint_dir=tmp_path)
    healer.exits.dismiss()
    healer.on_instability(lambda diagnosis, plan: plan[:1])  # the rollback, and nothing else
    broken = []

    def damage(step):
        if step == 34 and not broken:
            broken.append(step)
            healer.durable.finish()
            spoil_memory(healer)
            with torch.no_grad():
                next(setup.model.parameters()).view(-1)[0] = float("nan")

    healer.run(setup.train_step, setup.loader, 60, progress=False, on_step=damage)
    plans = [plan for _, _, plan in healer.history if any(isinstance(a, Rollback) for a in plan)]
    assert plans == [(Rollback(30),)]  # which is spoiled; that of step 20 is on the disk
    assert any("changed in host memory" in note for note in healer.notes)
    assert_same(fingerprint(setup), expected)


def test_damaged_checkpoints_are_passed_over_by_the_last_rung_too(tmp_path):
    setup = regression(after_rollback="replay_data", checkpoint_interval=10, **SYNC)
    healer = setup.healer(checkpoint_dir=tmp_path)
    healer.exits.dismiss()

    def damage(step):
        if step == 34:
            healer.durable.finish()
            spoil_memory(healer)
            for path in tmp_path.glob("step-*/rank-*"):
                path.write_bytes(b"")
            with torch.no_grad():
                next(setup.model.parameters()).view(-1)[0] = float("nan")

    with pytest.raises(HealingError) as halt:
        healer.run(setup.train_step, setup.loader, 60, progress=False, on_step=damage)
    assert halt.value.exit_code == ExitCode.NO_SNAPSHOT
    assert any("step-000030 cannot be used" in note for note in healer.notes)


def test_checkpoints_of_steps_that_were_taken_back_are_not_resumed_from(tmp_path):
    setup = regression(checkpoint_interval=10, **SYNC)
    healer = setup.healer(checkpoint_dir=tmp_path)
    healer.exits.dismiss()
    healer.run(setup.train_step, setup.loader, 35, progress=False)
    healer.training.restore(20)
    assert healer.durable.steps() == [20, 10]
    again = regression()
    assert again.healer(checkpoint_dir=tmp_path).resume() == 20


def test_what_healing_did_outlives_the_process(tmp_path):
    setup = regression(checkpoint_interval=0, zclip_enabled=True)
    healer = setup.healer(checkpoint_dir=tmp_path)
    healer.exits.dismiss()
    healer.run(setup.train_step, setup.loader, 10, progress=False)
    healer.training.scale_lr(0.5, 0.1, 20)
    healer.training.tighten_clip(0.5)
    healer.training.skip_batches(12, 13)
    healer.recovery.history.attempts = 3
    healer.save_checkpoint()
    other = regression(checkpoint_interval=0, zclip_enabled=True).healer(checkpoint_dir=tmp_path)
    other.exits.dismiss()
    assert other.resume() == 10
    assert other.lr_scale == 0.5
    assert other.optimizers[0].lr_scale == 0.5
    assert other.optimizers[0].clipper.max_grad_norm == healer.optimizers[0].clipper.max_grad_norm
    assert other.recovery.history == healer.recovery.history
    assert other.stream.unwanted() == healer.stream.unwanted() != []
    for each in (healer, other):
        for _ in range(30):
            each.training.advance()
    assert other.lr_scale == 1.0
    assert other.optimizers[0].clipper.max_grad_norm is None


def test_a_fresh_start_and_a_missing_folder(tmp_path):
    assert regression().healer(checkpoint_dir=tmp_path / "new").resume() == 0
    with pytest.raises(ValueError, match="no checkpoint_dir; give one to the Healer"):
        regression().healer().resume()


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    train(regression(), tmp_path, 5)
    with pytest.raises(StateMismatch, match="parameter"):
        language().healer(checkpoint_dir=tmp_path).resume()


def test_where_a_run_could_return_to_does_not_depend_on_the_speed_of_the_disk(
    tmp_path, monkeypatch
):
    allowed, real, found = threading.Event(), saving.write_shard, []

    def write_shard(*arguments):
        allowed.wait(300)
        real(*arguments)

    monkeypatch.setattr(saving, "write_shard", write_shard)
    setup = regression(checkpoint_interval=7, checkpoint_async=True)
    healer = setup.healer(checkpoint_dir=tmp_path)

    def look(step):
        if step == 6:
            found.append(list(healer.training.snapshots()))
            allowed.set()
            healer.durable.store.wait()
            found.append(list(healer.training.snapshots()))

    healer.run(setup.train_step, setup.loader, 9, progress=False, on_step=look)
    assert found[0] == found[1]
    assert 7 in found[0]


def test_a_rollback_to_the_beginning_reports_no_step_before_it():
    setup = regression(snapshot_interval=50, check_interval=1)
    numbers, is_spoilt = [], []
    beginning = lambda diagnosis, plan: (Rollback(0), *plan[1:]) if len(plan) > 1 else None  # noqa: E731

    def spoil(step):
        numbers.append(step)
        if step == 3 and not is_spoilt:
            is_spoilt.append(True)
            with torch.no_grad():
                next(setup.model.parameters()).fill_(math.nan)

    healer = setup.healer()
    healer.on_instability(beginning)
    healer.run(setup.train_step, setup.loader, 12, progress=False, on_step=spoil)
    assert any(isinstance(a, Rollback) for _, _, plan in healer.history for a in plan)
    assert min(numbers) == 0
    assert numbers.count(0) == 2
