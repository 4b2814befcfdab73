"""The table of damage: it strikes once, judges by undamaged twins, and has a row for each kind."""

import math

import pytest
import torch

from benchmarks.damage.families import FAMILIES, make
from benchmarks.damage.kinds import HEALED, KINDS, LAST_GOOD, REPORTED, Kind, Striker
from benchmarks.damage.runs import Ended, train
from benchmarks.damage.table import Job, limit_of, page, run_job, verdict

STEPS = 150


@pytest.fixture(scope="module")
def records():
    kinds = "weights NaN", "all weights x 1000"
    return run_job(Job("MLP", 0, kinds, ("run", "loop"), ("none", "heal"), STEPS))


@pytest.mark.parametrize("mode", ["run", "loop"])
def test_weights_that_become_nan_heal(records, mode):
    (record,) = [
        r
        for r in records
        if (r["kind"], r["protection"], r["mode"]) == ("weights NaN", "heal", mode)
    ]
    assert record["verdict"] == "healed"
    assert record["rollbacks"] == 1
    assert record["at"] <= record["detected"] < record["at"] + 20


def test_damage_without_protection_is_not_healed(records):
    bare = [r for r in records if r["protection"] == "none" and r["kind"] != "undamaged"]
    assert [r["verdict"] for r in bare] == ["not healed", "not healed"]
    assert [r["loss"] is None for r in bare] == [False, True]  # NaN is written as null


def test_the_page_has_a_row_for_each_kind(records):
    text = "\n".join(page(records))
    assert "| weights NaN | 0/1 | 1/1 | 1/1 |" in text
    assert "Undamaged runs: 6; 0 changed" in text


def test_there_is_damage_of_many_kinds_to_every_family():
    names = [kind.name for kind in KINDS]
    assert len(names) == len(set(names)) >= 18
    assert {family for kind in KINDS for family in kind.families} <= set(FAMILIES)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_every_kind_changes_a_training(kind):
    """Ten steps, then the damage, then two steps more: the model is not what it would have been."""
    family = kind.families[0] if kind.families else "MLP"
    ends = []
    for struck in (kind, None):
        training = make(family, 0, steps=12)
        striker = Striker(struck, training, 10, seed=0)
        for batch in striker.loader():
            striker.before_attempt()
            training.train_step(batch).backward()
            training.optimizer.step()
            training.optimizer.zero_grad()
        ends.append(torch.cat([t.float().flatten() for t in training.model.state_dict().values()]))
    assert not torch.equal(*ends)


def test_damage_strikes_once_however_often_the_step_is_repeated():
    hits = []
    kind = Kind("count", strike=lambda victim: hits.append(1), bad_batches=2)
    striker = Striker(kind, make("MLP", 0, steps=10), 3, seed=0)
    for _ in range(20):
        striker.before_attempt()
    assert hits == [1]
    bad = [not bool(batch[0].isfinite().all()) for _ in range(2) for batch in striker.loader()]
    assert [i for i, is_bad in enumerate(bad) if is_bad] == [3, 4]


def test_the_same_run_twice_ends_the_same():
    losses = [train(make("GPT", 1, steps=20), None, 1, 20, "none").loss for _ in range(2)]
    assert losses[0] == losses[1]
    assert train(make("GPT", 1, order=1, steps=20), None, 1, 20, "none").loss != losses[0]


def test_a_loss_counts_as_healed_within_a_tenth_or_the_noise_of_the_twins():
    assert limit_of([1.0, 1.0, 1.0, 1.0]) == pytest.approx(1.1)
    assert limit_of([1.0, 2.0, 3.0, 2.0]) == pytest.approx(2.0 + 3 * math.sqrt(2 / 3))


@pytest.mark.parametrize(
    ("demand", "ended", "expected"),
    [
        (HEALED, Ended(1.0), "healed"),
        (HEALED, Ended(2.0, reports={"loss_spike": 1}), "not healed"),
        (HEALED, Ended(math.nan), "not healed"),
        (HEALED, Ended(1.0, died="HealingError"), "halted"),
        (REPORTED, Ended(2.0, reports={"loss_spike": 1}), "reported"),
        (REPORTED, Ended(2.0, reports={}), "not healed"),
        (LAST_GOOD, Ended(1.0), "not the last good weights"),
        (LAST_GOOD, Ended(2.0, died="HealingError", keeps_last_good=True), "last good"),
    ],
)
def test_the_verdict_follows_the_demand(demand, ended, expected):
    assert verdict(Kind("x", demand=demand), ended, limit=1.1) == expected
