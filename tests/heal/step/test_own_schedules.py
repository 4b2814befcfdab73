"""After a rollback the rate is the factor times the schedule, whoever steps the scheduler."""

from functools import cache

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as schedules

from heal import Healer, HealingConfig
from heal.actions import Rollback
from heal.causes import Cause, Finding, Severity
from tests.heal.runs import roll_back_after_skipped

EPOCH, EPOCHS = 25, 4
TOTAL = EPOCH * EPOCHS
FACTOR, RAMP = 0.25, 20
BAD = range(53, 59)  # soon after the second epoch: the newest good snapshot is of the one before

PER_EPOCH = {
    "step": lambda o: schedules.StepLR(o, 2, 0.1),
    "multi step": lambda o: schedules.MultiStepLR(o, [1, 3], 0.3),
    "exponential": lambda o: schedules.ExponentialLR(o, 0.5),
    "cosine": lambda o: schedules.CosineAnnealingLR(o, EPOCHS),
    "cosine restarts": lambda o: schedules.CosineAnnealingWarmRestarts(o, 2),
    "plateau": lambda o: schedules.ReduceLROnPlateau(o, factor=0.5, patience=0),
}
PER_STEP = {
    "lambda": lambda o: schedules.LambdaLR(o, lambda step: 1 / (1 + step)),
    "one cycle": lambda o: schedules.OneCycleLR(o, 0.1, TOTAL + 1),
    "restarts": lambda o: schedules.CosineAnnealingWarmRestarts(o, 15),
    "sequential": lambda o: schedules.SequentialLR(
        o, [schedules.LinearLR(o, 0.1, 1.0, 10), schedules.CosineAnnealingLR(o, TOTAL)], [10]
    ),
    "chained": lambda o: schedules.ChainedScheduler(
        [schedules.ConstantLR(o, 0.5, 30), schedules.ExponentialLR(o, 0.99)]
    ),
    "linear": lambda o: schedules.LinearLR(o, 1.0, 0.1, TOTAL),
    "polynomial": lambda o: schedules.PolynomialLR(o, TOTAL, 2.0),
    "cyclic": lambda o: schedules.CyclicLR(o, 1e-3, 1e-1, 20),
    "exponential": lambda o: schedules.ExponentialLR(o, 0.97),
    "step": lambda o: schedules.StepLR(o, 20, 0.5),
    "multi step": lambda o: schedules.MultiStepLR(o, [30, 54], 0.5),
    "cosine": lambda o: schedules.CosineAnnealingLR(o, TOTAL),
}


class Loop:
    """A hand-written loop over a few epochs, whose caller steps the scheduler."""

    def __init__(
        self,
        make,
        bad=(),
        per_epoch=True,
        given="own",
        data="skip_data",
        tensor_lr=False,
        also=None,
    ):
        torch.manual_seed(0)
        self.model = nn.Linear(4, 1)
        lr = torch.tensor(1e-2) if tensor_lr else 1e-2
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=lr, momentum=0.9)
        self.scheduler = make(self.optimizer)
        config = HealingConfig(
            snapshot_interval=10,
            quarantine_steps=4,
            lr_factor=FACTOR,
            lr_ramp_steps=RAMP,
            after_rollback=data,
        )
        given_as = {"own": "own_schedulers", "given": "scheduler"}.get(given)
        options = {given_as: self.scheduler} if given_as else {}
        if also is not None:
            options["own_schedulers"] = also(self.optimizer)
        self.healer = Healer(self.model, self.optimizer, config=config, **options)
        self.healer.exits.dismiss()
        roll_back_after_skipped(self.healer)
        self.bad = set(bad)
        self.per_epoch, self.steps_it = per_epoch, given != "given"
        self.used = []  # rate and momentum of every update that was made
        self.wanted = []  # what the schedule said after each epoch
        self.optimizer.register_step_pre_hook(self._note)
        self.updates = []  # what was used, what the schedule said, and the factor
        self.by_step = {}  # what the schedule said

    def _note(self, optimizer, *_):
        self.used.append(self._settings())

    def _settings(self):
        group = self.optimizer.param_groups[0]
        return float(group["lr"]), group["momentum"]

    def train(self):
        batches = [torch.randn(8, 4) for _ in range(EPOCH)]
        taken = 0
        for _ in range(EPOCHS):
            for batch in self.healer.batches(batches):
                loss = self.model(batch).square().mean()
                if taken in self.bad:
                    loss = loss * float("nan")
                loss.backward()
                scheduled, scale = self._settings(), self.healer.lr_scale
                step, updates = self.healer.last_step + 1, len(self.used)
                self.healer.step(loss)
                self.optimizer.zero_grad()
                if len(self.used) > updates:
                    self.updates.append((self.used[-1], scheduled, scale))
                    lr, momentum = self.used[-1]
                    self.by_step.setdefault(step, []).append((lr / scale, momentum))
                taken += 1
                if not self.per_epoch and self.steps_it:
                    self.scheduler.step()
            if self.per_epoch and self.steps_it:
                metric = (1.0,) if isinstance(self.scheduler, schedules.ReduceLROnPlateau) else ()
                self.scheduler.step(*metric)
            self.wanted.append(self._settings())
        return self

    @property
    def rollbacks(self):
        plans = [plan for _, _, plan in self.healer.history]
        return [plan for plan in plans if any(isinstance(a, Rollback) for a in plan)]


@cache
def undisturbed(name, per_epoch=True, tensor_lr=False):
    """The same schedule where nothing happens."""
    make = (PER_EPOCH if per_epoch else PER_STEP)[name]
    return Loop(make, per_epoch=per_epoch, tensor_lr=tensor_lr).train()


@pytest.mark.parametrize("tensor_lr", [False, True], ids=["number", "tensor"])
@pytest.mark.parametrize(
    ("name", "given"),
    [(name, "own") for name in PER_EPOCH]
    + [(name, "not given") for name in PER_EPOCH if name != "plateau"],  # that one leaves no mark
)
def test_a_schedule_stepped_per_epoch_goes_on_as_in_an_undisturbed_run(name, given, tensor_lr):
    calm = undisturbed(name, tensor_lr=tensor_lr)
    hurt = Loop(PER_EPOCH[name], BAD, given=given, tensor_lr=tensor_lr).train()
    assert len(hurt.rollbacks) == 1
    assert hurt.healer.last_step < calm.healer.last_step
    assert hurt.wanted == calm.wanted
    assert_ramps_back(hurt)


@pytest.mark.parametrize("given", ["own", "not given"])
@pytest.mark.parametrize("name", PER_STEP)
def test_so_does_one_that_the_caller_steps_with_every_batch(name, given):
    calm = undisturbed(name, per_epoch=False)
    hurt = Loop(PER_STEP[name], BAD, per_epoch=False, given=given).train()
    assert len(hurt.rollbacks) == 1
    assert hurt.wanted == calm.wanted
    assert_ramps_back(hurt)


@pytest.mark.parametrize("name", PER_STEP)
def test_one_that_the_healer_steps_returns_with_the_steps(name):
    calm = undisturbed(name, per_epoch=False)
    hurt = Loop(PER_STEP[name], BAD, per_epoch=False, given="given").train()
    assert len(hurt.rollbacks) == 1
    assert_ramps_back(hurt)
    assert_same_at_every_step(hurt, calm)


def assert_ramps_back(loop):
    """Every update had the schedule's rate times the factor; that starts low and ends at 1."""
    for (lr, momentum), scheduled, scale in loop.updates:
        assert lr == pytest.approx(scheduled[0] * scale, rel=1e-6)
        assert momentum == scheduled[1]
    scales = [scale for _, _, scale in loop.updates]
    lowered = [scale for scale in scales if scale < 1.0]
    assert lowered == pytest.approx([FACTOR + (1 - FACTOR) * i / RAMP for i in range(RAMP)])
    assert scales[-1] == 1.0


def assert_same_at_every_step(hurt, calm, before=TOTAL):
    for step, rates in hurt.by_step.items():
        for rate in rates if step < before else ():
            assert rate == pytest.approx(calm.by_step[step][0], rel=1e-9), step


@pytest.mark.parametrize(
    ("name", "per_epoch"), [(n, True) for n in PER_EPOCH] + [(n, False) for n in PER_STEP]
)
def test_with_replay_every_step_has_the_rate_that_it_had(name, per_epoch):
    make = (PER_EPOCH if per_epoch else PER_STEP)[name]
    calm = undisturbed(name, per_epoch)
    hurt = Loop(make, BAD, per_epoch=per_epoch, data="replay_data").train()
    assert len(hurt.rollbacks) == 1
    # Of the epoch that failed some batches are left out, so that the next begins some steps sooner.
    assert_same_at_every_step(hurt, calm, before=BAD.stop if per_epoch else TOTAL)
    assert not per_epoch or hurt.wanted == calm.wanted


@pytest.mark.parametrize("bad", [BAD, range(6)], ids=["late", "at once"])
def test_in_run_the_caller_steps_again_what_was_rolled_back(bad):
    calm, hurt = loops = Loop(PER_EPOCH["exponential"]), Loop(PER_EPOCH["exponential"], bad)
    for loop in loops:
        healer, scheduler = loop.healer, loop.scheduler

        def note(optimizer, *_, loop=loop, healer=healer):
            lr, momentum = loop._settings()
            at = healer.last_step + 1
            loop.by_step.setdefault(at, []).append((lr / healer.lr_scale, momentum))

        def train_step(batch, loop=loop, healer=healer):
            loss = loop.model(batch).square().mean()
            return loss * float("nan") if healer.attempts - 1 in loop.bad else loss

        def on_step(step, scheduler=scheduler):
            if step % 10 == 9:
                scheduler.step()

        batches = [torch.randn(8, 4) for _ in range(EPOCH)]
        loop.optimizer.register_step_pre_hook(note)
        healer.run(train_step, batches, TOTAL, progress=False, on_step=on_step)
    assert len(hurt.rollbacks) == 1
    assert_same_at_every_step(hurt, calm)


@pytest.mark.parametrize("bad", [(), BAD], ids=["healthy", "rolled back"])
def test_a_schedule_that_was_not_given_is_asked_for_once(bad):
    (note,) = Loop(PER_EPOCH["step"], bad, given="not given").train().healer.notes
    assert "a scheduler of SGD was not given" in note
    assert "give it as own_schedulers" in note


@pytest.mark.parametrize("given", ["own", "given"])
def test_one_that_was_given_is_not_asked_for(given):
    loop = Loop(PER_STEP["cosine"], per_epoch=False, given=given).train()
    assert loop.healer.notes == []


@pytest.mark.parametrize("name", ["step", "cosine restarts"])
def test_with_replay_too_one_that_was_not_given_goes_on(name):
    hurt = Loop(PER_EPOCH[name], BAD, given="not given", data="replay_data").train()
    assert len(hurt.rollbacks) == 1
    assert hurt.wanted == undisturbed(name).wanted


@pytest.mark.parametrize("beside", ["alone", "beside a plateau"])
def test_rates_of_a_schedule_that_was_not_given_are_not_taken_for_faults(beside):
    def leap(optimizer):
        return schedules.LambdaLR(optimizer, lambda epoch: [1.0, 5.0, 1e-4, 4.0, 1.0][epoch])

    loop = Loop(leap, given="not given")
    if beside == "beside a plateau":
        loop = Loop(leap, given="not given", also=schedules.ReduceLROnPlateau)
    loop.train()
    assert loop.rollbacks == []
    assert loop.healer.lr_scale == 1.0
    facts = [d for _, d, _ in loop.healer.history if d.evidence.get("measured")]
    assert facts == []


def test_no_experiment_steps_a_schedule_that_was_not_given():
    """A second run of the loop's body would; a flood of doubt asks for one at every step."""
    loop = Loop(PER_STEP["cosine"], per_epoch=False, given="not given")
    doubt = Doubt()
    loop.healer.add_detector("doubt", doubt)
    loop.train()
    assert doubt.asked
    assert loop.scheduler.last_epoch == TOTAL
    assert loop.wanted == undisturbed("cosine", per_epoch=False).wanted


class Doubt:
    """Suspects damage at every step."""

    def __init__(self):
        self.asked = 0

    def observe(self, record):
        self.asked += 1
        return Finding(
            cause=Cause.DIVERGENCE,
            step=record.step,
            bad_step=max(record.step - 1, 0),
            severity=Severity.WARN,
            evidence={"loss": record.loss, "usual_loss": record.loss, "noise": 0.1},
            wants_proof=True,
        )

    def state(self):
        return {}

    def load_state(self, state):
        pass


def test_a_rate_that_no_scheduler_sets_is_returned_and_that_is_said():
    class Dropped:
        def __init__(self, optimizer):
            self.group = optimizer.param_groups[0]

        def step(self):
            self.group["lr"] *= 0.5

    loop = Loop(Dropped, BAD, given="not given").train()
    (note,) = loop.healer.notes
    assert "from 0.0025 to 0.005" in note


def test_one_that_is_stepped_by_two_is_named():
    loop = Loop(PER_STEP["cosine"], per_epoch=False, given="given")
    loop.steps_it = True
    assert any("by other code" in note for note in loop.train().healer.notes)


def test_an_epoch_schedule_that_is_stepped_with_every_batch_is_named():
    loop = Loop(lambda o: schedules.StepLR(o, 2, 0.1), per_epoch=False, given="given").train()
    (note,) = loop.healer.notes
    assert "StepLR is stepped at every step" in note
    assert "own_schedulers" in note


def test_own_schedules_are_checked():
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = schedules.StepLR(optimizer, 2)
    with pytest.raises(TypeError, match=r"own_schedulers\[0\]: expected .* got str"):
        Healer(model, optimizer, own_schedulers=["cosine"])
    with pytest.raises(ValueError, match=r"own_schedulers\[0\]: expected .* got StepLR, which"):
        Healer(model, optimizer, scheduler, own_schedulers=scheduler)


def test_own_schedules_are_in_checkpoints(tmp_path):
    def make():
        loop = Loop(PER_EPOCH["exponential"])
        options = {"own_schedulers": loop.scheduler, "checkpoint_dir": tmp_path}
        healer = Healer(loop.model, loop.optimizer, **options)
        healer.exits.dismiss()
        return loop, healer

    loop, healer = make()
    for epoch in range(2):
        for batch in healer.batches([torch.randn(8, 4) for _ in range(5)]):
            loss = loop.model(batch).square().mean()
            loss.backward()
            healer.step(loss)
        loop.scheduler.step()
        assert loop.scheduler.last_epoch == epoch + 1
    healer.save_checkpoint()
    again, fresh = make()
    assert fresh.resume() == 10
    assert again.scheduler.last_epoch == 2
    assert again._settings() == loop._settings()
