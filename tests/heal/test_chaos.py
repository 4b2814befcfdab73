"""Every fault that chaos knows, injected into a training run: found, healed, and no worse off."""

from collections import UserDict, namedtuple
from dataclasses import dataclass

import pytest
import torch

from heal import HealingConfig
from heal.actions import changes_training
from heal.testing import KINDS, Chaos, Fault
from tests.heal.runs import language, regression

STEPS = 110
AT = 55

# What may be diagnosed; which action must be among those taken.
EXPECTED = {
    "nan_gradient": ({"nonfinite_gradient"}, "Skip"),
    "inf_gradient": ({"nonfinite_gradient"}, "Skip"),
    "exploding_gradient": ({"gradient_explosion", "nonfinite_gradient"}, None),
    "nan_loss": ({"nonfinite_loss"}, "Skip"),
    "loss_spike": (set(), None),  # one batch whose loss is high: nothing to undo
    "corrupt_weight": ({"nonfinite_loss", "nonfinite_gradient", "weight_corruption"}, "Rollback"),
    "weight_drift": ({"gradient_explosion", "loss_spike", "weight_corruption"}, None),
    "corrupt_optimizer": (
        {"nonfinite_loss", "nonfinite_gradient", "optimizer_corruption", "weight_corruption"},
        "Rollback",
    ),
    "reset_optimizer": ({"optimizer_reset"}, None),
    "lr_spike": ({"lr_spike", "loss_spike", "gradient_explosion"}, "Rollback"),
    "oom_forward": ({"oom"}, "ShrinkBatch"),
    "oom_backward": ({"oom"}, "ShrinkBatch"),
    "oom_step": ({"oom"}, "Rollback"),
    "bad_batch": ({"data_error"}, "SkipBatches"),
    "nan_batch": ({"nonfinite_loss"}, "Skip"),
    "loader_error": ({"data_error"}, "SkipBatches"),
    "network_error": ({"network_error"}, "Backoff"),
}
NOT_HERE = {"flip_snapshot_bit", "slow_step", "slow_rank", "sigterm", "sigkill"}  # below or apart
CREEPING = {"growing_lr", "oscillating_lr", "creeping_scale", "creeping_noise", "creeping_drift"}


def loss_of(setup):
    """The mean loss over the whole data, without dropout."""
    setup.model.eval()
    with torch.no_grad():
        losses = [setup.train_step(batch).item() for batch in setup.loader]
    setup.model.train()
    return sum(losses) / len(losses)


def struck(make, faults, steps=STEPS, seed=0, **config):
    setup = make(seed, **config)
    healer = setup.healer()
    chaos = Chaos(healer, faults, seed)
    train_step, loader = chaos.wrap(setup.train_step), chaos.wrap_loader(setup.loader)
    healer.run(train_step, loader, steps, progress=False)
    assert healer.last_step == steps - 1
    return setup, healer, chaos


@pytest.fixture(scope="module")
def undisturbed():
    """Losses of the healthy runs before and after, over seeds: what noise looks like."""
    found = {}
    for make in (regression, language):
        before, after = [], []
        for seed in range(2):
            setup = make(seed)
            before.append(loss_of(setup))
            setup.run(STEPS)
            after.append(loss_of(setup))
        found[make.__name__] = (sum(before) / 2, sum(after) / 2)
    return found


def test_every_kind_is_listed():
    assert set(EXPECTED) | NOT_HERE | CREEPING == set(KINDS)


@pytest.mark.parametrize("make", [regression, language], ids=["mlp", "gpt"])
@pytest.mark.parametrize("kind", EXPECTED)
def test_a_fault_is_found_and_healed(kind, make, undisturbed):
    if kind == "nan_batch" and make is language:
        pytest.skip("tokens cannot be NaN")
    causes, action = EXPECTED[kind]
    setup, healer, chaos = struck(make, [Fault(kind, at=AT)])
    assert len(chaos.strikes) == 1
    found = [diagnosis.cause.value for _, diagnosis, _ in healer.history]
    if not causes:  # looked into, and found to be none of the weights
        assert healer.experiment.settled == 1
    else:
        assert found, "nobody noticed"
    assert set(found[:1]) <= causes
    taken = {type(a).__name__ for _, _, plan in healer.history for a in plan}
    assert action is None or action in taken
    assert healer.notes == []
    begin, end = undisturbed[make.__name__]
    # At least two thirds of what the healthy run has learned: a rollback and a lower learning
    # rate cost some steps, and these runs are short.
    assert loss_of(setup) < begin - (begin - end) * 2 / 3


def test_one_nan_batch_costs_one_step_and_nothing_else():
    _, healer, _ = struck(regression, [Fault("nan_gradient", at=AT)])
    assert not any(changes_training(plan) for _, _, plan in healer.history)
    assert healer.lr_scale == 1.0
    assert healer.metrics()["healing/nan_count"] == 1


def test_one_nan_batch_in_twenty_ends_where_skipping_ends():
    faults = [Fault("nan_gradient", at=step) for step in range(7, STEPS, 20)]
    setup, healer, _ = struck(regression, faults)
    assert not any(changes_training(plan) for _, _, plan in healer.history)

    skipped = regression()
    at, attempt = {fault.at for fault in faults}, 0
    while attempt < STEPS:
        for batch in skipped.loader:
            skipped.optimizer.zero_grad()
            skipped.train_step(batch).backward()
            if attempt not in at:
                skipped.optimizer.step()
            attempt += 1
            if attempt == STEPS:
                break
    for a, b in zip(setup.model.parameters(), skipped.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_flipped_bit_in_the_newest_snapshot_makes_the_older_one_serve():
    faults = [Fault("flip_snapshot_bit", at=AT + 3), Fault("corrupt_weight", at=AT + 4)]
    config = {"snapshot_memory_factor": 4.0}
    setup, healer, _ = struck(regression, faults, **config)
    assert "changed in host memory" in healer.notes[0]
    assert all(torch.isfinite(p).all() for p in setup.model.parameters())


@pytest.mark.parametrize("kind", ["slow_step", "slow_rank"])
def test_slow_steps_are_told_and_nothing_is_done_about_them(kind, monkeypatch):
    monkeypatch.setattr(HealingConfig, "throughput_patience", 3)
    faults = [Fault(kind, at=70, times=4, size=0.5)]
    _, healer, _ = struck(regression, faults, steps=90)
    found = [(diagnosis.cause.value, plan) for _, diagnosis, plan in healer.history]
    assert ("throughput_collapse", ()) in found
    assert not any(changes_training(plan) for _, plan in found)


def test_a_fault_may_strike_one_rank_only():
    _, _, chaos = struck(regression, [Fault("nan_loss", at=5, rank=1)], steps=10)
    assert chaos.strikes == []  # this is rank 0
    _, _, chaos = struck(regression, [Fault("nan_loss", at=5, rank=0)], steps=10)
    assert len(chaos.strikes) == 1


def test_a_dozen_faults_by_rate_are_survived_and_are_the_same_for_the_same_seed():
    def strikes():
        faults = [Fault("nan_loss", rate=0.05), Fault("bad_batch", rate=0.03)]
        _, _, chaos = struck(regression, [*faults, Fault("loader_error", rate=0.03)], seed=3)
        return [(s.fault.kind, s.attempt, s.step) for s in chaos.strikes]

    first = strikes()
    assert len({kind for kind, _, _ in first}) == 3
    assert first == strikes()


Pair = namedtuple("Pair", "x y")


@dataclass(frozen=True)
class Sample:
    x: torch.Tensor
    y: torch.Tensor


class Encoding(UserDict):
    """As BatchEncoding of transformers: a constructor of its own."""

    def __init__(self, x, *, y):
        super().__init__({"x": x, "y": y})


CONTAINERS = {
    "tuple": (tuple, lambda batch: batch),
    "dict": (lambda pair: dict(zip("xy", pair, strict=True)), lambda b: (b["x"], b["y"])),
    "namedtuple": (lambda pair: Pair(*pair), lambda batch: (batch.x, batch.y)),
    "dataclass": (lambda pair: Sample(*pair), lambda batch: (batch.x, batch.y)),
    "mapping": (lambda pair: Encoding(pair[0], y=pair[1]), lambda b: (b["x"], b["y"])),
}


@pytest.mark.parametrize("kind", ["bad_batch", "nan_batch"])
@pytest.mark.parametrize("name", CONTAINERS)
def test_batches_of_every_container_can_be_broken(name, kind):
    pack, unpack = CONTAINERS[name]
    setup = regression()
    loader = [pack(batch) for batch in setup.loader]
    healer = setup.healer()
    chaos = Chaos(healer, [Fault(kind, at=10)])
    kinds = []

    def train_step(batch):
        kinds.append(type(batch))
        return setup.train_step(unpack(batch))

    healer.run(chaos.wrap(train_step), loader, 20, progress=False)
    assert set(kinds) == {type(loader[0])}
    assert len(chaos.strikes) == 1
    assert next(d.cause.value for _, d, _ in healer.history) in EXPECTED[kind][0]
    assert all(tensor.isfinite().all() and tensor.numel() for b in loader for tensor in unpack(b))


def test_a_fault_that_finds_nothing_to_break_is_no_strike():
    setup = regression()
    setup.optimizer = torch.optim.SGD(setup.model.parameters(), lr=1e-3)
    healer = setup.healer()
    kinds = ["reset_optimizer", "corrupt_optimizer", "flip_snapshot_bit"]
    healer.training.ring.newest_good = lambda: None
    chaos = Chaos(healer, [Fault(kind, at=5) for kind in kinds])
    healer.run(chaos.wrap(setup.train_step), setup.loader, 10, progress=False)
    assert chaos.strikes == []
    assert [fault.kind for fault in chaos.not_struck] == kinds
    tokens = language()
    healer = tokens.healer()
    chaos = Chaos(healer, [Fault("nan_batch", at=5)])
    healer.run(chaos.wrap(tokens.train_step), tokens.loader, 10, progress=False)
    assert chaos.strikes == []


@pytest.mark.parametrize("other", ["nan_gradient", "reset_optimizer"])
def test_of_two_faults_at_one_attempt_only_what_happened_is_recorded(other):
    _, healer, chaos = struck(
        regression, [Fault("network_error", at=10), Fault(other, at=10)], steps=20
    )
    assert [strike.fault.kind for strike in chaos.strikes] == ["network_error"]
    assert [fault.kind for fault in chaos.not_struck] == [other]
    assert healer.metrics()["healing/nan_count"] == 0


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ({"at": -3}, "at: expected a whole number >= 0, got -3"),
        ({"at": "3"}, "at: expected a whole number >= 0, got '3'"),
        ({"at": 2.5}, "at: expected a whole number >= 0, got 2.5"),
        ({"at": True}, "at: expected a whole number >= 0, got True"),
        ({"at": 3, "times": 0}, "times: expected a whole number >= 1, got 0"),
        ({"at": 3, "times": 1.5}, "times: expected a whole number >= 1, got 1.5"),
        ({"at": 3, "size": "big"}, "size: expected a number or None, got 'big'"),
        ({"at": 3, "rank": -1}, "rank: expected a whole number >= 0, got -1"),
        ({"rate": float("nan")}, "at most 1, got nan"),
        ({"rate": "0.5"}, "at most 1, got '0.5'"),
    ],
)
def test_a_fault_that_could_never_strike_is_refused(told, message):
    with pytest.raises(ValueError, match=message):
        Fault("nan_loss", **told)


def test_an_unknown_fault_is_named():
    with pytest.raises(ValueError, match=r"fault: expected one of nan_gradient.*, got 'sharknado'"):
        Fault("sharknado", at=1)
    with pytest.raises(ValueError, match="expected a step, or a rate"):
        Fault("nan_loss")
