"""A run that needs no healing is bit by bit the run without a healer, generators included."""

import copy
import itertools

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader

from heal import HealingConfig
from heal.causes import Cause
from tests.heal.runs import QUICK, Setup, assert_same, fingerprint, language, regression

STEPS = 45


def with_optimizer(make, **config):
    def build():
        setup = regression(**config)
        setup.optimizer = make(setup.model.parameters())
        return setup

    return build


def with_scheduler(make):
    def build():
        setup = regression()
        setup.scheduler = make(setup.optimizer)
        return setup

    return build


def with_loss(change):
    """The same run with its loss changed in value; a number that depends on the batch is given."""

    def build():
        setup = regression()
        inner = setup.train_step

        def train_step(batch):
            number = int(1e6 * batch[0].double().abs().sum())
            return change(inner(batch), number)

        setup.train_step = train_step
        return setup

    return build


def heavy_tails(loss, number):
    generator = torch.Generator().manual_seed(number)
    return loss * (1 + torch.randn((), generator=generator).abs() ** 3)


def batch_norm():
    def make():
        return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 1))

    return regression(model=make)


def unfreezing():
    setup = regression()
    setup.model[0].weight.requires_grad_(False)
    inner, calls = setup.train_step, []

    def train_step(batch):
        calls.append(1)
        if len(calls) == 20:
            setup.model[0].weight.requires_grad_(True)
        return inner(batch)

    setup.train_step = train_step
    return setup


def swapping():
    """Freeze one part while another of equally many tensors thaws, as GANs and layer-wise runs."""
    setup = regression()
    first, last = setup.model[0], setup.model[5]
    first.requires_grad_(False)
    inner, calls = setup.train_step, []

    def train_step(batch):
        calls.append(1)
        if len(calls) % 12 == 0:
            first.requires_grad_(len(calls) % 24 != 0)
            last.requires_grad_(len(calls) % 24 == 0)
        return inner(batch)

    setup.train_step = train_step
    return setup


def curriculum():
    return with_loss(lambda loss, call: loss * (1 if call < 25 else 4))()


def python_random():
    setup = regression()
    inner = setup.train_step
    import random

    setup.train_step = lambda batch: inner(batch) * (1 + 0.1 * random.random())
    return setup


lr = torch.optim.lr_scheduler
CASES = {
    "dropout": regression,
    "tied weights": language,
    "loader workers": lambda: regression(workers=1),
    "BatchNorm": batch_norm,
    "unfreezing": unfreezing,
    "swapping what is frozen": swapping,
    "loss near zero": with_loss(lambda loss, number: loss * 1e-9),
    "negative loss": with_loss(lambda loss, number: loss - 5),
    "loss around zero": with_loss(lambda loss, number: loss - loss.detach() + (-1) ** number),
    "loss exactly zero": with_loss(lambda loss, number: loss * 0),
    "heavy tails": with_loss(heavy_tails),
    "curriculum jump": curriculum,
    "python random": python_random,
    "LR ends at 0": with_scheduler(lambda o: lr.LinearLR(o, 1.0, 0.0, total_iters=STEPS // 2)),
    "cosine restarts": with_scheduler(lambda o: lr.CosineAnnealingWarmRestarts(o, 20)),
    "one cycle": with_scheduler(lambda o: lr.OneCycleLR(o, 3e-3, total_steps=STEPS + 1)),
    "warm-up": with_scheduler(lambda o: lr.LambdaLR(o, lambda s: min(1.0, (s + 1) / 40))),
    "AdamW not fused": with_optimizer(lambda p: torch.optim.AdamW(p, lr=3e-3)),
    "SGD momentum": with_optimizer(lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, fused=True)),
    "SGD": with_optimizer(lambda p: torch.optim.SGD(p, lr=1e-2)),
    "tensor LR": with_optimizer(lambda p: torch.optim.Adam(p, lr=torch.tensor(3e-3), fused=True)),
    "LR 0": with_optimizer(lambda p: torch.optim.AdamW(p, lr=0.0, fused=True)),
    "RMSprop": with_optimizer(lambda p: torch.optim.RMSprop(p, lr=1e-3)),
    "Adafactor": with_optimizer(lambda p: torch.optim.Adafactor(p)),
    "default settings": lambda: _with_defaults(regression()),
}


def _with_defaults(setup: Setup) -> Setup:
    setup.config = HealingConfig(zclip_enabled=False)
    return setup


@pytest.mark.filterwarnings("ignore:.*is not fused")
@pytest.mark.parametrize("case", CASES)
def test_an_undisturbed_run_is_the_bare_one(case):
    bare = CASES[case]()
    bare.bare(STEPS)
    expected = fingerprint(bare)
    healed = CASES[case]()
    healer = healed.run(STEPS)
    assert_same(fingerprint(healed), expected)
    assert [plan for _, _, plan in healer.history if plan] == []
    assert healer.notes == []


def test_the_three_lines_in_a_hand_written_loop_change_nothing_either():
    bare = regression()
    bare.bare(STEPS)
    healed = regression()
    healer = healed.healer()
    done = 0
    while done < STEPS:
        for batch in healer.batches(healed.loader):
            loss = healed.train_step(batch)
            loss.backward()
            healer.step(loss)
            healed.optimizer.zero_grad()
            done += 1
            if done == STEPS:
                break
    bare.optimizer.zero_grad()
    assert_same(fingerprint(healed), fingerprint(bare))


def test_accumulated_gradients_count_as_one_step():
    bare = regression()
    done = 0
    for _ in range(4):
        for i, batch in enumerate(bare.loader):
            (bare.train_step(batch) * (1 / 4)).backward()
            if i % 4 == 3:
                bare.optimizer.step()
                bare.optimizer.zero_grad()
                done += 1
    healed = regression()
    healer = healed.healer()
    healer.run(healed.train_step, healed.loader, done, accumulate=4, progress=False)
    bare.optimizer.zero_grad()
    expected, found = fingerprint(bare), fingerprint(healed)
    assert healer.last_step == done - 1
    for a, b in zip(expected[:-2], found[:-2], strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_several_optimizers_step_together():
    def build():
        setup = regression()
        params = list(setup.model.parameters())
        setup.optimizer = [
            torch.optim.AdamW(params[:2], lr=1e-3, fused=True),
            torch.optim.SGD(params[2:], lr=1e-2, momentum=0.9, fused=True),
        ]
        return setup

    bare = build()
    for batch in bare.loader:
        bare.train_step(batch).backward()
        for optimizer in bare.optimizer:
            optimizer.step()
            optimizer.zero_grad()
    healed = build()
    healed.run(16)
    for a, b in zip(bare.model.parameters(), healed.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_an_optimizer_that_is_cleared_on_purpose_is_reported_and_left_alone():
    def train(batches, step, setup):
        for taken, batch in enumerate(batches, 1):
            setup.optimizer.zero_grad()
            loss = setup.train_step(batch)
            loss.backward()
            step(loss)
            if taken % 25 == 0:
                setup.optimizer.state.clear()
            if taken == 200:
                return

    bare = regression()
    train(
        itertools.chain.from_iterable(itertools.repeat(bare.loader)),
        lambda _: bare.optimizer.step(),
        bare,
    )
    setup = regression()
    healer = setup.healer()
    endless = itertools.chain.from_iterable(healer.batches(setup.loader) for _ in itertools.count())
    train(endless, healer.step, setup)
    assert_same(fingerprint(setup)[:6], fingerprint(bare)[:6])
    plans = [plan for _, _, plan in healer.history]
    assert plans
    assert not any(plans)
    assert {diagnosis.cause for _, diagnosis, _ in healer.history} == {Cause.OPTIMIZER_RESET}
    healer.exits.dismiss()


def test_a_dry_run_changes_nothing():
    setup = regression()
    setup.scheduler = lr.CosineAnnealingLR(setup.optimizer, 50)
    healer = setup.healer()
    before = fingerprint(setup)
    report = healer.dry_run(setup.train_step, setup.loader)
    assert report.is_ok
    assert len(report.losses) == 2
    assert_same(fingerprint(setup), before)
    healer.run(setup.train_step, setup.loader, STEPS, progress=False)
    bare = regression()
    bare.scheduler = lr.CosineAnnealingLR(bare.optimizer, 50)
    bare.bare(STEPS)
    assert_same(fingerprint(setup), fingerprint(bare))


def test_a_dry_run_rewinds_the_generator_of_the_loader():
    setup = regression()
    generator = torch.Generator().manual_seed(3)
    loader = DataLoader(setup.loader.dataset, batch_size=8, shuffle=True, generator=generator)
    before = generator.get_state()
    healer = setup.healer()
    assert healer.dry_run(setup.train_step, loader).is_ok
    assert torch.equal(generator.get_state(), before)
    healer.exits.dismiss()


class WithTeacher(torch.nn.Module):
    """A frozen teacher that follows its student in every forward, and a count in a buffer."""

    def __init__(self):
        super().__init__()
        self.student, self.teacher = torch.nn.Linear(8, 1), torch.nn.Linear(8, 1)
        self.teacher.requires_grad_(False)
        self.norm = torch.nn.BatchNorm1d(8)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.calls += 1
        with torch.no_grad():
            for mean, weights in zip(
                self.teacher.parameters(), self.student.parameters(), strict=True
            ):
                mean.lerp_(weights, 0.1)
                mean.data.mul_(1.001)
        return self.student(self.norm(x))


@pytest.mark.parametrize("at", [0, 12], ids=["before the run", "in the middle"])
@pytest.mark.parametrize("scaled", [False, True])
def test_a_dry_run_puts_back_frozen_weights_too(at, scaled):
    setup = regression(model=WithTeacher)
    setup.scheduler = lr.CosineAnnealingLR(setup.optimizer, 50)
    scaler = torch.amp.GradScaler("cpu") if scaled else None
    healer = setup.healer(scaler=scaler)
    if at:
        healer.run(setup.train_step, setup.loader, at, progress=False)
    setup.model.eval()

    def everything():
        healed = [o.clipper.state_dict() for o in healer.guarded.optimizers]
        parts = setup.model, setup.optimizer, setup.scheduler
        states = [part.state_dict() for part in parts] + [scaled and scaler.state_dict()]
        return tree_leaves(copy.deepcopy((states, healed, torch.get_rng_state())))

    def train_step(batch):
        setup.model.train()
        loss = setup.train_step(batch)
        setup.scheduler.last_epoch += 1
        return loss

    before, letters = everything(), list(healer.guarded.mailbox._sent)
    assert healer.dry_run(train_step, setup.loader).is_ok
    for now, then in zip(everything(), before, strict=True):
        assert torch.equal(now, then) if isinstance(now, torch.Tensor) else now == then
    assert list(healer.guarded.mailbox._sent) == letters
    assert not setup.model.training
    healer.exits.dismiss()


@pytest.mark.parametrize(
    ("train_step", "problem"),
    [
        (lambda batch: 3.0, "expected the mean loss, a tensor of one number, got float"),
        (lambda batch: torch.ones(()), "does not depend"),
        (lambda batch: batch[0] @ torch.ones(9), "RuntimeError"),
    ],
    ids=["no tensor", "no gradient", "wrong shape"],
)
def test_a_dry_run_finds_mistakes(train_step, problem):
    setup = regression()
    before = fingerprint(setup)
    report = setup.healer().dry_run(train_step, setup.loader)
    assert problem in report.problems[0]
    assert_same(fingerprint(setup), before)


def test_quick_settings_differ_from_the_defaults_only_in_pace():
    assert set(QUICK) <= set(HealingConfig().to_dict())
