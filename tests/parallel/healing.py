"""Healing with several ranks: what happens to one is heard, decided and done by all alike."""

import functools
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from heal import Healer, HealingConfig
from heal.actions import HealingError
from heal.causes import Cause, Finding, Severity
from heal.exit_codes import ExitCode
from heal.record import Flag
from tests.heal.forecast.models import model_of
from tests.parallel.layouts import CountCollectives, same_on_all_ranks
from tests.parallel.registry import check
from zclip.layout import STEPS
from zclip.optim import AdamW

QUICK = {"snapshot_interval": 5, "quarantine_steps": 2, "check_interval": 5, "lr_ramp_steps": 10}

torch_adamw = functools.partial(torch.optim.AdamW, fused=True)


def of_all_ranks(value):
    """Return what every rank has, of whatever type."""
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


class Setup:
    """A small model on every rank, other data on each, and faults by attempt on one of them."""

    def __init__(
        self,
        wrap="ddp",
        *,
        norm=False,
        scheduler=False,
        zclip_enabled=False,
        optimizer=torch_adamw,
        **config,
    ):
        torch.manual_seed(0)
        layers = [nn.Linear(4, 8), nn.BatchNorm1d(8) if norm else nn.Identity(), nn.ReLU()]
        model = nn.Sequential(*layers, nn.Linear(8, 1))
        if wrap == "ddp":
            self.model = DistributedDataParallel(model)
        else:
            fully_shard(model[0])
            self.model = fully_shard(model)
        self.optimizer = optimizer(self.model.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.ConstantLR(self.optimizer, 1.0) if scheduler else None
        settings = {**QUICK, "zclip_enabled": zclip_enabled, **config}
        self.healer = Healer(
            self.model,
            self.optimizer,
            schedule,
            HealingConfig(**settings),
            rank=dist.get_rank(),
            sleep=lambda seconds: None,
        )
        self.healer.exits.dismiss()
        self.healer.exits.catch_signals = lambda: None
        self.faults = {}
        self.pieces = []
        torch.manual_seed(dist.get_rank())
        self.loader = [torch.randn(8, 4) for _ in range(200)]

    def fault(self, rank, attempt, do):
        """Have ``do(batch)`` called before the loss of an attempt, on one rank."""
        if dist.get_rank() == rank:
            self.faults[attempt] = do

    def ask_to_stop(self, batch):
        self.healer.request_stop()

    def train_step(self, batch):
        fault = self.faults.pop(self.healer.attempts - 1, None)
        self.pieces.append(len(batch))
        if fault is not None:
            changed = fault(batch)
            batch = batch if changed is None else changed
        return self.model(batch).square().mean()

    def run(self, steps=30, loader=None):
        self.healer.run(self.train_step, loader or self.loader, steps, progress=False)
        return self

    @property
    def done(self):
        """Step, cause and actions of everything that was found."""
        return [
            (at, d.cause.value, d.bad_step, [type(a).__name__ for a in plan])
            for at, d, plan in self.healer.history
        ]

    def assert_alike(self):
        told = of_all_ranks((self.done, self.healer.last_step))
        assert all(one == told[0] for one in told), told
        assert self.healer.notes == []
        weights = [getattr(p, "_local_tensor", p).detach() for p in self.model.parameters()]
        assert all(w.isfinite().all() for w in weights)
        if isinstance(self.model, DistributedDataParallel):
            assert same_on_all_ranks(*weights)

    def causes(self):
        return [cause for _, cause, _, _ in self.done]

    def actions(self):
        return {name for *_, names in self.done for name in names}


def out_of_memory(batch):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB (injected)")


@check(2)
def an_undisturbed_ddp_run_is_the_bare_one_and_costs_one_message():
    setup, bare = Setup(norm=True), Setup(norm=True)
    with CountCollectives() as usual:
        for batch in bare.loader[:12]:
            bare.optimizer.zero_grad()
            bare.model(batch).square().mean().backward()
            bare.optimizer.step()
    with CountCollectives() as counted:
        setup.run(12)
    health_checks = len({1, 2, 4, 5, 10})  # powers of two, then every interval
    assert len(counted.names) == len(usual.names) + 12 + health_checks
    theirs = bare.model.state_dict()
    for name, ours in setup.model.state_dict().items():
        assert torch.equal(ours, theirs[name]), name
    assert setup.done == []


@check(2)
def every_rank_hears_of_the_mean_loss_and_of_seconds_alike():
    setup = Setup()
    for step in range(6):
        setup.optimizer.zero_grad()
        setup.model(setup.loader[step]).square().mean().backward()
        setup.healer.step(torch.tensor(2.0 + 2.0 * dist.get_rank()))
    assert setup.healer.latest.loss == 3.0
    shared = setup.healer.latest._replace(own_seconds=0.0)  # all but what it says it is
    told = of_all_ranks(repr(shared))
    assert told[0] == told[1]


@check(2)
def a_nan_loss_on_one_rank_is_refused_by_all():
    setup = Setup()
    for step in range(10):
        setup.optimizer.zero_grad()
        before = [p.detach().clone() for p in setup.model.parameters()]
        loss = setup.model(setup.loader[step]).square().mean()
        loss.backward()  # the gradients are sound; only the number that is told is not
        is_bad = step == 4
        setup.healer.step(loss * math.nan if is_bad and dist.get_rank() == 1 else loss)
        assert all(map(torch.equal, before, setup.model.parameters())) == is_bad
    setup.assert_alike()
    assert setup.causes() == ["nonfinite_loss"]


class Two(Setup):
    """As :class:`Setup`, with an optimizer for each layer; the second has the first layer."""

    def __init__(self, **config):
        super().__init__(**config)
        model = self.model.module
        self.optimizers = [
            torch.optim.AdamW(layer.parameters(), lr=1e-2, fused=True)
            for layer in (model[3], model[0])
        ]
        self.healer = Healer(
            self.model, self.optimizers, config=self.healer.config, rank=dist.get_rank()
        )
        self.healer.exits.dismiss()

    def step(self, batch, loss=None):
        self.model.zero_grad()
        mean = self.model(batch).square().mean()
        mean.backward()
        self.healer.step(mean if loss is None else loss)


@check(2)
def nan_under_the_second_optimizer_is_named_and_refused_by_all():
    setup = Two()
    for step in range(10):
        before = [p.detach().clone() for p in setup.model.parameters()]
        is_bad = step == 4
        setup.step(setup.loader[step] * (math.nan if is_bad and dist.get_rank() else 1.0))
        assert all(map(torch.equal, before, setup.model.parameters())) == is_bad
    setup.assert_alike()
    assert setup.causes() == ["nonfinite_loss"]
    setup.model.zero_grad()
    setup.model(setup.loader[0]).square().mean().backward()
    setup.model.module[0].weight.grad[0, 0] = math.nan  # as DDP would give it to all
    setup.healer.step(torch.ones(()))
    for step in range(4):
        setup.step(setup.loader[step])
    diagnosis = setup.healer.history[-1][1]
    assert diagnosis.cause.value == "nonfinite_gradient"
    assert diagnosis.evidence["tensor"] == "module.0.weight"


@check(2)
def a_first_optimizer_without_gradients_keeps_no_rank_from_hearing_the_others():
    setup = Two()
    for step in range(10):
        is_bad = step == 4 and dist.get_rank() == 1
        setup.model.zero_grad()
        loss = setup.model(setup.loader[step]).square().mean()
        loss.backward()
        for param in setup.model.module[3].parameters():
            param.grad = None
        setup.healer.step(loss * math.nan if is_bad else loss)
    setup.assert_alike()
    assert setup.causes() == ["nonfinite_loss"]


@check(2)
def a_step_without_a_loss_on_any_rank_is_taken():
    setup = Setup()
    for step in range(6):
        setup.optimizer.zero_grad()
        before = [p.detach().clone() for p in setup.model.parameters()]
        setup.model(setup.loader[step]).square().mean().backward()
        setup.healer.step()
        assert not all(map(torch.equal, before, setup.model.parameters()))
    assert math.isnan(setup.healer.latest.loss)
    assert setup.done == []


@check(2)
def a_stop_that_one_rank_asks_for_stops_all_at_the_same_step():
    for wrap in ("ddp", "fsdp"):
        setup = Setup(wrap)
        setup.fault(1, 7, setup.ask_to_stop)
        with pytest.raises(HealingError) as halted:
            setup.run()
        assert halted.value.exit_code == ExitCode.PREEMPTED
        setup.assert_alike()
        assert setup.healer.last_step == 7 + setup.healer.config.lag


@check(2)
def a_snapshot_that_one_rank_asks_for_is_taken_by_all_at_the_same_step():
    setup = Setup(snapshot_interval=100)
    setup.fault(0, 3, lambda batch: setup.healer.request_snapshot())
    setup.run(12)
    told = of_all_ranks(setup.healer.snapshots())
    assert told[0] == told[1]
    assert 3 + setup.healer.config.lag + 2 in told[0]


@check(2)
def a_source_of_flags_is_asked_on_every_rank():
    setup = Setup()
    asked = []

    def pressure():
        asked.append(1)
        return Flag.MEMORY_PRESSURE if len(asked) == 5 and dist.get_rank() == 1 else Flag(0)

    setup.healer.add_source(pressure)
    setup.run(12)
    setup.assert_alike()
    assert setup.causes() == ["memory_pressure"]
    assert setup.healer.micro_batches == 2


@check(2)
def memory_that_runs_out_on_one_rank_shrinks_the_pieces_of_all():
    for norm in (False, True):
        setup = Setup(norm=norm)
        setup.fault(1, 6, out_of_memory)
        setup.run(20)
        setup.assert_alike()
        assert setup.causes() == ["oom"]
        assert setup.done[0][3] == ["ClearCache", "ShrinkBatch"]
        assert setup.pieces[-1] == 4
        told = of_all_ranks(setup.healer.micro_batches)
        assert told == [2, 2]


@check(2)
def memory_that_runs_out_within_forward_does_not_send_buffers_twice():
    setup = Setup(norm=True)
    calls = []

    def fail(module, arguments, output):
        calls.append(1)
        if len(calls) == 6 and dist.get_rank() == 0:
            out_of_memory(None)

    setup.model.module[3].register_forward_hook(fail)
    setup.run(20)
    setup.assert_alike()
    assert setup.causes() == ["oom"]


@check(2)
def memory_that_runs_out_while_accumulating_is_no_loss_either():
    setup = Setup()
    setup.healer.micro.pieces = 4

    def fail(batch):
        setup.faults[6] = None  # armed again: the next piece of the same attempt

    class Armed:
        count = 0

        def __call__(self, grad):
            Armed.count += 1
            if Armed.count == 22 and dist.get_rank() == 1:  # in the backward of a piece held back
                out_of_memory(None)

    setup.model.module[3].bias.register_hook(Armed())
    setup.run(20)
    setup.assert_alike()
    assert setup.causes() == ["oom"]


@check(2)
def a_batch_that_one_rank_cannot_use_is_refused_by_all():
    for wrap in ("ddp", "fsdp"):
        setup = Setup(wrap)
        if wrap == "ddp":
            setup.fault(0, 6, lambda batch: batch[:, :0])
        else:  # fails before the model is called: after that its messages could not be matched

            def torn(batch):
                raise ValueError("shapes do not match")

            setup.fault(0, 6, torn)
        setup.run(20)
        setup.assert_alike()
        assert setup.causes() == ["data_error"]
        assert setup.healer.last_step == 19


@check(2)
def a_loader_that_fails_on_one_rank_costs_all_one_step():
    class Torn:
        def __init__(self, batches):
            self.batches = batches

        def __iter__(self):
            self.at = -1
            return self

        def __next__(self):
            self.at += 1
            if self.at == 6 and dist.get_rank() == 1:
                raise ValueError("torn sample")
            if self.at == len(self.batches):
                raise StopIteration
            return self.batches[self.at]

    setup = Setup()
    setup.run(20, Torn(setup.loader))
    setup.assert_alike()
    assert setup.causes() == ["data_error"]
    assert setup.healer.stream.ordinal == 20


@check(2)
def an_error_without_a_cure_on_one_rank_ends_all_at_the_same_step():
    setup = Setup()

    def bug(batch):
        raise AttributeError("no such thing")

    setup.fault(1, 6, bug)
    with pytest.raises(HealingError, match="rank 1 raised AttributeError: no such thing") as halted:
        setup.run(20)
    assert halted.value.exit_code == ExitCode.UNRECOVERABLE
    setup.assert_alike()
    assert setup.healer.last_step == 6 + setup.healer.config.lag


@check(2)
def memory_that_runs_out_in_the_step_of_one_rank_returns_all_to_a_snapshot():
    setup = Setup()

    def arm(batch):
        def fail(*ignored):
            handle.remove()
            with torch.no_grad():
                next(setup.model.parameters()).add_(1.0)
            out_of_memory(None)

        handle = setup.optimizer.register_step_pre_hook(fail)

    setup.fault(1, 12, arm)
    setup.run(30)
    setup.assert_alike()
    assert "Rollback" in setup.actions()
    assert setup.causes()[0] == "oom"


@check(2)
def a_snapshot_that_is_corrupt_on_one_rank_is_used_by_none():
    setup = Setup(snapshot_memory_factor=4.0).run(19)
    if dist.get_rank() == 0:  # all but the oldest; which of them is chosen is the policy's affair
        for snapshot in setup.healer.training.ring._kept[1:]:
            next(iter(snapshot.tensors.values())).view(-1)[0] += 1.0

    def damage(batch):
        with torch.no_grad():
            next(setup.model.parameters())[0, 0] = math.nan

    for rank in range(2):
        setup.fault(rank, setup.healer.attempts, damage)
    resumed = []
    setup.healer.on_instability(lambda d, plan: resumed.append((setup.healer.last_step, plan)))
    setup.run(40)
    told = of_all_ranks((setup.done, resumed, setup.healer.last_step))
    assert told[0] == told[1]
    assert "Rollback" in setup.actions()
    assert same_on_all_ranks(*[p.detach() for p in setup.model.parameters()])
    if dist.get_rank() == 0:
        assert any("falling back" in note for note in setup.healer.notes), resumed


@check(2)
def ranks_at_different_steps_return_to_the_same_and_halt_if_it_comes_again():
    setup = Setup(incident_steps=50)

    def shift(batch):
        setup.healer.optimizers[0].clipper._state.states[0][STEPS] += 1

    setup.fault(1, 15, shift)
    setup.run(25)
    setup.assert_alike()
    assert set(setup.causes()) == {"desync"}
    assert setup.done[0][3] == ["Rollback", "SkipBatches"]
    if dist.get_rank() == 1:
        setup.faults[setup.healer.attempts + 1] = shift
    with pytest.raises(HealingError) as halted:
        setup.run(60)
    assert halted.value.exit_code == ExitCode.DISTRIBUTED


@check(2)
def what_is_corrupt_in_one_shard_is_found_and_undone_by_all():
    setup = Setup("fsdp")

    def corrupt(batch):
        for state in setup.optimizer.state.values():
            local = state["exp_avg"]._local_tensor
            if local.numel():
                local.view(-1)[0] = math.nan
                return

    setup.fault(1, 17, corrupt)
    setup.run(40)
    setup.assert_alike()
    assert set(setup.causes()) & {"optimizer_corruption", "weight_corruption"}
    assert "Rollback" in setup.actions()


def corrupt_first(tensors, value):
    """Write a value into the first piece that this rank holds; its last one may be empty."""
    for tensor in tensors:
        local = getattr(tensor, "_local_tensor", tensor)
        if local.numel():
            local.detach().view(-1)[0] = value
            return


@check(2)
def infinite_moments_in_the_shard_of_one_rank_are_undone_by_all():
    for rank, first in ((0, 0), (1, 0), (0, 2), (0, 3)):  # of the last two rank 1 holds nothing
        setup = Setup("fsdp")

        def corrupt(batch, setup=setup, first=first):
            moments = [state["exp_avg_sq"] for state in setup.optimizer.state.values()]
            corrupt_first(moments[first:], math.inf)

        setup.fault(rank, 17, corrupt)
        setup.run(40)
        setup.assert_alike()
        assert set(setup.causes()) & {"optimizer_corruption", "weight_corruption"}
        assert "Rollback" in setup.actions()


@check(2)
def a_learning_rate_that_leaps_on_one_rank_is_put_back_before_the_step():
    setup = Setup(scheduler=True)

    def leap(batch):
        setup.optimizer.param_groups[0]["lr"] *= 100

    setup.fault(0, 16, leap)
    setup.run(40)
    setup.assert_alike()
    assert setup.causes() == ["lr_spike"]
    assert "Rollback" not in setup.actions()
    assert setup.optimizer.param_groups[0]["lr"] == pytest.approx(1e-2)


@check(2)
def a_forecast_hears_the_mean_loss_and_warns_alike():
    from heal.lab.forecast import forecast_watch as watch_module

    shipped = watch_module.shipped
    watch_module.shipped = lambda: model_of("loss_rise", weight=1.0, bias=9.0)
    try:
        setup = Setup(forecast=True)
    finally:
        watch_module.shipped = shipped
    own, train_step = [], setup.train_step

    def watched(batch):
        loss = train_step(batch)
        own.append(float(loss.detach()))
        return loss

    setup.train_step = watched
    setup.run(40)
    setup.assert_alike()
    assert setup.causes() == ["instability_ahead"]
    assert setup.actions() == {"TakeSnapshot", "TightenClip", "WatchClosely"}
    forecast = setup.healer.monitor.watch.forecast
    heard = (forecast.evidence, forecast.features.last_loss, forecast.features.second_fast)
    assert len(set(of_all_ranks(heard))) == 1
    losses = of_all_ranks(own)
    assert losses[0][-1] != losses[1][-1]
    mean = [sum(pair) / 2 for pair in zip(*losses, strict=True)]
    assert any(abs(forecast.features.last_loss - loss) < 1e-5 for loss in mean[-4:])


def _damage_weights(setup):
    def do(batch):
        with torch.no_grad():
            for param in setup.model.parameters():
                getattr(param, "_local_tensor", param).mul_(100.0)

    return do


def _damage_on_one_rank_is_found_by_all(wrap):
    setup = Setup(wrap)
    setup.fault(1, 21, _damage_weights(setup))
    setup.run(60)
    setup.assert_alike()
    assert "Rollback" in setup.actions()
    assert setup.healer.experiment.forwards
    assert setup.healer.last_step == 59


@check(2)
def damage_on_one_rank_of_ddp_is_proven_by_all():
    _damage_on_one_rank_is_found_by_all("ddp")


@check(2)
def damage_on_one_rank_of_fsdp_is_proven_by_all():
    _damage_on_one_rank_is_found_by_all("fsdp")


class _Suspicious:
    def observe(self, record):
        evidence = {"loss": record.loss, "usual_loss": record.loss, "noise": 1.0}
        return Finding(
            cause=Cause.LOSS_SPIKE,
            step=record.step,
            bad_step=max(record.step - 1, 0),
            severity=Severity.WARN,
            evidence=evidence,
            wants_proof=True,
        )

    def state(self):
        return {}

    def load_state(self, state):
        pass


def _experiments_change_no_bit(wrap):
    bare = Setup(wrap, norm=wrap == "ddp").run(24)
    expected = [p.detach().clone() for p in bare.model.parameters()]
    setup = Setup(wrap, norm=wrap == "ddp")
    setup.healer.add_detector("suspicious", _Suspicious())
    setup.run(24)
    assert setup.healer.experiment.forwards > 2
    assert not setup.actions()
    for param, other in zip(setup.model.parameters(), expected, strict=True):
        local, theirs = (getattr(t, "_local_tensor", t) for t in (param, other))
        assert torch.equal(local, theirs)


@check(2)
def experiments_of_ddp_change_no_bit():
    _experiments_change_no_bit("ddp")


@check(2)
def experiments_of_fsdp_change_no_bit():
    _experiments_change_no_bit("fsdp")


@check(2)
def nan_in_the_weights_of_one_rank_returns_all_to_a_snapshot_at_once():
    for rank in range(2):
        setup = Setup("fsdp", check_interval=1000)

        def corrupt(batch, setup=setup):
            corrupt_first(setup.model.parameters(), math.nan)

        setup.fault(rank, 17, corrupt)
        setup.run(40)
        setup.assert_alike()
        assert setup.causes()[0] in ("weight_corruption", "nonfinite_loss"), setup.causes()
        first = setup.done[0]
        assert "Rollback" in first[3], setup.done
        assert first[0] <= 17 + 2 + setup.healer.config.lag, setup.done


LATE = 41  # a step of a run that is no longer young


def _written_on_one_rank(wrap, write):
    """Return a run in which ``write(parameter, its state)`` changes one tensor on rank 1.

    In step LATE: writes of weights in the first steps are seen by their version counters.
    """
    setup = Setup(wrap, optimizer=AdamW, check_interval=1000)
    setup.records = []
    setup.healer.on_record(setup.records.append)

    def do(batch):
        param = next(setup.model.parameters())
        with torch.no_grad():
            write(param, setup.optimizer.state[param])

    setup.fault(1, LATE, do)
    setup.run(LATE + 39)
    setup.assert_alike()
    return setup


@check(2)
def a_write_on_one_rank_that_no_update_explains_is_suspected_by_all():
    def write(param, state):
        getattr(param, "_local_tensor", param).mul_(200.0)

    for wrap in ("ddp", "fsdp"):
        setup = _written_on_one_rank(wrap, write)
        flagged = [r.step for r in setup.records if r.has(Flag.FOREIGN_WRITE)]
        assert flagged[0] == LATE + 1, (wrap, flagged)  # the record after that of the step
        assert "weight_drift" in setup.causes() or "loss_spike" in setup.causes(), setup.done
        assert "Rollback" in setup.actions(), (wrap, setup.done)
        # A rollback writes weights, too: that raises no suspicion.
        assert sum("Rollback" in names for *_, names in setup.done) == 1, (wrap, setup.done)


@check(2)
def an_infinite_moment_on_one_rank_is_undone_by_all_without_a_periodic_check():
    def write(param, state):
        getattr(state["exp_avg_sq"], "_local_tensor", state["exp_avg_sq"]).view(-1)[0] = math.inf

    for wrap in ("ddp", "fsdp"):
        setup = _written_on_one_rank(wrap, write)
        assert any(r.has(Flag.STATE_NONFINITE) for r in setup.records), wrap
        assert "Rollback" in setup.actions(), (wrap, setup.done)
        assert setup.done[0][0] <= LATE + 3 + 2 * setup.healer.config.lag, setup.done


@check(2)
def an_announced_write_raises_no_suspicion_on_any_rank():
    setup = Setup(optimizer=AdamW, check_interval=1000)
    setup.records = []
    setup.healer.on_record(setup.records.append)

    def double_the_head(batch):
        setup.healer.expect_change("a larger head")
        with torch.no_grad():
            setup.model.module[-1].weight.mul_(2.0)

    for rank in range(2):
        setup.fault(rank, LATE, double_the_head)
    setup.run(LATE + 19)
    setup.assert_alike()
    assert [r.step for r in setup.records if r.has(Flag.FOREIGN_WRITE)] == [LATE + 1]
    assert "weight_drift" not in setup.causes()
    assert not setup.healer.experiment.settled
