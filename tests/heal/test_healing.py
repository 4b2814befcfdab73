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
    Backoff,
    CannotHeal,
    ClearCache,
    Halt,
    Refuse,
    Rollback,
    ScaleLr,
    ShrinkBatch,
    SkipBatches,
)
from heal.chaos import Chaos, Fault
from heal.exceptions import qualified_name
from heal.exit_codes import ExitCode
from tests.heal.runs import QUICK, assert_same, fingerprint, regression

lr = torch.optim.lr_scheduler


def strike(setup, faults, steps, healer=None, **options):
    healer = healer or setup.healer(**options)
    chaos = Chaos(healer, faults)
    healer.run(chaos.wrap(setup.train_step), chaos.wrap_loader(setup.loader), steps, progress=False)
    return healer


def roll_back_only(diagnosis, plan):
    """A hook: go back, and change nothing that the bare run would not have."""
    return tuple(action for action in plan if isinstance(action, Rollback)) or None


@pytest.mark.parametrize("workers", [0, 2])
def test_a_replayed_rollback_is_bit_exact_over_two_hundred_further_steps(workers):
    bare = regression(workers=workers, data="replay")
    bare.bare(270)
    healed = regression(workers=workers, data="replay")
    healer = healed.healer()
    healer.on_instability(roll_back_only)
    strike(healed, [Fault("corrupt_weight", at=57)], 270, healer)
    assert [type(a) for _, _, plan in healer.history for a in plan].count(Rollback) == 1
    assert_same(fingerprint(healed), fingerprint(bare))


def test_a_replayed_rollback_of_accumulated_steps_and_schedules_is_bit_exact():
    def build():
        setup = regression(data="replay")
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
                healer.parts.run.restore(healer.snapshots()[0])
                healer.parts.run.scale_lr(0.5, 0.01, 10)

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
    run = healer.parts.run
    for _ in range(3):
        run.scale_lr(0.5, 0.2, 50)
    assert run.lr_scale == 0.2
    run.restore(healer.snapshots()[0])
    assert run.lr_scale == 0.2
    assert setup.optimizer.param_groups[0]["lr"] == 3e-3


def test_a_rate_that_the_optimizer_finds_by_itself_is_not_lowered_and_that_is_noted():
    transformers = pytest.importorskip("transformers.optimization")
    setup = regression(nan_patience=2)
    params = setup.model.parameters()
    setup.optimizer = transformers.Adafactor(params, lr=None, relative_step=True, warmup_init=True)

    taken = iter(range(100))

    def train_step(batch):
        return setup.train_step(batch) * (float("nan") if next(taken) in (20, 21) else 1.0)

    healer = setup.healer()
    healer.run(train_step, setup.loader, 60, progress=False)
    assert healer.last_step == 59
    (note,) = healer.notes
    assert "Adafactor has parameter groups whose lr is None" in note


def test_a_tightened_clip_is_loosened_again():
    setup = regression(lr_ramp_steps=5)
    healer = setup.healer()
    healer.run(setup.train_step, setup.loader, 20, progress=False)
    clipper = healer.optimizers[0].clipper
    healer.parts.run.tighten_clip(0.5)
    assert 0 < clipper.max_norm < math.inf
    healer.run(setup.train_step, setup.loader, 25, progress=False)
    assert clipper.max_norm == math.inf


@pytest.mark.parametrize("preset", [HealingConfig, HealingConfig.aggressive])
def test_a_bad_batch_is_not_a_bad_model_whatever_the_preset(preset):
    setup = regression()
    setup.config = preset(**QUICK, zclip_enabled=False)
    calls = iter(range(100))

    def train_step(batch):
        return setup.train_step(batch) * (float("nan") if next(calls) % 20 in (10, 11) else 1.0)

    healer = setup.healer()
    healer.run(train_step, setup.loader, 100, progress=False)
    plans = {type(action).__name__ for _, _, plan in healer.history for action in plan}
    assert plans == {"Refuse"}


def test_a_hook_may_replace_the_plan_and_one_that_throws_is_contained(tmp_path):
    setup = regression()
    healer = setup.healer(run_dir=tmp_path)
    told = []

    @healer.on_instability
    def hook(diagnosis, plan):
        told.append((diagnosis.cause.value, plan))
        if len(told) == 1:
            raise KeyError("a bug in the hook")
        if len(told) == 2:
            return "nonsense"
        return (ScaleLr(0.25, 0.01, 1000),)

    strike(setup, [Fault("nan_loss", at=20 + 10 * i) for i in range(3)], 60, healer)
    assert [cause for cause, _ in told] == ["nonfinite_loss"] * 3
    assert healer.lr_scale < 0.3
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [e["event"] for e in events].count("hook_failed") == 2


@pytest.mark.parametrize("answer", ["nonsense", "", Halt("no tuple"), None], ids=repr)
def test_a_hook_that_fails_is_noted_without_a_run_dir_too(answer):
    setup = regression()
    healer = setup.healer()

    @healer.on_instability
    def hook(diagnosis, plan):
        return 1 / 0 if answer is None else answer

    strike(setup, [Fault("nan_loss", at=20)], 30, healer)
    (note,) = healer.notes
    assert note.startswith("the hook of on_instability failed, the plan was kept")
    assert ("ZeroDivisionError" if answer is None else "TypeError") in note


@pytest.mark.parametrize(
    "junk", [lambda: ScaleLr(math.nan), lambda: SkipBatches(0, 10**7)], ids=["nan", "far ahead"]
)
def test_junk_in_the_plan_of_a_hook_is_noted_and_the_plan_is_done(junk, tmp_path):
    setup = regression()
    healer = setup.healer(run_dir=tmp_path)
    healer.on_instability(lambda diagnosis, plan: (*plan, junk()))
    strike(setup, [Fault("corrupt_weight", at=40)], 80, healer)
    assert any(isinstance(a, Rollback) for _, _, plan in healer.history for a in plan)
    assert healer.last_step == 79
    assert len(healer.parts.stream.unwanted()) < 100
    assert all(torch.isfinite(p).all() for p in setup.model.parameters())
    assert "wanted" in healer.notes[0]
    assert "hook_failed" in (tmp_path / "events.jsonl").read_text()


def test_healing_that_fails_itself_is_left_out_and_said(monkeypatch):
    setup, bare = regression(), None
    healer = setup.healer()
    monkeypatch.setattr(healer.parts.run, "capture", lambda is_proven: 1 / 0)
    monkeypatch.setattr(healer.parts.listener, "check_health", lambda: {}["nothing"])
    healer.run(setup.train_step, setup.loader, 40, progress=False)
    assert any("ZeroDivisionError" in note for note in healer.notes)
    healthy = regression()
    healthy.bare(40)
    assert bare is None
    for a, b in zip(setup.model.parameters(), healthy.model.parameters(), strict=True):
        assert torch.equal(a, b)


def halted(setup, faults, steps=400, **options):
    with pytest.raises(CannotHeal) as caught:
        strike(setup, faults, steps, **options)
    return caught.value


FOREVER = 10**6
ADVERSARIES = {
    "always NaN": ([Fault("nan_loss", at=0, times=FOREVER)], {}, None),
    "NaN from step 60 on": (
        [Fault("nan_gradient", at=60, times=FOREVER)],
        {},
        ExitCode.BUDGET_SPENT,
    ),
    "NaN weights after every rollback": (
        [Fault("corrupt_weight", at=60, times=FOREVER)],
        {},
        ExitCode.BUDGET_SPENT,
    ),
    "NaN, never rolled back": (
        [Fault("nan_loss", at=10, times=FOREVER)],
        {"nan_action": "skip"},
        ExitCode.NONFINITE,
    ),
    "NaN, told to raise": (
        [Fault("nan_loss", at=10)],
        {"nan_action": "raise"},
        ExitCode.NONFINITE,
    ),
    "OOM at micro-batch 1": (
        [Fault("oom_forward", at=30, times=FOREVER)],
        {},
        ExitCode.OUT_OF_MEMORY,
    ),
    "all data bad": ([Fault("bad_batch", at=0, times=FOREVER)], {}, ExitCode.BAD_DATA),
    "no batch can be read": ([Fault("loader_error", at=0, times=FOREVER)], {}, ExitCode.BAD_DATA),
    "no network": ([Fault("network_error", at=20, times=FOREVER)], {}, ExitCode.NETWORK),
}


@pytest.mark.parametrize("name", ADVERSARIES)
def test_healing_ends_within_its_budget(name, tmp_path):
    faults, config, code = ADVERSARIES[name]
    setup = regression(**config)
    halt = halted(setup, faults, run_dir=tmp_path)
    assert halt.exit_code == code if code is not None else halt.exit_code >= 40
    page = json.loads((tmp_path / "postmortem.json").read_text())
    assert page["exit_code"] == halt.exit_code
    original = halt if halt.__cause__ is None else halt.__cause__
    assert page["exception_type"] == qualified_name(original)
    assert page["halted_because"] == str(halt)
    assert page["recovery_actions"]
    assert page["recovery_actions"][-1]["actions"] == ["halt"]
    assert {"failure", "diagnosis", "actions"} <= set(page["recovery_actions"][0])
    assert page["running_time_seconds"] > 0


@pytest.mark.parametrize("words", ["the loss is nan", "Function 'SqrtBackward0' returned nan"])
def test_a_step_that_raises_for_nan_is_not_tried_for_ever(words):
    setup, calls = regression(), []

    def train_step(batch):
        calls.append(batch)
        raise FloatingPointError(words)

    setup.train_step = train_step
    with pytest.raises(CannotHeal) as caught:
        setup.run(50)
    assert caught.value.exit_code == ExitCode.BUDGET_SPENT
    assert len(calls) <= 5 * 6  # nan_patience of each of five attempts, and of the last


def test_steps_that_raise_for_nan_now_and_then_cost_themselves_only():
    setup, calls = regression(), []
    own = setup.train_step

    def train_step(batch):
        calls.append(batch)
        if len(calls) % 10 == 0:
            raise FloatingPointError("the loss is nan")
        return own(batch)

    setup.train_step = train_step
    healer = setup.run(60)
    metrics = healer.metrics()
    assert metrics["healing/recovery_attempts"] == 0
    assert metrics["healing/nan_count"] == len(calls) // 10


ANSWERS = {
    "nothing": (),
    "a cleared cache": (ClearCache(),),
    "a refusal": (Refuse(),),
    "a wait": (Backoff(0),),
    "a smaller batch": (ShrinkBatch(),),
    "another batch": (SkipBatches(0, 0),),
}
RAISED = {
    "oom_forward": ExitCode.OUT_OF_MEMORY,
    "network_error": ExitCode.NETWORK,
    "bad_batch": ExitCode.BAD_DATA,
}


class Endless(BaseException):
    """No Exception: those of a hook are contained."""


@pytest.mark.parametrize("answer", ANSWERS)
@pytest.mark.parametrize("kind", RAISED)
def test_healing_ends_whatever_the_hook_answers_to_an_exception(kind, answer):
    setup = regression()
    healer, asked = setup.healer(), []

    @healer.on_instability
    def hook(diagnosis, plan):
        asked.append(diagnosis)
        if len(asked) > 200:
            raise Endless
        return ANSWERS[answer]

    halt = halted(setup, [Fault(kind, at=20, times=FOREVER)], healer=healer)
    assert halt.exit_code == RAISED[kind]
    assert halt.__cause__ is not None
    assert healer.last_step == 19


def test_a_mistake_is_raised_whatever_the_hook_answers():
    setup = regression()
    healer, calls = setup.healer(), []
    healer.on_instability(lambda diagnosis, plan: ())

    class Mistake(Exception):
        pass

    def train_step(batch):
        calls.append(batch)
        raise Mistake("of mine")

    with pytest.raises(Mistake, match="of mine"):
        healer.run(train_step, setup.loader, 5, progress=False)
    assert len(calls) == setup.config.max_consecutive_data_errors + 1


def test_numbers_that_are_raised_as_an_error_end_the_run_too():
    setup = regression(max_consecutive=8)
    healer = setup.healer()
    healer.on_instability(lambda diagnosis, plan: ())

    def train_step(batch):
        raise FloatingPointError("loss is nan")

    with pytest.raises(CannotHeal, match="8 steps in a row were refused") as caught:
        healer.run(train_step, setup.loader, 5, progress=False)
    assert caught.value.exit_code == ExitCode.NONFINITE


def test_batches_that_a_hook_gives_up_count_only_in_a_row():
    setup = regression()
    healer = setup.healer()
    healer.on_instability(lambda diagnosis, plan: ())
    faults = [Fault("oom_forward", at=at, times=2) for at in range(5, 50, 5)]
    strike(setup, faults, 60, healer)
    assert healer.last_step == 59


def test_a_spent_budget_is_no_matter_for_the_hook():
    setup = regression(nan_action="skip", max_consecutive=8)
    healer, seen = setup.healer(), []

    @healer.on_instability
    def hook(diagnosis, plan):
        seen.extend(plan)
        return (Refuse(),)

    halt = halted(setup, [Fault("nan_loss", at=10, times=FOREVER)], healer=healer)
    assert halt.exit_code == ExitCode.NONFINITE
    assert isinstance(seen[-1], Halt)


def test_success_leaves_a_postmortem_in_the_run_dir(tmp_path):
    setup = regression()
    setup.run(20, run_dir=tmp_path)
    page = json.loads((tmp_path / "postmortem.json").read_text())
    assert (page["exit_reason"], page["exit_code"], page["last_step"]) == ("completed", 0, 19)
    assert page["final_metrics"]["loss"] > 0
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [9, 19, 19]  # and what came late


def test_an_error_without_a_cure_is_passed_on_as_it_is(tmp_path):
    setup = regression()

    class Mistake(Exception):
        pass

    def train_step(batch):
        raise Mistake("of mine")

    with pytest.raises(Mistake, match="of mine"):
        setup.healer(run_dir=tmp_path).run(train_step, setup.loader, 5, progress=False)
    page = json.loads((tmp_path / "postmortem.json").read_text())
    assert page["exit_reason"] == "exception"
    assert page["exception_type"].endswith("Mistake")


def test_a_plan_to_halt_may_come_from_the_hook(tmp_path):
    setup = regression()
    healer = setup.healer(run_dir=tmp_path)
    healer.on_instability(lambda diagnosis, plan: (Halt("I have seen enough", 99),))
    with pytest.raises(CannotHeal, match="seen enough") as caught:
        strike(setup, [Fault("nan_loss", at=20)], 60, healer)
    assert caught.value.exit_code == 99


def test_a_run_without_snapshots_still_refuses_and_halts_where_it_must():
    setup = regression(snapshot_memory_fraction=0.5)
    healer = setup.healer()
    strike(setup, [Fault("nan_loss", at=20)], 40, healer)
    assert "snapshot_memory_fraction" in healer.notes[0]
    setup = regression(snapshot_memory_fraction=0.5)
    with pytest.raises(CannotHeal):
        strike(setup, [Fault("corrupt_weight", at=20)], 60, setup.healer())


@pytest.mark.parametrize("at", [0, 1, 3])
def test_weights_that_break_in_the_first_steps_return_to_the_beginning(at):
    setup = regression()
    healer = setup.healer()
    strike(setup, [Fault("corrupt_weight", at=at)], 60, healer)
    assert all(p.isfinite().all() for p in setup.model.parameters())
    assert [step for step in healer.snapshots() if step] != []


def test_memory_that_was_short_once_is_tried_again_later():
    setup = regression(micro_batch_grow_steps=10)
    healer = setup.healer()
    strike(setup, [Fault("oom_forward", at=20, times=2)], 23, healer)
    assert healer.parts.run.micro_batches == 4
    strike(setup, [], 80, healer)
    assert healer.parts.run.micro_batches == 1


def test_an_oom_step_has_the_gradient_of_the_whole_batch():
    def build():
        setup = regression()
        setup.model[2].p = 0.0  # dropout draws other numbers for other shapes
        return setup

    whole = build()
    whole.run(30)
    cut = build()
    healer = strike(cut, [Fault("oom_backward", at=12), Fault("oom_forward", at=14)], 30)
    assert healer.parts.run.micro_batches == 4
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
from heal.actions import CannotHeal
from heal.chaos import Chaos, Fault
from tests.heal.runs import regression
setup = regression()
healer = setup.healer(run_dir=sys.argv[2])
chaos = Chaos(healer, [Fault(sys.argv[1], at=20)])
try:
    healer.run(chaos.wrap(setup.train_step), setup.loader, 50, progress=False)
except CannotHeal as halt:
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
