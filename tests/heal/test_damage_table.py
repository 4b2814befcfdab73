"""The table of damage: it strikes once, judges by undamaged twins, and has a row for each kind."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import benchmarks.damage
from benchmarks.damage.families import FAMILIES, make
from benchmarks.damage.kinds import HEALED, KINDS, LAST_GOOD, REPORTED, Kind, Striker
from benchmarks.damage.runs import OLDER, Ended, train
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


@pytest.mark.parametrize("mode", ["run", "loop"])
@pytest.mark.parametrize("at", [1, 2])
def test_damage_in_the_first_steps_heals(at, mode):
    kind = next(kind for kind in KINDS if kind.name == "all weights x 1000")
    twin = train(make("MLP", 3, steps=STEPS), None, 0, STEPS, "heal")
    ended = train(make("MLP", 3, steps=STEPS), replace(kind, at=at), 3, STEPS, "heal", mode)
    assert ended.rollbacks == 1
    assert ended.loss < 1.1 * twin.loss


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
    assert limit_of([1.0, 1.0, 1.0, 1.0], 1.0) == pytest.approx(1.1)
    assert limit_of([1.0, 1.0, 1.0, 1.0], 2.0) == pytest.approx(2.2)
    assert limit_of([1.0, 2.0, 3.0, 2.0], 1.0) == pytest.approx(2.0 + 3 * math.sqrt(2 / 3))


def test_the_twin_of_a_healed_run_has_the_batches_of_the_steps_that_counted(records):
    """Without dropout it is the healed run, bit by bit: nothing is left of damage and healing."""
    nan = next(kind for kind in KINDS if kind.name == "weights NaN")
    ended = train(make("CNN", 0, steps=STEPS), nan, 0, STEPS, "heal")
    assert ended.rollbacks == 1
    assert len(ended.batches) == STEPS
    twin = make("CNN", 0, steps=STEPS)._replace(loader=ended.batches)
    assert train(twin, None, 0, STEPS, "heal").loss == ended.loss
    (record, *_) = [r for r in records if r["kind"] == "weights NaN" and r["rollbacks"]]
    (first, *_) = [r for r in records if r["kind"] == "undamaged" and r["protection"] == "heal"]
    assert record["twin"] != first["loss"]


def test_an_older_version_is_measured_in_a_process_of_its_own(tmp_path):
    """Its heal and zclip, our benchmark: here a copy of this version stands for it."""
    here = Path(benchmarks.damage.__file__).parents[2]
    for package in ("heal", "zclip"):
        (tmp_path / package).symlink_to(here / package)
    job = Job("MLP", 0, ("weights NaN",), ("run", "loop"), (OLDER,), 60, other=str(tmp_path))
    (record,) = [r for r in run_job(job) if r["kind"] == "weights NaN"]
    assert (record["protection"], record["verdict"]) == (OLDER, "healed")
    assert run_job(job._replace(other="")) == []


def test_the_page_names_what_was_not_measured(records):
    text = "\n".join(page(records))
    assert "Not measured: clipping, version 0.1, ARC." in text
    assert "None: 0/2 as required" in text


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
