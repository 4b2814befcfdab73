"""Learning rates that ruin a run, those that only seem to, and what is said about them."""

import json
from itertools import islice

import pytest
import torch
from torch.optim import lr_scheduler as schedulers

from benchmarks.damage.families import make
from benchmarks.damage.kinds import KINDS
from benchmarks.damage.runs import train
from benchmarks.damage.table import TOLERANCE
from benchmarks.healthy.problems import Classes, cross_entropy, mlp
from heal import Healer
from heal.actions import HealingError, HoldLr, Rollback, SkipBatches
from heal.exit_codes import ExitCode

STEPS = 500


def kind(name):
    (found,) = [kind for kind in KINDS if kind.name == name]
    return found


@pytest.mark.parametrize(("family", "seed"), [("MLP", 2), ("MLP", 3), ("GPT", 2)])
def test_a_rate_far_too_high_from_the_start_is_reported_and_never_lowered(family, seed):
    """The loss of the MLP goes to that of the frequencies of classes, a little below the first."""
    ended = train(make(family, seed), kind("LR x 1000 from the start"), seed, STEPS, "heal")
    assert ended.reports["not_learning"] <= 2  # by the second damage, and after 100 steps
    assert ended.rollbacks <= 1
    assert (ended.lr_changes, ended.died) == (0, "")


def training(family, optimizer, steps, folder):
    """Train at a rate that is far too high; return the healer and the events of its journal."""
    made = make(family, 71)
    optimizer = optimizer(made.model.parameters())
    healer = Healer(made.model, optimizer, run_dir=folder)
    error = None
    try:
        healer.run(made.train_step, made.loader, steps, progress=False)
    except HealingError as halt:
        error = halt
    lines = (folder / "events.jsonl").read_text().splitlines()
    return made.model, error, [json.loads(line) for line in lines]


def test_damage_that_comes_again_before_anything_was_learned_is_not_called_healed(tmp_path):
    """Batch norm soon hides that the weights have exploded: the loss comes back to chance."""
    _, error, events = training("CNN", lambda p: torch.optim.AdamW(p, lr=2.0), 200, tmp_path)
    plans = [[a["action"] for a in e["plan"]] for e in events if e["event"] == "recovery"]
    assert (error, plans) == (None, [["Rollback", "SkipBatches"]])
    alert = next(e for e in events if e.get("failure") == "not_learning")
    assert alert["evidence"]["lr"] == 2.0
    assert "damage the first weights again" in alert["evidence"]["advice"]
    assert not any(e["healed"] for e in events if e["event"] == "outcome")


def test_a_loss_that_is_not_even_finite_ends_the_run_with_its_first_weights(tmp_path):
    first = [p.detach().clone() for p in make("MLP", 71).model.parameters()]
    model, halt, _ = training("MLP", lambda p: torch.optim.SGD(p, lr=50.0), STEPS, tmp_path)
    assert halt.exit_code == ExitCode.UNRECOVERABLE
    assert "use a far lower learning rate" in str(halt)
    assert all(map(torch.equal, model.parameters(), first))


def test_a_snapshot_from_amid_the_damage_is_not_returned_to_though_better_than_today(
    tmp_path,
):
    """After one step at this rate the loss is 1,000, and a few steps later 1e18."""
    _, halt, events = training(
        "CNN", lambda p: torch.optim.SGD(p, lr=50.0, momentum=0.9), 100, tmp_path
    )
    plans = [e["plan"] for e in events if e["event"] == "recovery"]
    targets = [a["before_step"] for plan in plans for a in plan if a["action"] == "Rollback"]
    assert targets == [0, 0]
    assert halt.exit_code == ExitCode.UNRECOVERABLE


@pytest.mark.parametrize(("family", "seed"), [("MLP", 32), ("regression", 33)])
def test_weights_from_before_a_rate_began_to_creep_are_returned_to(family, seed):
    """Snapshots taken meanwhile hold some of the damage, and the batch seems hard for them too."""
    healed = train(make(family, seed), kind("LR + 3 % per step"), seed, STEPS, "heal")
    twin = train(make(family, seed)._replace(loader=healed.batches), None, seed, STEPS, "none")
    assert healed.loss <= TOLERANCE * twin.loss


@pytest.mark.parametrize("rate", [0.1, -2e-3])
def test_a_rate_set_beside_the_schedule_is_held_on_it_once_it_has_done_damage(rate, tmp_path):
    """A cosine of torch multiplies the rate that it finds, so that it follows the wrong one."""

    def trained(change, batches=None):
        made = make("MLP", 61)
        schedule = schedulers.CosineAnnealingLR(made.optimizer, STEPS)
        healer = Healer(made.model, made.optimizer, schedule, run_dir=tmp_path)
        used = {}
        for batch in healer.batches(made.loader if batches is None else batches):
            step = healer.last_step + 1
            if change and step >= 200:
                made.optimizer.param_groups[0]["lr"] = rate
            loss = made.train_step(batch)
            loss.backward()
            healer.step(loss)
            made.optimizer.zero_grad()
            used[step] = batch
        healer.close()
        return made.evaluate(), healer, [used[step] for step in sorted(used)]

    loss, healer, batches = trained(change=True)
    (plan,) = [plan for _, diagnosis, plan in healer.history if plan]
    assert [type(action) for action in plan] == [Rollback, SkipBatches, HoldLr]
    assert healer.metrics()["healing/recovery_attempts"] == 1.0
    assert loss <= TOLERANCE * trained(change=False, batches=batches)[0]


def cyclic(seed, healed):
    classes, model = Classes(seed), mlp(16, 5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
    schedule = schedulers.CyclicLR(optimizer, 0.01, 0.3, 50)
    loss_of, batches = cross_entropy(model), islice(classes.stream(), 200)
    healer = Healer(model, optimizer, schedule, {"zclip_enabled": False}) if healed else None
    for batch in batches if healer is None else healer.batches(list(batches)):
        loss = loss_of(batch)
        loss.backward()
        if healer is None:
            optimizer.step()
            schedule.step()
        else:
            healer.step(loss)
        optimizer.zero_grad()
    if healer is not None:
        healer.close()
        assert not healer.recoveries
    return list(model.parameters())


def test_a_climb_is_no_damage_while_the_schedule_raises_the_rate():
    assert all(map(torch.equal, cyclic(34, healed=True), cyclic(34, healed=False)))
