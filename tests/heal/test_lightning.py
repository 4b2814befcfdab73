"""Healing under Lightning's loop: do no harm, and then heal."""

import json
import logging
import math
import sys

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging
from lightning.pytorch.plugins import MixedPrecision
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset

import zclip
from heal import HealingConfig
from heal.actions import HealingError, Rollback
from heal.config import ConfigError
from heal.guarded_step import GuardedStep, WatchedOptimizer
from heal.integrations.lightning import HealedSteps, SelfHealingLightningCallback
from heal.report.collect import read_run
from tests.heal.runs import QUICK, roll_back_after_skipped
from tests.heal.test_trackers import Recorder

STEPS = 40
pytestmark = pytest.mark.filterwarnings("ignore")
for name in ("lightning.pytorch", "lightning.fabric"):
    logging.getLogger(name).setLevel(logging.ERROR)


class Module(pl.LightningModule):
    """A small regression with dropout and BatchNorm; ``faults`` change what a batch does."""

    def __init__(self, schedule=None, faults=None, lr=3e-3, fused=True):
        super().__init__()
        torch.manual_seed(0)
        layers = nn.Linear(8, 32), nn.BatchNorm1d(32), nn.GELU(), nn.Dropout(0.1)
        self.net = nn.Sequential(*layers, nn.Linear(32, 1))
        self.schedule, self.faults, self.lr, self.fused = schedule, faults or {}, lr, fused
        self.seen, self.rates, self.hooks = 0, [], []

    def training_step(self, batch, batch_idx):
        self.seen += 1
        fault = self.faults.get(self.seen)
        if fault is not None:
            return fault(self, batch)
        return self.loss(batch)

    def loss(self, batch):
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def on_before_optimizer_step(self, optimizer):
        self.hooks.append("before_step")
        self.rates.append(optimizer.param_groups[0]["lr"])

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr, fused=self.fused)
        if self.schedule is None:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": self.schedule(optimizer)}


def by_step(make):
    return lambda optimizer: {"scheduler": make(optimizer), "interval": "step"}


def data(count=192):
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(count, 8, generator=generator)
    targets = inputs[:, :1].sin() + 0.1 * torch.randn(count, 1, generator=generator)
    shuffle = torch.Generator().manual_seed(2)
    return DataLoader(TensorDataset(inputs, targets), 16, shuffle=True, generator=shuffle)


def healing(**options):
    settings = {name: options.pop(name) for name in list(options) if name in HEALING_SETTINGS}
    config = HealingConfig(**{**QUICK, "zclip_enabled": False, **settings})
    return SelfHealingLightningCallback(config, **options)


HEALING_SETTINGS = set(HealingConfig().to_dict())


def trainer_for(*callbacks, steps=STEPS, **options):
    return pl.Trainer(
        max_steps=steps,
        accelerator="cpu",
        callbacks=list(callbacks),
        **{
            "logger": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "enable_checkpointing": False,
            "limit_val_batches": 0,
            **options,
        },
    )


def fit(module, *callbacks, checkpoint=None, **options):
    trainer = trainer_for(*callbacks, **options)
    torch.manual_seed(5)
    trainer.fit(module, data(), ckpt_path=checkpoint)
    return trainer


class RollsBack(pl.Callback):
    """Has every few skipped steps in a row rolled back."""

    def __init__(self, callback, patience):
        self.callback, self.patience = callback, patience

    def on_train_start(self, trainer, module):
        roll_back_after_skipped(self.callback.healer, self.patience)


def outcome(module, trainer):
    optimizer = trainer.optimizers[0]
    state = [t for p in module.parameters() for t in optimizer.state[p].values()]
    rates = torch.tensor([group["lr"] for group in optimizer.param_groups])
    return [*module.state_dict().values(), *state, rates, torch.get_rng_state()]


def assert_same(first, second):
    assert len(first) == len(second)
    for i, (a, b) in enumerate(zip(first, second, strict=True)):
        assert torch.equal(a, b), f"item {i} differs"


lr = torch.optim.lr_scheduler
CASES = {
    "plain": ({}, {}),
    "accumulation": ({}, {"accumulate_grad_batches": 5}),  # does not divide the epoch
    "gradient_clip_val": ({}, {"gradient_clip_val": 0.1}),
    "step schedule": ({"schedule": by_step(lambda o: lr.CosineAnnealingLR(o, 30))}, {}),
    "epoch schedule": ({"schedule": lambda o: lr.ExponentialLR(o, 0.7)}, {}),
    "bf16 autocast": ({}, {"precision": "bf16-mixed"}),
    "not fused": ({"fused": False}, {}),
    "fp16 scaler": ({}, {"scaler": True}),
    "fp16 scaler, not fused": ({"fused": False}, {"scaler": True}),
    "fp16 scaler, clipped": ({"fused": False}, {"scaler": True, "gradient_clip_val": 0.1}),
    "returns None": ({"faults": {7: lambda module, batch: None}}, {}),
    "fp16 scaler, returns None": ({"faults": {7: lambda module, batch: None}}, {"scaler": True}),
}


@pytest.mark.parametrize("case", CASES)
def test_an_undisturbed_run_is_the_bare_one(case):
    settings, options = CASES[case]
    found = []
    for callbacks in ([], [healing()]):
        chosen = dict(options)
        if chosen.pop("scaler", False):
            scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
            chosen["plugins"] = [MixedPrecision("16-mixed", "cpu", scaler)]
        module = Module(**settings)
        trainer = fit(module, *callbacks, **chosen)
        found.append((outcome(module, trainer), trainer.global_step, module.hooks, module.seen))
    (bare, *counts), (healed, *their_counts) = found
    assert counts == their_counts
    assert_same(healed, bare)
    (callback,) = callbacks
    assert callback.healer.notes == []
    assert callback.healer.history == [] or not any(p for _, _, p in callback.healer.history)


def test_the_strategy_is_left_as_it_was():
    trainer = fit(Module(), healing(), steps=3)
    assert "optimizer_step" not in vars(trainer.strategy)

    def fail(module, batch):
        raise RuntimeError("a bug")

    callback = healing()
    trainer = trainer_for(callback, steps=3)
    with pytest.raises(RuntimeError, match="a bug"):
        trainer.fit(Module(faults={2: fail}), data())
    assert "optimizer_step" not in vars(trainer.strategy)


def test_a_moving_average_of_the_weights_returns_with_them():
    average = EMAWeightAveraging(decay=0.9)
    callback, module = healing(), Module(faults={27: lambda m, b: corrupt(m, b)})
    fit(module, average, callback)
    assert [entry["failure"] for entry in callback.healer.recoveries] == ["weight_corruption"]
    held = [t for t in average._average_model.state_dict().values() if t.is_floating_point()]
    assert all(tensor.isfinite().all() for tensor in held)


def nan_loss(module, batch):
    return module.loss(batch) * math.nan


def corrupt(module, batch):
    with torch.no_grad():
        module.net[4].weight[0, 3] = math.nan
    return module.loss(batch)


def last_losses(module):
    module.eval()
    with torch.no_grad():
        return float(torch.stack([module.loss(batch) for batch in data()]).mean())


def bare_loss(steps=STEPS):
    module = Module()
    fit(module, steps=steps)
    return last_losses(module)


def test_a_nan_batch_costs_one_step_and_nothing_else(tmp_path):
    callback, module = healing(run_dir=tmp_path), Module(faults={12: nan_loss})
    fit(module, callback)
    causes = [diagnosis.cause.value for _, diagnosis, _ in callback.healer.history]
    assert causes == ["nonfinite_loss"]
    assert callback.healer.metrics()["zclip/total_skips"] == 1
    assert all(p.isfinite().all() for p in module.parameters())
    assert last_losses(module) < 1.1 * bare_loss()
    page = json.loads((tmp_path / "postmortem.json").read_text())
    assert (page["exit_reason"], page["last_step"]) == ("completed", STEPS - 1)
    assert [entry["actions"] for entry in page["recovery_actions"]] == [["skip"]]


def test_an_exploding_gradient_is_clipped():
    """Beside the same fault without clipping, under an optimizer that feels the size."""

    class Sgd(Module):
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.05, fused=True)

    faults = {30: lambda module, batch: module.loss(batch) * 300}
    losses = []
    for callback in (healing(zclip_enabled=False), healing(zclip_enabled=True)):
        module = Sgd(faults=faults)
        fit(module, callback, steps=32)
        losses.append(last_losses(module))
    assert callback.healer.metrics()["zclip/total_clips"] >= 1
    assert losses[1] < 0.5 * losses[0]


@pytest.mark.parametrize(
    "schedule",
    [
        None,
        by_step(lambda o: lr.LambdaLR(o, lambda step: 1 / (1 + step))),
        lambda o: lr.ExponentialLR(o, 0.7),
    ],
    ids=["no schedule", "by step", "by epoch"],
)
def test_corrupted_weights_are_rolled_back_and_the_count_goes_back_with_them(schedule):
    callback = healing(max_recovery_attempts=5)
    module = Module(schedule=schedule, faults={27: corrupt})
    trainer = fit(module, callback, steps=60)
    healer = callback.healer
    plans = [[type(a).__name__ for a in plan] for _, _, plan in healer.history if plan]
    assert any("Rollback" in plan for plan in plans), plans
    assert trainer.global_step == 60
    assert healer.last_step == 59
    assert module.seen > 60  # the steps that were undone are made up for, with data not yet seen
    assert module.net[4].weight.isfinite().all()
    if schedule is not None:
        scheduler = trainer.lr_scheduler_configs[0].scheduler
        is_by_step = isinstance(scheduler, lr.LambdaLR)
        # Lightning does not step a schedule for the epoch in whose midst it stops.
        passes = module.seen // len(trainer.train_dataloader)
        assert scheduler.last_epoch == (60 if is_by_step else passes)
        wanted = 3e-3 / 61 if is_by_step else 3e-3 * 0.7**passes
        assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(wanted)


def test_a_rollback_to_the_very_start_returns_the_schedule_too():
    callback = healing(max_consecutive_skips=50, snapshot_memory_factor=9.0)
    make = by_step(lambda o: lr.LambdaLR(o, lambda step: 1 / (1 + step)))
    module = Module(schedule=make, faults={n: nan_loss for n in range(5)})
    trainer = fit(module, callback, RollsBack(callback, 3), steps=20)
    assert any(Rollback(0) in plan for _, _, plan in callback.healer.history)
    assert trainer.global_step == 20
    assert trainer.lr_scheduler_configs[0].scheduler.last_epoch == 20
    assert module.rates[-1] == pytest.approx(3e-3 / 20)


def test_the_learning_rate_is_lowered_beside_the_schedule():
    callback = healing(lr_factor=0.5, lr_ramp_steps=1000)
    module = Module(faults={n: nan_loss for n in range(30, 33)})
    fit(module, callback, RollsBack(callback, 2), steps=45)
    assert 0.4 < callback.healer.lr_scale < 0.6
    assert set(module.rates) == {3e-3}


def test_endless_trouble_halts_with_a_postmortem(tmp_path):
    faults = {n: nan_loss for n in range(20, 1000)}
    callback = healing(run_dir=tmp_path, max_recovery_attempts=2)
    with pytest.raises(HealingError) as raised:
        fit(Module(faults=faults), callback, steps=200)
    with pytest.raises(SystemExit) as ended:  # as Python does with what is not caught
        sys.excepthook(HealingError, raised.value, None)
    assert ended.value.code == raised.value.exit_code
    page = json.loads((tmp_path / "postmortem.json").read_text())
    assert page["exit_reason"] in ("nan", "unrecoverable")
    assert page["exit_code"] >= 40


def test_a_bad_batch_is_passed_over():
    def fail(module, batch):
        raise IndexError("index out of range in self")

    callback, module = healing(), Module(faults={9: fail})
    trainer = fit(module, callback)
    assert [d.cause.value for _, d, _ in callback.healer.history] == ["data_error"]
    assert trainer.global_step == STEPS
    assert module.seen == STEPS + 1


def test_a_network_error_is_waited_for_and_the_run_is_the_undisturbed_one(monkeypatch):
    """The same batch again, with the same dropout and the same statistics of BatchNorm."""

    def fail(module, batch):
        module.loss(batch)
        raise ConnectionError("no route to host")

    monkeypatch.setattr(HealingConfig, "backoff_seconds", 0.0)
    callback = healing()
    module, bare = Module(faults={9: fail}), Module()
    assert_same(outcome(module, fit(module, callback)), outcome(bare, fit(bare)))


def test_batches_given_up_now_and_then_do_not_add_up_to_a_row():
    class LeavesOutTheCure(pl.Callback):
        def on_train_start(self, trainer, module):
            callback.healer.on_instability(lambda diagnosis, plan: ())

    def fail(module, batch):
        raise ConnectionError("no route to host")

    callback = healing()
    module = Module(faults=dict.fromkeys((5, 11, 17, 23, 29), fail))
    trainer = fit(module, callback, LeavesOutTheCure())
    assert len(callback.healer.history) == 5
    assert trainer.global_step == STEPS


def out_of_memory(module, batch):
    """Like a device whose memory holds eight samples."""
    if len(batch[0]) > 8:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    return module.loss(batch)


def test_out_of_memory_is_healed_in_smaller_pieces(monkeypatch):
    monkeypatch.setattr(HealingConfig, "micro_batch_grow_steps", 3)
    callback = healing()
    module = Module(faults={n: out_of_memory for n in range(10, 13)})
    trainer = fit(module, callback)
    assert {d.cause.value for _, d, _ in callback.healer.history} == {"oom"}
    assert trainer.global_step == STEPS
    assert callback.healer.micro.pieces == 1  # grown back
    assert last_losses(module) < 1.2 * bare_loss()


def test_a_batch_that_the_first_attempt_took_apart_is_whole_in_the_second(monkeypatch):
    def pops(module, batch):
        loss = module.loss((batch.pop(0), batch.pop(0)))
        raise ConnectionError("no route to host") if loss.isfinite() else ValueError(loss)

    monkeypatch.setattr(HealingConfig, "backoff_seconds", 0.0)
    callback = healing()
    module, bare = Module(faults={9: pops}), Module()
    assert_same(outcome(module, fit(module, callback)), outcome(bare, fit(bare)))


def test_pieces_give_the_gradient_of_the_whole_batch():
    class Plain(Module):
        def __init__(self, **settings):
            super().__init__(**settings)
            self.net = nn.Linear(8, 1)
            self.double()

        def loss(self, batch):
            return nn.functional.mse_loss(self.net(batch[0].double()), batch[1].double())

    found = []
    for faults in ({}, {n: out_of_memory for n in range(3, 30)}):
        torch.manual_seed(3)
        module = Plain(faults=faults)
        fit(module, healing(), steps=6)
        found.append([*module.net.parameters()])
    for whole, pieced in zip(*found, strict=True):
        torch.testing.assert_close(whole, pieced, rtol=1e-12, atol=1e-12)


def test_out_of_memory_in_the_optimizer_is_rolled_back():
    """Some weights may have been updated: the step is not repeated."""

    class Fails(torch.optim.AdamW):
        calls = 0

        def step(self, closure=None):
            Fails.calls += 1
            if Fails.calls == 25:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
            return super().step(closure)

    class Unlucky(Module):
        def configure_optimizers(self):
            return Fails(self.parameters(), lr=self.lr, fused=True)

    callback, module = healing(), Unlucky()
    trainer = fit(module, callback)
    assert ["Rollback" in str(plan) for _, _, plan in callback.healer.history] == [True]
    assert trainer.global_step == STEPS
    assert module.seen > STEPS


def test_sigterm_is_lightnings_and_the_postmortem_ours(tmp_path):
    from lightning.pytorch.utilities.exceptions import SIGTERMException

    def stop(module, batch):
        raise SIGTERMException

    with pytest.raises(SystemExit):
        fit(Module(faults={9: stop}), healing(run_dir=tmp_path))
    page = json.loads((tmp_path / "postmortem.json").read_text())
    assert (page["exit_reason"], page["exit_code"], page["last_step"]) == ("sigterm", 75, 7)


def test_out_of_memory_while_accumulating_ends_the_run_and_says_so(tmp_path):
    """Lightning runs these batches without asking the strategy: nothing can be repeated."""
    callback = healing(run_dir=tmp_path)
    module = Module(faults={n: out_of_memory for n in range(9, 99)})
    with pytest.raises(torch.OutOfMemoryError):
        fit(module, callback, accumulate_grad_batches=4)
    assert json.loads((tmp_path / "postmortem.json").read_text())["exit_reason"] == "oom"


def test_the_loss_of_accumulated_batches_is_their_mean(tmp_path):
    callback = healing(run_dir=tmp_path, lag=0)
    losses = []

    class Remembers(Module):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            losses.append(float(loss.detach()))
            return loss

    fit(Remembers(), callback, accumulate_grad_batches=5, steps=6)  # 12 batches: 5, 5, 2, ...
    assert callback.healer.latest.loss == pytest.approx(sum(losses[-2:]) / 2, rel=1e-5)
    assert len(losses) == 24


def test_a_checkpoint_carries_clipping_and_healing(tmp_path):
    callback = healing(zclip_enabled=True, lr_ramp_steps=1000)
    module = Module(faults={n: nan_loss for n in range(30, 33)})
    trainer = fit(module, callback, RollsBack(callback, 2), steps=36)
    trainer.save_checkpoint(tmp_path / "run.ckpt")
    saved = callback.healer
    assert saved.lr_scale < 1
    again = healing(zclip_enabled=True, lr_ramp_steps=1000)
    trainer = fit(Module(), again, steps=36 + 4, checkpoint=tmp_path / "run.ckpt")
    assert trainer.global_step == 40
    assert again.healer.last_step == saved.last_step + 4
    assert again.healer.lr_scale == pytest.approx(saved.lr_scale, abs=0.01)
    assert again.healer.lr_scale < 1
    assert again.healer.metrics()["healing/recovery_attempts"] == 1
    clip = again.healer.optimizers[0].clipper.state_dict()["groups"][0]
    before = saved.optimizers[0].clipper.state_dict()["groups"][0]
    assert float(clip["steps"]) == float(before["steps"]) + 4


def test_a_checkpoint_whose_healing_cannot_be_read_goes_on_and_says_so(tmp_path):
    callback = healing()
    trainer = fit(Module(), callback, steps=6)
    trainer.save_checkpoint(tmp_path / "run.ckpt")
    saved = torch.load(tmp_path / "run.ckpt", weights_only=False)
    del saved["callbacks"][callback.state_key]["version"]  # the first ones had none
    torch.save(saved, tmp_path / "run.ckpt")
    again = healing()
    trainer = fit(Module(), again, steps=9, checkpoint=tmp_path / "run.ckpt")
    assert trainer.global_step == 9
    assert "expected version 2, got 1" in again.healer.notes[0]


def test_a_checkpoint_can_go_on_without_the_callback_and_the_reverse(tmp_path):
    for first, second in (([healing()], []), ([], [healing()])):
        trainer = fit(Module(), *first, steps=6)
        trainer.save_checkpoint(tmp_path / "run.ckpt")
        resumed = fit(Module(), *second, steps=9, checkpoint=tmp_path / "run.ckpt")
        assert resumed.global_step == 9


def test_the_run_goes_on_after_a_rollback_that_follows_a_resume(tmp_path):
    trainer = fit(Module(), healing(run_dir=tmp_path / "run"), steps=15)
    trainer.save_checkpoint(tmp_path / "run.ckpt")
    callback, module = healing(run_dir=tmp_path / "run"), Module(faults={9: corrupt})
    trainer = fit(module, callback, steps=45, checkpoint=tmp_path / "run.ckpt")
    assert any("Rollback" in str(plan) for _, _, plan in callback.healer.history)
    assert read_run(tmp_path / "run").runs == 1
    assert trainer.global_step == 45
    assert module.net[4].weight.isfinite().all()


def test_trackers_and_loggers_get_it(tmp_path, caplog):
    from lightning.pytorch.loggers import CSVLogger

    tracker, logger = Recorder(), CSVLogger(tmp_path)
    callback = healing(trackers=tracker)
    with caplog.at_level(logging.WARNING, "heal"):
        fit(Module(faults={12: nan_loss}), callback, logger=logger)
    assert [call[2] for call in tracker.calls if call[0] == "log"] == [9, 19, 29, 39, 39]
    assert tracker.of("alert")[0][1] == "healing: nonfinite_loss"
    assert "nonfinite_loss" in caplog.text
    assert "healing/nan_count" in logger.experiment.metrics_keys


def test_the_gap_between_validation_and_training_is_measured():
    callback, module = healing(), Module()
    trainer = trainer_for(callback, limit_val_batches=1.0)
    trainer.fit(module, data(), data())
    assert abs(callback.healer.metrics()["healing/eval_gap"]) < 1.0


def test_manual_optimization_of_one_optimizer_is_guarded():
    class Manual(Module):
        automatic_optimization = False

        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers()
            optimizer.zero_grad()
            loss = super().training_step(batch, batch_idx)
            self.manual_backward(loss)
            optimizer.step()

    bare, undisturbed = Manual(), Manual()
    expected = outcome(bare, fit(bare))
    assert_same(outcome(undisturbed, fit(undisturbed, healing())), expected)
    callback, module = healing(), Manual(faults={n: nan_loss for n in range(20, 26)})
    trainer = fit(module, callback, RollsBack(callback, 5))
    assert any("Rollback" in str(plan) for _, _, plan in callback.healer.history)
    causes = {diagnosis.cause.value for _, diagnosis, _ in callback.healer.history}
    assert "nonfinite_gradient" in causes
    assert trainer.global_step == STEPS
    assert module.seen > STEPS


class Two(Module):
    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        raise AssertionError("not reached")

    def configure_optimizers(self):
        params = list(self.parameters())
        return [torch.optim.SGD(params[:2], lr=0.1), torch.optim.SGD(params[2:], lr=0.1)]


@pytest.mark.parametrize(
    ("module", "callbacks", "message"),
    [
        (Two, [healing()], "optimizers: expected one, .* got 2; to clip"),
        (Module, [healing(after_rollback="replay_data")], 'expected "skip_data"'),
        (Module, [healing(zclip_enabled=True), zclip.ZClipLightningCallback()], "second time"),
    ],
    ids=["two optimizers", "replay", "clipped twice"],
)
def test_what_cannot_be_healed_is_said_before_the_first_step(module, callbacks, message):
    with pytest.raises(ValueError, match=message):
        fit(module(), *callbacks)


def test_settings_may_be_a_dict_and_are_checked_at_once():
    assert SelfHealingLightningCallback({"zclip_enabled": False}).config.zclip_enabled is False
    with pytest.raises(ConfigError, match="zclip_enable"):
        SelfHealingLightningCallback({"zclip_enable": False})


def test_an_unknown_tracker_is_refused_at_once():
    with pytest.raises(ValueError, match=r"tracker: expected one of trackio.*, got 'trackioo'"):
        SelfHealingLightningCallback(trackers="trackioo")


class CountReads(TorchDispatchMode):
    """Counts operators that give a tensor's value to the host."""

    READS = ("aten::_local_scalar_dense", "aten::is_nonzero", "aten::equal", "aten::nonzero")

    def __init__(self):
        super().__init__()
        self.count = 0
        self.is_quiet = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func._schema.name in self.READS and not self.is_quiet
        return func(*args, **(kwargs or {}))

    def quiet(self, method):
        """Leave out what a verdict costs that lies in host memory; on a device it is not read."""

        def leaving_out(*args, **named):
            before, self.is_quiet = self.is_quiet, True
            try:
                return method(*args, **named)
            finally:
                self.is_quiet = before

        return leaving_out


def reads_of(callbacks, **options):
    with CountReads() as counted, pytest.MonkeyPatch.context() as patch:
        for owner, name in ((GuardedStep, "post"), (WatchedOptimizer, "step_if_allowed")):
            patch.setattr(owner, name, counted.quiet(getattr(owner, name)))
        fit(Module(), *callbacks, **options)
    return counted.count


@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 3}], ids=["plain", "accum"])
def test_a_healthy_step_reads_nothing_that_the_bare_one_does_not(options):
    settings = {"snapshot_interval": 10**6, "check_interval": 0, "zclip_enabled": True}
    steps = (100, 120)  # between snapshots, after the last one's copy on the host was judged
    bare = [reads_of([], steps=n, **options) for n in steps]
    healed = [reads_of([healing(**settings)], steps=n, **options) for n in steps]
    assert healed[1] - healed[0] == bare[1] - bare[0]


def test_a_read_would_be_counted(monkeypatch):
    bare = reads_of([healing()], steps=10)
    step = HealedSteps._step
    monkeypatch.setattr(HealedSteps, "_step", lambda s, loss: (float(loss), step(s, loss)))
    assert reads_of([healing()], steps=10) == bare + 10


class Scaled(pl.Callback):
    """Multiplies all weights once, as no optimizer does."""

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if module.seen == 70:
            with torch.no_grad():
                for param in module.parameters():
                    param.mul_(1000.0)


def test_damage_without_nan_is_found_by_an_experiment_with_default_settings(tmp_path):
    healed, spoiled = Module(), Module()
    callback = SelfHealingLightningCallback(run_dir=tmp_path)
    fit(healed, Scaled(), callback, steps=120)
    fit(spoiled, Scaled(), steps=120)
    assert any(isinstance(plan[0], Rollback) for _, _, plan in callback.healer.history if plan)
    lines = (tmp_path / "events.jsonl").read_text().splitlines()
    answers = [event["answer"] for event in map(json.loads, lines) if "answer" in event]
    assert answers == ["damaged"]
    norms = [float(module.net[4].weight.detach().norm()) for module in (healed, spoiled)]
    assert norms[0] < 5.0 < 100.0 < norms[1]


def test_other_targets_are_left_alone_with_default_settings():
    def other(module, batch):
        return module.loss((batch[0], 5.0 - 3.0 * batch[1]))

    faults = dict.fromkeys(range(70, 200), other)
    healed, bare = Module(faults=faults), Module(faults=faults)
    callback = SelfHealingLightningCallback(HealingConfig(zclip_enabled=False))
    first = fit(healed, callback, steps=120)
    second = fit(bare, steps=120)
    assert callback.healer.experiment.forwards > 0
    assert all(plan == () for _, _, plan in callback.healer.history)
    assert_same(outcome(healed, first), outcome(bare, second))
