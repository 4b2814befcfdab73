"""Rollbacks to the byte, learning rates, hooks, budgets, exits: the loop as a whole."""

import json
import math
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from heal import HealingConfig
from heal.actions import (
    Rollback,
)
from heal.exit_codes import ExitCode
from heal.testing import Chaos, Fault
from tests.heal.runs import (
    QUICK,
    assert_same,
    fingerprint,
    mlp,
    regression,
    roll_back_after_skipped,
    strike,
)

lr = torch.optim.lr_scheduler


def roll_back_only(diagnosis, plan):
    """A hook: go back, and change nothing that the bare run would not have."""
    return tuple(action for action in plan if isinstance(action, Rollback)) or None


@pytest.mark.parametrize("workers", [0, 2])
def test_a_replayed_rollback_is_bit_exact_over_two_hundred_further_steps(workers):
    bare = regression(workers=workers, after_rollback="replay_data")
    bare.bare(270)
    healed = regression(workers=workers, after_rollback="replay_data")
    healer = healed.healer()
    healer.on_instability(roll_back_only)
    strike(healed, [Fault("corrupt_weight", at=57)], 270, healer)
    assert [type(a) for _, _, plan in healer.history for a in plan].count(Rollback) == 1
    assert_same(fingerprint(healed), fingerprint(bare))


def test_a_replayed_rollback_of_accumulated_steps_and_schedules_is_bit_exact():
    def build():
        setup = regression(after_rollback="replay_data")
        setup.scheduler = lr.CosineAnnealingWarmRestarts(setup.optimizer, 15)
        return setup

    whole = build()
    healer = whole.healer()
    healer.run(whole.train_step, whole.loader, 60, accumulate=3, progress=False)
    healed = build()
    healer = healed.healer()
    healer.on_instability(roll_back_only)
    chaos = Chaos(healer, [Fault("corrupt_weight", at=33)])
    healer.run(chaos.wrap(healed.train_step), healed.loader, 60, accumulate=3, progress=False)
    assert any(isinstance(a, Rollback) for _, _, plan in healer.history for a in plan)
    assert_same(fingerprint(healed), fingerprint(whole))


SCHEDULERS = {
    "LambdaLR": lambda o: lr.LambdaLR(o, lambda s: 1 / (1 + 0.1 * s)),
    "MultiplicativeLR": lambda o: lr.MultiplicativeLR(o, lambda s: 0.97),
    "StepLR": lambda o: lr.StepLR(o, 7, 0.5),
    "MultiStepLR": lambda o: lr.MultiStepLR(o, [10, 28, 33], 0.5),
    "ConstantLR": lambda o: lr.ConstantLR(o, 0.3, 25),
    "LinearLR": lambda o: lr.LinearLR(o, 0.1, 1.0, 40),
    "ExponentialLR": lambda o: lr.ExponentialLR(o, 0.95),
    "PolynomialLR": lambda o: lr.PolynomialLR(o, 60, 2.0),
    "CosineAnnealingLR": lambda o: lr.CosineAnnealingLR(o, 23),
    "CosineAnnealingWarmRestarts": lambda o: lr.CosineAnnealingWarmRestarts(o, 9, 2),
    "CyclicLR": lambda o: lr.CyclicLR(o, 1e-4, 1e-2, 6, cycle_momentum=False),
    "OneCycleLR": lambda o: lr.OneCycleLR(o, 1e-2, total_steps=80),
    "SequentialLR": lambda o: lr.SequentialLR(
        o, [lr.LinearLR(o, 0.1, 1.0, 12), lr.CosineAnnealingLR(o, 40)], [12]
    ),
    "ChainedScheduler": lambda o: lr.ChainedScheduler(
        [lr.LinearLR(o, 0.1, 1.0, 12), lr.ExponentialLR(o, 0.98)]
    ),
}


@pytest.mark.filterwarnings("ignore:.*epoch parameter in `scheduler.step")
@pytest.mark.parametrize("name", SCHEDULERS)
def test_after_a_rollback_the_learning_rate_is_the_factor_times_the_schedule(name):
    def run(disturb):
        setup = regression()
        setup.scheduler = SCHEDULERS[name](setup.optimizer)
        healer, seen = setup.healer(), []
        setup.optimizer.register_step_pre_hook(
            lambda o, args, kwargs: seen.append((healer.last_step + 1, o.param_groups[0]["lr"]))
        )

        def on_step(step):
            if disturb and step == 33 and len(seen) == 34:
                healer.training.restore(healer.snapshots()[0])
                healer.training.scale_lr(0.5, 0.01, 10)

        healer.run(setup.train_step, setup.loader, 50, progress=False, on_step=on_step)
        return seen

    schedule = dict(run(disturb=False))
    seen = run(disturb=True)
    after = seen[34:]
    start = after[0][0]
    assert start < 33
    for i, (step, rate) in enumerate(after):
        factor = 0.5 + 0.5 * min(i, 10) / 10
        assert rate == pytest.approx(schedule[step] * factor, rel=1e-12)
        if i >= 10:
            assert rate == schedule[step]


def test_factors_compound_survive_rollbacks_and_keep_to_the_floor():
    setup = regression(lr_ramp_steps=50)
    healer = setup.run(30)
    run = healer.training
    for _ in range(3):
        run.scale_lr(0.5, 0.2, 50)
    assert run.lr_scale == 0.2
    run.restore(healer.snapshots()[0])
    assert run.lr_scale == 0.2
    assert setup.optimizer.param_groups[0]["lr"] == 3e-3


def test_a_rate_that_the_optimizer_finds_by_itself_is_not_lowered_and_that_is_noted():
    transformers = pytest.importorskip("transformers.optimization")
    setup = regression()
    params = setup.model.parameters()
    setup.optimizer = transformers.Adafactor(params, lr=None, relative_step=True, warmup_init=True)

    taken = iter(range(100))

    def train_step(batch):
        return setup.train_step(batch) * (float("nan") if next(taken) in (20, 21) else 1.0)

    healer = setup.healer()
    roll_back_after_skipped(healer, patience=2)
    healer.run(train_step, setup.loader, 60, progress=False)
    assert healer.last_step == 59
    (note,) = healer.notes
    assert "Adafactor has parameter groups whose lr is None" in note


def test_damage_long_after_a_rate_was_lowered_by_hand_does_not_undo_that():
    setup = regression(model=lambda: mlp(dropout=0.0))
    healer = setup.healer()

    @torch.no_grad()
    def scale_weights():
        for p in setup.model.parameters():
            p.mul_(100.0)

    due = {60: lambda: setup.optimizer.param_groups[0].update(lr=3e-4), 120: scale_weights}

    def train_step(batch):
        due.pop(healer.last_step + 1, lambda: None)()
        return setup.train_step(batch)

    healer.run(train_step, setup.loader, 160, progress=False)
    rollbacks = [a for *_, plan in healer.history for a in plan if isinstance(a, Rollback)]
    assert [action.before_step for action in rollbacks] == [120]
    assert setup.optimizer.param_groups[0]["lr"] == 3e-4


def test_a_tightened_clip_is_loosened_again():
    setup = regression(lr_ramp_steps=5)
    healer = setup.healer()
    healer.run(setup.train_step, setup.loader, 20, progress=False)
    clipper = healer.optimizers[0].clipper
    healer.training.tighten_clip(0.5)
    assert 0 < clipper.max_norm < math.inf
    healer.run(setup.train_step, setup.loader, 25, progress=False)
    assert clipper.max_norm == math.inf


@pytest.mark.parametrize("preset", [HealingConfig, HealingConfig.aggressive])
def test_a_bad_batch_is_not_a_bad_model_whatever_the_preset(preset):
    setup = regression()
    setup.config = preset(**QUICK, zclip_enabled=False)
    healer = setup.healer()

    def train_step(batch):  # experiments call it too
        is_bad = (healer.last_step + 1) % 20 in (10, 11)
        return setup.train_step(batch) * (float("nan") if is_bad else 1.0)

    healer.run(train_step, setup.loader, 100, progress=False)
    plans = {type(action).__name__ for _, _, plan in healer.history for action in plan}
    assert plans == {"Skip"}


def test_healing_that_fails_itself_is_left_out_and_said(monkeypatch):
    setup, bare = regression(), None
    healer = setup.healer()
    monkeypatch.setattr(healer.training, "capture", lambda is_proven: 1 / 0)
    monkeypatch.setattr(healer.monitor, "check_health", lambda: {}["nothing"])
    healer.run(setup.train_step, setup.loader, 40, progress=False)
    assert any("ZeroDivisionError" in note for note in healer.notes)
    healthy = regression()
    healthy.bare(40)
    assert bare is None
    for a, b in zip(setup.model.parameters(), healthy.model.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("at", [0, 1, 3])
def test_weights_that_break_in_the_first_steps_return_to_the_beginning(at):
    setup = regression()
    healer = setup.healer()
    strike(setup, [Fault("corrupt_weight", at=at)], 60, healer)
    assert all(p.isfinite().all() for p in setup.model.parameters())
    assert [step for step in healer.snapshots() if step] != []


def test_memory_that_was_short_once_is_tried_again_later():
    setup = regression(incident_steps=1)
    healer = setup.healer()
    strike(setup, [Fault("oom_forward", at=20, times=2)], 23, healer)
    assert healer.training.micro_batches == 4
    strike(setup, [], 80, healer)
    assert healer.training.micro_batches == 1


def test_an_oom_step_has_the_gradient_of_the_whole_batch():
    def build():
        setup = regression()
        setup.model[2].p = 0.0  # dropout draws other numbers for other shapes
        return setup

    whole = build()
    whole.run(30)
    cut = build()
    healer = strike(cut, [Fault("oom_backward", at=12), Fault("oom_forward", at=14)], 30)
    assert healer.training.micro_batches == 4
    for a, b in zip(whole.model.parameters(), cut.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_a_grad_scaler_that_searches_its_scale_is_no_alarm():
    def build():
        setup = regression()
        inner = setup.train_step
        setup.train_step = lambda batch: inner(batch) * 1000
        return setup

    setup = build()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=1000)
    healer = setup.healer(scaler=scaler)
    healer.run(setup.train_step, setup.loader, 60, progress=False)
    assert not any(plan for _, d, plan in healer.history if d.cause.value != "scaler_overflow")
    assert healer.lr_scale == 1.0
    assert scaler.get_scale() < 2.0**127
    bare = build()
    other = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=1000)
    done = 0
    while done < 60:
        for batch in bare.loader:
            bare.optimizer.zero_grad()
            other.scale(bare.train_step(batch)).backward()
            other.step(bare.optimizer)
            other.update()
            done += 1
            if done == 60:
                break
    assert other.get_scale() == scaler.get_scale()
    for a, b in zip(setup.model.parameters(), bare.model.parameters(), strict=True):
        assert torch.equal(a, b)


SCRIPT = """
import os, sys
from heal.actions import HealingError
from heal.testing import Chaos, Fault
from tests.heal.runs import regression
setup = regression()
healer = setup.healer(run_dir=sys.argv[2])
chaos = Chaos(healer, [Fault(sys.argv[1], at=20)])
try:
    healer.run(chaos.wrap(setup.train_step), setup.loader, 50, progress=False)
except HealingError as halt:
    sys.exit(halt.exit_code)
"""
HAND_WRITTEN = """
import sys
from tests.heal.runs import regression
setup = regression()
healer = setup.healer(run_dir=sys.argv[2])
for i, batch in enumerate(healer.batches(setup.loader)):
    loss = setup.train_step(batch)
    loss.backward()
    healer.step(loss)
    if i == 7:
        raise ValueError("in the user's loop")
"""


def in_a_process(script, fault, folder):
    root = Path(__file__).parent.parent.parent
    command = [sys.executable, "-c", textwrap.dedent(script), fault, str(folder)]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=120)


def test_sigterm_stops_after_a_step_with_its_own_exit_code(tmp_path):
    ended = in_a_process(SCRIPT, "sigterm", tmp_path)
    assert ended.returncode == ExitCode.PREEMPTED, ended.stderr
    page = json.loads((tmp_path / "postmortem.json").read_text())
    assert (page["exit_reason"], page["exit_code"]) == ("sigterm", ExitCode.PREEMPTED)
    assert 20 <= page["last_step"] <= 24


def test_sigkill_leaves_the_journal_whole(tmp_path):
    ended = in_a_process(SCRIPT, "sigkill", tmp_path)
    assert ended.returncode == -signal.SIGKILL
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[-1])["step"] == 19


def test_a_hand_written_loop_that_dies_leaves_a_postmortem(tmp_path):
    ended = in_a_process(HAND_WRITTEN, "-", tmp_path)
    assert "in the user's loop" in ended.stderr
    page = json.loads((tmp_path / "postmortem.json").read_text())
    assert (page["exit_reason"], page["last_step"]) == ("exception", 7)
    assert page["exception_type"] == "ValueError"
